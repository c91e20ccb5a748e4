"""The parent: names the process that failed and why, and restarts it."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tpu_embedding.tools.jobs import __main__ as entry

FAKE = pathlib.Path(__file__).parent / "fake_worker.py"
DEADLINE_SECONDS = 30  # for a busy machine; each test takes below a second


class Run:
    """A parent and its fake worker."""

    def __init__(
        self,
        folder,
        attempts,
        *options,
        worker_options=(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        before=(),
    ):
        self.folder = folder
        settings = {
            **{"pause": 0, "last_words": 0.3},
            **dict(zip(options[::2], options[1::2], strict=True)),
            "command": [
                *(sys.executable, "-I", str(FAKE)),
                *(str(folder), json.dumps(attempts), *worker_options),
            ],
        }
        command = [sys.executable, *before, "-I", entry.__file__, json.dumps(settings)]
        self.process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def finish(self):
        self.out, self.err = self.process.communicate(timeout=DEADLINE_SECONDS)
        self.status = self.process.returncode
        return self

    def await_ready(self):
        end = time.monotonic() + DEADLINE_SECONDS
        while not (self.folder / "ready").exists():
            assert time.monotonic() < end
            assert self.process.poll() is None, self.process.stderr.read()

    def arguments(self, attempt):
        return json.loads((self.folder / f"arguments-{attempt}").read_text())


def run(*arguments, **options):
    return Run(*arguments, **options).finish()


def test_the_parent_imports_neither_jax_nor_the_package():
    code = (
        "import json, runpy, sys\n"
        "settings = json.dumps({'command': [sys.executable, '-c', '']})\n"
        "sys.argv = ['parent', settings]\n"
        f"try: runpy.run_path({entry.__file__!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "own = [n for n in sys.modules if n.startswith('tpu_embedding')]\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
        "folders = {'.'.join(name.split('.')[1:3]) for name in own}\n"
        "assert folders == {'', 'tools', 'tools.jobs'}, own\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=60)


def test_output_and_options_pass(tmp_path):
    attempts = [["print:one", "error:two"]]
    ended = run(tmp_path, attempts, worker_options=["--data", "x"])
    assert (ended.status, ended.out, ended.err) == (0, "one\n", "two\n")
    assert ended.arguments(0) == ["--data", "x"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_a_full_disk_does_not_end_the_worker(tmp_path):
    with open("/dev/full", "w") as full:
        ended = run(tmp_path, [["print:one", "touch:done"]], stdout=full)
    assert ended.status == 0, ended.err
    assert (tmp_path / "done").exists()


@pytest.mark.full(every_case=True)
def test_a_slow_reader_gets_the_whole_output(tmp_path):
    """One pipe of 64 KiB is full, so the worker ends before all has passed."""
    started = Run(tmp_path, [["lines:2200"]])
    time.sleep(3)
    assert len(started.finish().out.splitlines()) == 2200
    assert started.status == 0


@pytest.mark.parametrize("then", ["reads", "signals"])
def test_a_terminal_that_takes_no_output_does_not_stop_the_watch(tmp_path, then):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    os.set_blocking(writer, True)
    attempts = [["print:one", "touch:ready", "kill:SIGKILL"]]
    started = Run(tmp_path, attempts, stdout=writer, stderr=writer)
    os.close(writer)
    started.await_ready()
    end = time.monotonic() + DEADLINE_SECONDS
    while is_alive(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.01)
    if then == "signals":
        started.process.send_signal(signal.SIGTERM)
        assert started.finish().status == 1
    with open(reader, "rb") as file:
        output = file.read()
    assert (b"supervisor: the process" in output) == (then == "reads")
    assert started.finish().status == 1


FAILURES = {
    "exit": (["error:no such file", "exit:3"], 3, r"ended with exit status 3"),
    "usage": (["exit:2"], 2, r"ended with exit status 2"),
    "killed": (["kill:SIGKILL"], 1, r"was killed by SIGKILL .*when memory runs out"),
    "crash": (["kill:SIGSEGV"], 1, r"was killed by SIGSEGV .*native code crashed"),
    "abort": (["abort:"], 1, r"was killed by SIGABRT .*loses another one"),
}


@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES)
def test_a_failure_names_process_and_reason(tmp_path, case):
    actions, status, reason = case
    ended = run(tmp_path, [["tell:process,1,3", "tell:step,7", *actions]])
    assert ended.status == status, ended.err
    name = r"process 1 of 3 \(pid \d+ on host .+\)"
    assert re.search(rf"^supervisor: {name} {reason}", ended.err, re.M), ended.err
    assert "after step 7" in ended.err
    if "error:no such file" in actions:
        assert "\n  | no such file\n" in ended.err
    assert not is_alive(tmp_path)


def test_a_failure_is_seen_where_sigchld_is_ignored(tmp_path):
    """A process inherits that from the one that starts it."""
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        started = Run(tmp_path, [["kill:SIGKILL"]])
    finally:
        signal.signal(signal.SIGCHLD, former)
    assert started.finish().status == 1
    assert "was killed by SIGKILL" in started.err


def is_alive(folder):
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_the_last_lines_are_those_before_the_stacks(tmp_path):
    """A crash prints the stack of each thread, which hides the error."""
    ended = run(tmp_path, [["error:out of chips", "abort:"]])
    report = ended.err.partition("its last lines:")[2]
    assert report.splitlines()[1:3] == [
        "  | out of chips",
        "  | Fatal Python error: Aborted",
    ]


def test_a_stopped_process_is_found(tmp_path):
    begin = time.monotonic()
    stops = ["tell:step,3", "kill:SIGSTOP", "wait:"]
    ended = run(tmp_path, [stops], "heartbeat", 1.5)
    assert ended.status == 1
    message = r"supervisor: the process .* has not answered for \d+ s, after step 3\n"
    assert re.search(message, ended.err), ended.err
    # Its stack: the signal that asks for it also wakes the process.
    assert re.search(r"^  File .*fake_worker.py.* in act", ended.err, re.M), ended.err
    assert time.monotonic() - begin < DEADLINE_SECONDS / 2
    assert not is_alive(tmp_path)


def test_restarts_resume_and_end_when_they_are_used_up(tmp_path):
    attempts = [
        ["exit:1"],  # before the run has begun: the same command again
        ["tell:started", "tell:saved,40", "kill:SIGKILL"],
        ["exit:1"],
    ]
    ended = run(tmp_path, attempts, "restarts", 2, worker_options=["--overwrite"])
    assert ended.status == 1
    arguments = [ended.arguments(attempt) for attempt in range(3)]
    assert arguments == [["--overwrite"], ["--overwrite"], ["--resume"]]
    lines = [line for line in ended.err.splitlines() if "restart" in line]
    assert lines == [
        "supervisor: restart 1 of 2 in 0 s, from the beginning",
        "supervisor: restart 2 of 2 in 0 s, from the newest checkpoint, "
        "that of step 40",
        "supervisor: not restarted: all 2 restarts of --restarts are used up",
    ]


def test_a_restart_can_succeed(tmp_path):
    attempts = [["tell:started", "exit:1"], ["print:done"]]
    ended = run(tmp_path, attempts, "restarts", 1)
    assert ended.status == 0, ended.err
    assert ended.out == "done\n"
    assert ended.arguments(1) == ["--resume"]


def test_a_restart_waits_until_other_hosts_have_noticed(tmp_path):
    options = ("restarts", 1, "heartbeat", 1, "several_hosts", True)
    ended = run(tmp_path, [["exit:1"], []], *options)
    assert ended.status == 0, ended.err
    assert "supervisor: restart 1 of 1 in 1 s, from the beginning" in ended.err


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        (["exit:2"], "the same run would fail again"),
        (["tell:final", "exit:1"], "the same run would fail again"),
    ],
    ids=["usage", "final"],
)
def test_no_restart_mends(tmp_path, actions, reason):
    ended = run(tmp_path, [actions], "restarts", 5)
    assert f"supervisor: not restarted: {reason}" in ended.err
    assert not (tmp_path / "arguments-1").exists()


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_reaches_the_worker(tmp_path, number, status):
    started = Run(tmp_path, [["save:"]], "restarts", 3)
    started.await_ready()
    started.process.send_signal(number)
    started.process.send_signal(number)  # as of GNU timeout: one request
    assert started.finish().status == status, started.err
    assert started.err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_parent_has_handlers_stops_the_worker(tmp_path, number):
    """`supervise` holds signals back until the parent has taken its place."""
    become_parent = (
        "import os, signal, sys\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    ended = run(tmp_path, [["save:"]], before=("-c", become_parent))
    assert ended.status == 75, ended.err


def test_a_signal_in_the_pause_ends_the_parent(tmp_path):
    started = Run(tmp_path, [["exit:1"]], "restarts", 1, "pause", 1000)
    for line in started.process.stderr:
        if "restart 1 of 1" in line:
            break
    started.process.send_signal(signal.SIGTERM)
    assert started.finish().status == 75
    assert "SIGTERM: stopped before the restart" in started.err


def test_a_worker_without_a_parent_ends(tmp_path):
    started = Run(tmp_path, [["save:"]])
    started.await_ready()
    started.process.kill()
    started.process.communicate(timeout=DEADLINE_SECONDS)
    end = time.monotonic() + DEADLINE_SECONDS
    while is_alive(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.01)
