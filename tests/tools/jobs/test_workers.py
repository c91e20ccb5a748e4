"""Lines of workers: dropped if they cannot be written, and not otherwise."""

import os
import signal
import sys
import threading

import pytest

from tpu_embedding.tools.jobs import workers
from tpu_embedding.tools.jobs.workers import WorkerProcess, write_line


def test_a_line_that_nobody_reads_is_dropped():
    reader, writer = os.pipe()
    os.close(reader)
    write_line(writer, b"lost")
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"lost")
    os.close(writer)


@pytest.fixture
def full_pipe():
    """A full pipe that does not block: its reader and its writer."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    yield reader, writer
    os.close(reader)


def test_a_line_waits_for_its_reader(full_pipe, monkeypatch):
    reader, writer = full_pipe
    monkeypatch.setattr(workers, "FULL_SECONDS", 60)
    thread = threading.Thread(target=write_line, args=(writer, b"late" * 100_000))
    thread.start()
    data = bytearray()
    while not data.endswith(b"\n"):
        data += os.read(reader, 1 << 16)
    thread.join()
    os.close(writer)
    assert data.lstrip(b"\0") == b"late" * 100_000 + b"\n"


def test_a_line_does_not_wait_for_ever(full_pipe, monkeypatch):
    reader, writer = full_pipe
    monkeypatch.setattr(workers, "FULL_SECONDS", 0)
    write_line(writer, b"lost")
    os.close(writer)
    with open(reader, "rb", closefd=False) as file:
        assert b"lost" not in file.read()


def ended_worker(code):
    """Returns a worker that has run some code to its end."""
    worker = WorkerProcess([sys.executable, "-I", "-c", code])
    worker.process.wait(timeout=60)
    assert worker.poll()
    return worker


def test_a_helper_that_holds_the_output_is_not_waited_for(capfd):
    code = (
        "import subprocess, sys\n"
        "helper = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "helper = subprocess.Popen(helper, start_new_session=True)\n"
        "print('helper', helper.pid, sep='\\n', end='')\n"
    )
    worker = ended_worker(code)
    assert not any(reader.is_alive() for reader in worker._readers)
    name, pid = worker.state.lines
    os.kill(int(pid), signal.SIGKILL)
    assert name == "helper"
    assert capfd.readouterr().out == f"helper\n{pid}\n"


@pytest.mark.parametrize("line", ["", "step x", "process 1", r"\xff", "7"])
def test_a_broken_line_on_the_pulse_pipe_is_ignored(line):
    code = (
        f"import os\npipe = int(os.environ[{workers.PIPE_VARIABLE!r}])\n"
        f"os.write(pipe, b'{line}\\nstep 5\\n')\n"
    )
    assert ended_worker(code).state.step == 5
