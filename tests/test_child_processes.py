"""What tests start begins with default signals, and does not outlive its test."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

WRITE_PIDS = """
import pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(sys.argv[1], f"{child.pid}.pid").touch()
"""

TESTS = """
import pathlib, signal, subprocess, sys
import pytest
from tests import child_processes

FOLDER = pathlib.Path(__file__).parent
child_processes.SECONDS_TO_END = 0.1


def start(code, **options):
    return subprocess.Popen([sys.executable, "-c", code, FOLDER], **options)


@pytest.fixture(scope="module")
def server():
    process = start("input()", stdin=subprocess.PIPE, text=True)
    yield process
    process.communicate("end")


def test_fails_beside_a_process_in_another_session(server):
    process = start(CODE + "input()", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    while not list(FOLDER.glob("*.pid")):
        pass
    raise AssertionError("beside two processes")


def test_orphan():
    start(CODE).wait()


def test_unwaited():
    process = start("", stdout=subprocess.PIPE)
    process.stdout.read()
    raise AssertionError("with a process whose status nobody has asked for")


def test_other_files_are_spared(server):
    assert server.poll() is None


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGPROF])
def test_default_signals(number):
    code = "import signal, time; signal.signal(2, signal.SIG_DFL); print(flush=True)"
    with start(code + "; time.sleep(1000)", stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(number)
    assert process.returncode == -number
"""

IGNORING = """
import signal, sys
for number in (signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
def test_a_failing_test_leaves_nothing_to_the_next_one(tmp_path):
    (tmp_path / "test_it.py").write_text(f"CODE = {WRITE_PIDS!r}\n{TESTS}")
    options = ["-q", "-Werror", "-p", "tests.child_processes", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [sys.executable, "-c", IGNORING, *options, "--rootdir", tmp_path, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    # A test that fails and leaves processes is an error, too, which names them.
    assert "2 failed, 5 passed, 2 errors" in finished.stdout, finished.stdout
    assert "left 2 processes behind" in finished.stdout
    assert "left 1 processes behind: {'" in finished.stdout
    assert "sleep 1000" in finished.stdout
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    for pid in pids:
        assert not pathlib.Path(f"/proc/{pid}/cmdline").exists() or not (
            pathlib.Path(f"/proc/{pid}/cmdline").read_text()  # Nobody waits for it.
        )


@pytest.mark.tpu_compiler
def test_libtpu_leaves_the_signals_of_new_processes_alone():
    """It ignores some signals of its own process, unless that handles them."""
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    status = subprocess.check_output(["cat", "/proc/self/status"], text=True)
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    numbers = (signal.SIGHUP, signal.SIGPROF, signal.SIGINT, signal.SIGTERM)
    assert not [number for number in numbers if ignored >> (number - 1) & 1]
