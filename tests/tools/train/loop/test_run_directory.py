"""Tests the output directory of a run: what stops a run, and what moves aside."""

import pytest

from tpu_embedding.tools.jobs.run_lock import RunDirectoryError
from tpu_embedding.tools.train.loop.run_directory import LOCK_FILE, RunDirectory

# Contents of a directory: file name to text. A complete checkpoint of orbax is more
# than a directory with a number; `test_loop.py` has real ones.
EMPTY = {}
RECORDS = {"metrics.jsonl": '{"run": {}}\n'}
FOREIGN = {"checkpoints/7/weights.bin": "mine"}
FOREIGN_FILE = {"checkpoints": "a file of this name"}
PLOT = {"curves.png": "mine"}
OBSERVED = {"tensorboard/events": "mine", "profile/plugins/profile/1/x": "mine"}
OTHERS = {"notes.txt": "mine", "data/clicks.csv": "1,2\n"}


def make(directory, files):
    directory.mkdir()
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def texts(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (RECORDS, "saved no checkpoint; start it again with --resume, .*--overwrite"),
        (FOREIGN, "checkpoints exists, but no metrics.jsonl .*--overwrite"),
        (FOREIGN_FILE, "checkpoints exists, but no metrics.jsonl"),
        (PLOT, "curves.png exists, but no metrics.jsonl"),
        (OBSERVED, "tensorboard exists, but no metrics.jsonl"),
    ],
)
def test_a_run_deletes_nothing(tmp_path, files, message):
    directory = tmp_path / "run"
    make(directory, files)
    with pytest.raises(RunDirectoryError, match=message):
        RunDirectory(directory).check("refuse")
    with pytest.raises(RunDirectoryError, match=message):
        with RunDirectory(directory).claim("refuse"):
            pass
    assert texts(directory) == files


@pytest.mark.parametrize("files", [EMPTY, OTHERS])
def test_a_run_starts_beside_other_files(tmp_path, files):
    directory = tmp_path / "run"
    make(directory, files)
    (directory / "checkpoints").mkdir()
    RunDirectory(directory).check("refuse")
    with RunDirectory(directory).claim("refuse") as moved_to:
        assert moved_to is None
        assert (directory / LOCK_FILE).exists()
    assert texts(directory) == files


@pytest.mark.parametrize("files", [EMPTY, OTHERS, FOREIGN, PLOT])
def test_nothing_to_resume(tmp_path, files):
    directory = tmp_path / "run"
    make(directory, files)
    if files is FOREIGN:
        (directory / "checkpoints" / "7").rename(directory / "checkpoints" / "best")
    with pytest.raises(RunDirectoryError, match="no run in .*Leave --resume out"):
        RunDirectory(directory).check("resume")


def test_a_run_without_checkpoint_may_be_resumed(tmp_path):
    make(tmp_path / "run", RECORDS)
    RunDirectory(tmp_path / "run").check("resume")


@pytest.mark.parametrize("files", [RECORDS, FOREIGN, FOREIGN_FILE, PLOT, OBSERVED])
def test_files_of_a_run_move_aside_and_others_stay(tmp_path, files):
    directory = tmp_path / "run"
    make(directory, files | OTHERS)
    (tmp_path / "run.old-1").mkdir()
    with RunDirectory(directory).claim("move_aside") as moved_to:
        assert moved_to == tmp_path / "run.old-2"
    assert texts(moved_to) == files
    assert texts(directory) == OTHERS


def test_nothing_to_move_aside(tmp_path):
    with RunDirectory(tmp_path / "run").claim("move_aside") as moved_to:
        assert moved_to is None
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_directory_has_a_name_from_within(tmp_path, monkeypatch):
    make(tmp_path / "run", RECORDS)
    monkeypatch.chdir(tmp_path / "run")
    with RunDirectory(".").claim("move_aside") as moved_to:
        assert moved_to == tmp_path / "run.old-1"


def test_a_path_at_which_no_directory_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryError, match="--output-dir .*is no directory"):
            RunDirectory(path).check("refuse")


def test_check_writes_nothing(tmp_path):
    RunDirectory(tmp_path / "a" / "run").check("move_aside")
    assert list(tmp_path.iterdir()) == []
