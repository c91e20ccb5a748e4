"""Exports appear whole or not at all: on full disks, and with several writers."""

import errno
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import tpu_embedding as te
from tests.export.writers import WRITERS, writers_of
from tpu_embedding.export import documents
from tpu_embedding.export.documents import (
    check_files,
    files_of,
    new_directory,
    read_document,
)
from tpu_embedding.export.table_files import read_tensors

ExportError = te.export.ExportError


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """Two writers of each kind, whose rows differ."""
    path = tmp_path_factory.mktemp("sources")
    return [writers_of(path, value) for value in (10, 20)]


def check_whole(path):
    """Checks that an export or delta has its files, and returns their one number."""
    files = files_of(path)
    tensors = read_tensors(files["tables/movie.safetensors"])
    if not (path / "base.json").exists():
        check_files(path, read_document(path).files)
    (value,) = np.unique(tensors["movie"])
    return value


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_and_leaves_nothing(
    writers, name, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ExportError, match="made cannot be written.*No space left"):
        writers[0][name](tmp_path / "made")
    assert not list(tmp_path.iterdir())


FULL_DISK = """
import json, pathlib, resource, sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
import tpu_embedding as te
from tests.export.writers import writers_of

sources, full = map(pathlib.Path, sys.argv[1:3])
found = {}
for name, write in writers_of(sources, 10, num_rows=100_000).items():
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if sys.argv[3] == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limit[1]))
    try:
        write(full / name)
    except te.export.ExportError as error:
        found[name] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
print(json.dumps([found, [path.name for path in full.iterdir()]]))
"""


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize(
    ("kind", "message"), [("limited", "File too large"), ("tmpfs", "No space left")]
)
def test_a_process_lives_on_after_a_full_disk(kind, message, tmp_path):
    (full := tmp_path / "full").mkdir()
    command = [sys.executable, "-c", FULL_DISK, tmp_path, full, kind]
    if kind == "tmpfs":
        # The mount ends with the process that sees it.
        mount = f"mount -t tmpfs -o size=1m tmpfs '{full}'"
        private = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
        if subprocess.run(
            [*private, mount], capture_output=True, check=False
        ).returncode:
            pytest.skip("this machine mounts no tmpfs for its users")
        command = [*private, f'{mount} && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors, left = json.loads(done.stdout)
    assert set(errors) == set(WRITERS) and not left
    assert all(f"{full}" in text and message in text for text in errors.values())


@pytest.mark.parametrize("name", WRITERS)
def test_one_of_two_writers_gets_the_path(writers, name, tmp_path, monkeypatch):
    """Both have written all files before one of them gets the name."""
    barrier, flush = threading.Barrier(2), documents._flush

    def flush_together(path):
        flush(path)
        barrier.wait(60)

    monkeypatch.setattr(documents, "_flush", flush_together)
    errors: list[Exception | None] = [None, None]

    def write(number):
        try:
            writers[number][name](tmp_path / "made")
        except Exception as error:
            errors[number] = error

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    (loser,) = (i for i in range(2) if errors[i] is not None)
    assert isinstance(errors[loser], ExportError), errors
    assert "made must be a new directory" in str(errors[loser])
    assert check_whole(tmp_path / "made") == (21, 11)[loser]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


PROCESS = """
import pathlib, sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
import tpu_embedding as te
from tests.export.writers import layer_of

layer = layer_of(int(sys.argv[2]), num_rows=20_000)
print("ready", flush=True)
sys.stdin.readline()
try:
    te.export.save_tables(layer, sys.argv[1])
    print("whole")
except te.export.ExportError as error:
    print("ExportError", error)
"""


@pytest.mark.full
def test_one_of_two_processes_gets_the_path(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, tmp_path / "made", str(value)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for value in (1, 2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    found = [process.communicate()[0] for process in processes]
    winner = found.index("whole\n")
    assert found[1 - winner].startswith("ExportError"), found
    assert check_whole(tmp_path / "made") == winner + 1
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("kind", ["empty", "link", "new"])
def test_a_directory_may_be_empty(kind, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with new_directory(tmp_path / kind) as path:
        assert path is not None
        (path / "file").touch()
    assert (tmp_path / kind / "file").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("place", ["file", "full", "file/below"])
def test_a_path_that_is_taken(place, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ExportError, match=place), new_directory(tmp_path / place):
        pass
