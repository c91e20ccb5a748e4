"""Exports appear whole or not at all: on full disks, and with several writers."""

import pathlib
import resource
import threading

import numpy as np
import pytest

import tpu_embedding as te
from tests.export.writers import WRITERS, writers_of
from tests.rejections import rejects
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
def test_a_full_disk_is_an_error_and_leaves_nothing(writers, name, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with rejects(ExportError, fix=f"{tmp_path / 'made'}"):
            writers[0][name](tmp_path / "made")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WRITERS)
def test_one_of_two_writers_gets_the_path(writers, name, tmp_path, monkeypatch):
    """Both have written all files before one of them gets the name."""
    barrier, rename = threading.Barrier(2), pathlib.Path.rename

    def rename_together(path, target):
        barrier.wait(60)
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", rename_together)
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
    assert check_whole(tmp_path / "made") == (21, 11)[loser]
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
    with rejects(ExportError, fix=place), new_directory(tmp_path / place):
        pass
