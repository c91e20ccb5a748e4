"""Tests the lock of a run's directory, with real processes."""

import errno
import fcntl
import json
import subprocess
import sys

import pytest

from tpu_embedding.tools.jobs.run_lock import (
    RunDirectoryError,
    check_unlocked,
    run_lock,
)

HOLD = """
import pathlib, sys
from tpu_embedding.tools.jobs.run_lock import run_lock
with run_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.lock"


def write_holder(path, host):
    path.write_text(json.dumps({"pid": 1, "host": host, "started": "noon"}))


def test_two_in_one_directory(path):
    with run_lock(path):
        for attempt in (lambda: check_unlocked(path), run_lock(path).__enter__):
            with pytest.raises(RunDirectoryError, match=r"in use by process \d+ on"):
                attempt()
        assert path.exists()
    check_unlocked(path)
    with run_lock(path):
        pass
    assert not path.exists()


def test_another_process_and_its_death(path):
    """A killed process frees the lock, although its file stays."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"by process {process.pid} on"):
            check_unlocked(path)
        with pytest.raises(RunDirectoryError, match="Wait for it to end"):
            with run_lock(path):
                pass
    finally:
        process.kill()
        process.communicate()
    assert json.loads(path.read_text())["pid"] == process.pid
    with run_lock(path):
        pass
    assert not path.exists()


def test_another_host_counts_until_its_file_is_deleted(path):
    write_holder(path, "elsewhere")
    for attempt in (lambda: check_unlocked(path), run_lock(path).__enter__):
        with pytest.raises(RunDirectoryError, match="elsewhere.*has ended, delete"):
            attempt()
    path.unlink()
    with run_lock(path):
        pass


@pytest.mark.parametrize("text", ["", "{", "3", '{"pid'])
def test_a_file_that_was_not_written_whole_does_not_count(path, text):
    path.write_text(text)
    with run_lock(path):
        assert "pid" in json.loads(path.read_text())


def test_a_file_system_without_locks(path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run_lock(path):
        with pytest.raises(RunDirectoryError, match="has ended, delete"):
            check_unlocked(path)
    with run_lock(path):
        pass


def test_a_file_deleted_by_its_last_holder_is_not_taken(path, monkeypatch):
    """Between opening and locking, the holder may end and delete the file."""
    flock, calls = fcntl.flock, []

    def delete_first(file, operation):
        if not calls:
            path.unlink()
        calls.append(file)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with run_lock(path):
        with pytest.raises(RunDirectoryError):
            check_unlocked(path)
    assert len(calls) == 3


def test_an_error_of_the_run_frees_the_lock(path):
    with pytest.raises(KeyError):
        with run_lock(path):
            raise KeyError
    assert not path.exists()
