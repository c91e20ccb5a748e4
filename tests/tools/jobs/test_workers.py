"""Lines of workers: dropped if they cannot be written, and not otherwise."""

import os
import threading

import pytest

from tpu_embedding.tools.jobs import workers
from tpu_embedding.tools.jobs.workers import write_line


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
