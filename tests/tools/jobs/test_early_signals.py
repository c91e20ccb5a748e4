"""A signal before the run has the documented status, however early it arrives."""

import concurrent.futures
import signal
import subprocess
import sys
import threading

import pytest

from tests.processes.test_processes import ROOT, environment_of
from tests.tiers import quick_cases
from tpu_embedding.tools.jobs.early_signals import EarlySignals
from tpu_embedding.tools.jobs.exit_status import STOP_SIGNALS

DEADLINE_SECONDS = 100  # for a busy machine

SCRIPT = "import sys\nfrom tpu_embedding.tools.cli import main\nsys.exit(main())\n"
"""The script that pip installs as `tpu-embedding`."""


def start(directory, *options, as_script=False):
    """Starts a run that prints each import on stderr."""
    program = ["-m", "tpu_embedding.tools.cli"]
    if as_script:
        program = [str(directory / "tpu-embedding")]
        (directory / "tpu-embedding").write_text(SCRIPT)
    command = [sys.executable, "-v", *program, "train", "synthetic", "--devices", "1"]
    return subprocess.Popen(
        [*command, "--output-dir", directory / "run", *options],
        cwd=ROOT,
        env=environment_of(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def signal_after(process, words, number):
    """Sends a signal after a line; returns the exit status and the later lines."""
    timer = threading.Timer(DEADLINE_SECONDS, process.kill)
    timer.start()
    with process, process.stderr:
        for line in process.stderr:
            if words in line:
                process.send_signal(number)
                break
        lines = list(process.stderr)
    timer.cancel()
    return process.returncode, lines


STATUS = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}
MOMENTS = {
    "first of all": "import 'argparse' ",
    "numpy": "import 'numpy' ",
    "jax": "import 'jax.numpy' ",
    "orbax": "import 'orbax.checkpoint' ",
    "the layer": "import 'tpu_embedding.checkpoint.saving' ",
    "the command": "import 'tpu_embedding.tools.cli.train' ",
}


@pytest.mark.parametrize(
    ("moment", "number"),
    quick_cases(
        [
            pytest.param(words, number, id=f"{name}-{number.name}")
            for name, words in MOMENTS.items()
            for number in (STATUS if name == "first of all" else [signal.SIGTERM])
        ],
        "first of all-SIGTERM",
        "jax-SIGTERM",
        every_case=True,
    ),
)
def test_a_signal_while_the_command_imports(moment, number, tmp_path):
    status, lines = signal_after(start(tmp_path), moment, number)
    assert status == STATUS[number]
    assert f"{number.name}: the run has not started\n" in lines
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_signal_to_the_script(tmp_path):
    process = start(tmp_path, as_script=True)
    status, lines = signal_after(process, MOMENTS["jax"], signal.SIGTERM)
    assert status == 75
    assert "SIGTERM: the run has not started\n" in lines


def test_a_signal_that_is_ignored_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handled = {n: signal.getsignal(n) for n in STOP_SIGNALS}
    early = EarlySignals()
    try:
        early.start()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == early._handle
        for number, handler in handled.items():
            assert early.handler_before(number) == handler
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGHUP, former)


def test_a_second_signal_prints_no_second_error():
    handled = {n: signal.getsignal(n) for n in STOP_SIGNALS}
    early, ended = EarlySignals(), []

    def end(message, status):
        ended.append((message, status))
        if len(ended) == 1:  # as while the other processes of a job leave
            signal.raise_signal(signal.SIGINT)

    early.end = end
    try:
        early.start()
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
    assert ended == [("SIGTERM: the run has not started", 75)]


def test_a_program_that_only_imports_the_command_handles_nothing():
    """As a loader process, which imports the main module of the run."""
    code = "import signal, tpu_embedding.tools.cli; print(repr(signal.getsignal(15)))"
    command = [sys.executable, "-c", code, "train"]
    result = subprocess.run(
        command, env=environment_of(), capture_output=True, text=True, check=True
    )
    assert "Handlers.SIG_DFL" in result.stdout


def test_a_start_in_a_thread_handles_nothing():
    early = EarlySignals()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(early.start).result()
    assert early.former == {}
