"""Output that cannot be written is dropped, and what can be is not."""

import os
import subprocess
import sys
import threading

import pytest

from tpu_embedding.distributed import output
from tpu_embedding.distributed.output import print_line
from tpu_embedding.tools.jobs import workers
from tpu_embedding.tools.jobs.workers import write_line


@pytest.fixture
def unread():
    """A text file that is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        yield file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, writer)  # The file still holds the line.
        os.close(nowhere)


def test_lines_that_nobody_reads_are_dropped(unread):
    print_line("lost", unread)
    write_line(unread.fileno(), b"lost")
    with pytest.raises(BrokenPipeError):
        unread.flush()  # Neither line could be written, and neither call said so.


def test_the_exit_status_stays_that_of_the_run():
    """Python would replace it by 120."""
    code = (
        "import os, runpy, sys\n"
        f"output = runpy.run_path({output.__file__!r})\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader)\n"
        "os.dup2(writer, 1)\n"
        "output['print_line']('lost')\n"
        "output['drop_unwritten']()\n"
        "sys.exit(75)\n"
    )
    ended = subprocess.run([sys.executable, "-I", "-c", code], timeout=60)
    assert ended.returncode == 75


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
