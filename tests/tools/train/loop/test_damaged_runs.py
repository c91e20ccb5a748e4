"""Runs whose checkpoints are damaged, or cannot be written: one error, nothing lost."""

import errno
import os
import pathlib
import resource
import shutil

import jax
import pytest

from tests.tools.train.loop.test_training_loop import contents, losses
from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.tools import cli

SETTINGS = [
    "batch_size=16",
    "model.dim=4",
    "model.hidden_sizes=4",
    "data.num_evaluation_samples=32",
    "num_steps=6",
    "log_every=1",
    "checkpoint_every=2",
]


@pytest.fixture(scope="module", autouse=True)
def _jax_has_started():
    """Initialises JAX first, so that `--devices` of one test affects no other test."""
    assert len(jax.devices()) == 8


def run(directory, *more, settings=()):
    arguments = ["train", "synthetic", "--devices", "1", "--output-dir", str(directory)]
    for setting in (*SETTINGS, *settings):
        arguments += ["--set", setting]
    return cli.main([*arguments, *more])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert run(directory) == 0
    return directory


@pytest.fixture
def stopped(undisturbed, tmp_path):
    """A run that stopped after step 4, with the checkpoints 2 and 4."""
    directory = tmp_path / "run"
    shutil.copytree(undisturbed, directory)
    shutil.rmtree(directory / "checkpoints" / "6")
    return directory


def check_error(capsys, *words):
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_resume_from_a_damaged_checkpoint(stopped, undisturbed, capsys):
    checkpoints = stopped / "checkpoints"
    flip(checkpoints / "4/state/tables/user.values/c/0/0")
    before = contents(stopped)
    capsys.readouterr()
    assert run(stopped, "--resume") == cli.WRONG_USAGE
    check_error(capsys, "/tables/user.values", "of table 'user' is", "--fallback older")
    assert contents(stopped) == before

    assert run(stopped, "--resume", "--fallback", "older") == 0
    output = capsys.readouterr().out
    assert "checkpoint 4 is damaged, and now named damaged-4" in output
    assert "resumed after step 2" in output
    assert losses(stopped) == losses(undisturbed)
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["2", "4", "6", "damaged-4"]
    damaged = {k: v for k, v in before.items() if k.startswith("checkpoints/4/")}
    kept = contents(checkpoints / "damaged-4")
    assert kept == {k.removeprefix("checkpoints/4/"): v for k, v in damaged.items()}


FILES = {"truncate": truncate, "delete": pathlib.Path.unlink, "flip": flip}
OF_ORBAX = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files beside the state, which orbax writes and a restore does not need."""


@pytest.mark.full
@pytest.mark.parametrize("damage", FILES.values(), ids=FILES)
def test_every_file_of_a_run(stopped, undisturbed, capsys, damage):
    """Damage is found before the state is read, so no run has to be compiled."""
    checkpoint = stopped / "checkpoints" / "4"
    whole = contents(checkpoint)
    capsys.readouterr()
    num_found = 0
    for name in sorted(whole):
        if name.endswith(OF_ORBAX) or not whole[name]:
            continue
        damage(checkpoint / name)
        assert run(stopped, "--resume") == cli.WRONG_USAGE, name
        check_error(capsys, "/checkpoints/4/", "--fallback older")
        (checkpoint / name).write_bytes(whole[name])
        num_found += 1
    assert num_found > 30
    assert contents(checkpoint) == whole


@pytest.mark.full
@pytest.mark.parametrize("damage", FILES.values(), ids=FILES)
@pytest.mark.parametrize("name", OF_ORBAX)
def test_files_of_orbax_are_not_needed(stopped, undisturbed, damage, name):
    path = stopped / "checkpoints" / "4" / name
    if not path.exists():
        pytest.skip("this version of orbax does not write it")
    if path.stat().st_size or damage is not flip:
        damage(path)
    assert run(stopped, "--resume") == 0
    assert losses(stopped) == losses(undisturbed)


@pytest.mark.full
def test_no_checkpoint_is_whole(stopped, capsys):
    for step in (2, 4):
        truncate(stopped / "checkpoints" / str(step) / "state" / "manifest.json")
    before = contents(stopped)
    capsys.readouterr()
    assert run(stopped, "--resume", "--fallback", "older") == cli.WRONG_USAGE
    captured = capsys.readouterr()
    assert "is whole" in captured.err
    assert "Traceback" not in captured.err
    assert contents(stopped) == before


@pytest.mark.full
def test_a_full_disk(stopped, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert run(stopped, "--resume") == cli.FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_error(capsys, "checkpoints", "cannot be written", "Make room on the disk")
    assert saved_steps(stopped / "checkpoints") == [2, 4]
    assert run(stopped, "--resume") == 0


@pytest.mark.full
def test_a_directory_that_becomes_read_only(stopped, capsys, monkeypatch):
    mkdir = os.mkdir

    def refuse(path, *arguments, **options):
        if "/checkpoints/" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return mkdir(path, *arguments, **options)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        assert run(stopped, "--resume") == cli.FAILED
    check_error(capsys, "Read-only file system")
    assert saved_steps(stopped / "checkpoints") == [2, 4]
    assert run(stopped, "--resume") == 0


def test_fallback_needs_resume(tmp_path, capsys):
    assert run(tmp_path / "run", "--fallback", "older") == cli.WRONG_USAGE
    check_error(capsys, "--fallback needs --resume")


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("name", ["keep_time_interval", "max_save_seconds"])
def test_intervals_that_are_none(tmp_path, capsys, name, value):
    settings = [f"{name}={value}"]
    assert run(tmp_path / "run", settings=settings) == cli.WRONG_USAGE
    check_error(capsys, f"RunConfig.{name} must be a positive number")
