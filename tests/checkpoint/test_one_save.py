"""A restore reads one save: digests, steps, races, formats and forged sizes."""

import copy
import itertools
import json
import pathlib
import shutil

import jax
import pytest

import tpu_embedding as te
from tests.checkpoint.states import (
    check_equal,
    numbers_of,
    state_of,
)
from tests.rejections import rejects
from tpu_embedding.checkpoint import CheckpointError, arrays, state_file


def seal(directory, values):
    """Writes a forged description with the digest that fits it."""
    values["digest"] = state_file._digest_of(values)
    (directory / "state.json").write_text(json.dumps(values))


def places_in(values, path=()):
    """Yields the path of each value in JSON."""
    keys = values if isinstance(values, dict) else range(len(values))
    for key in keys:
        yield (*path, key)
        if isinstance(values[key], dict | list):
            yield from places_in(values[key], (*path, key))


def changed(values, path, replacement):
    """Returns JSON with another value at a path, or without the value."""
    values = inner = copy.deepcopy(values)
    for key in path[:-1]:
        inner = inner[key]
    if replacement == "delete":
        del inner[path[-1]]
    else:
        inner[path[-1]] = replacement
    return values


REPLACEMENTS = (None, True, -1, 2**70, 1, 0.5, "x", [], {}, [{}], "delete")


@pytest.mark.parametrize("is_forged", [False, True])
@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_changed_json(saved, plan, is_forged, stride, tmp_path):
    """A changed description raises, or restores the same rows."""
    directory = shutil.copytree(saved[0], tmp_path / "a")
    file = directory / "state.json"
    original = json.loads(file.read_text())
    changes = [(p, r) for p in places_in(original) for r in REPLACEMENTS]
    state = state_of(plan, 1)
    for path, replacement in changes[::stride]:
        if path[0] == "digest" and is_forged:
            continue
        values = changed(original, path, replacement)
        file.write_text(json.dumps(values))
        if is_forged:
            seal(directory, values)
        try:
            restored = te.restore(directory, state, plan=plan)
        except CheckpointError as error:
            assert str(directory) in str(error)
        else:
            check_equal(numbers_of(restored, plan), saved[1])
            state = restored
    numbers_of(state, plan)  # It is usable.


STEP_NAMES = {
    "another step": ("1000", "2000", False),
    "another step with a prefix": ("run_8", "run_9", False),
    "padded": ("8", "0008", True),
    "a copy": ("1000", "best", True),
    "a copy with a number": ("1000", "epoch_3", True),
    "no step": ("", "2000", True),
}


@pytest.mark.parametrize(("old", "new", "fits"), STEP_NAMES.values(), ids=STEP_NAMES)
def test_directories_of_steps(old, new, fits):
    root = pathlib.Path("/run") / new / "default"
    if fits:
        state_file._check_step(root, old)
        return
    with rejects(CheckpointError, field=f"{root}", value=int(new.strip("run_"))):
        state_file._check_step(root, old)


@pytest.mark.parametrize("at_read", [0, 2, 4])
@pytest.mark.parametrize("links", [True, False])
def test_a_replaced_directory(saved, plan, links, at_read, tmp_path, monkeypatch):
    """Through the open directory, the restore ends; by path, it raises."""
    first = shutil.copytree(saved[0], tmp_path / "a")
    te.save(tmp_path / "b", state_of(plan, 1), plan=plan)
    if not links:
        monkeypatch.setattr(arrays, "_OPEN_FILES", "/no/such/directory")
    read, number = arrays.SavedArray.read, itertools.count()

    def read_and_replace(array, *index):
        if next(number) == at_read:
            first.rename(tmp_path / "old")
            (tmp_path / "b").rename(first)
        return read(array, *index)

    monkeypatch.setattr(arrays.SavedArray, "read", read_and_replace)
    shapes = jax.eval_shape(lambda: state_of(plan)) | {"step": 0}
    if links:
        restored = te.restore(first, shapes, plan=plan)
        check_equal(numbers_of(restored, plan), saved[1])
    else:
        with rejects(CheckpointError, fix=f"{first}"):
            te.restore(first, shapes, plan=plan)
    assert next(number) > at_read


def huge(values, size=2**44):
    movie = values["tables"]["movie"]
    movie["vocabulary_size"] = size
    for array in (movie["values"], *movie["slots"].values()):
        array["shape"][0] = size


CHUNKS = {"name": "regular", "configuration": {"chunk_shape": [2**40, 4]}}
FORGED = {
    "chunks": ({"chunk_grid": CHUNKS}, None),
    "codecs": ({"codecs": [{"name": "bytes"}, {"name": "gzip"}]}, None),
    "names": ({"chunk_key_encoding": {"name": "v2"}}, None),
    "shape": ({"shape": [2**40, 4]}, None),
    # Tensorstore ended the process: std::bad_alloc.
    "size": ({"shape": [2**44, 4]}, huge),
}


@pytest.mark.parametrize(("changes", "change_values"), FORGED.values(), ids=FORGED)
def test_forged_metadata(saved, changes, change_values, tmp_path):
    """An attacker changes an array's metadata, and its checksums and the digest."""
    directory, name = shutil.copytree(saved[0], tmp_path / "a"), "tables.movie.values"
    file = directory / name / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    values = json.loads((directory / "state.json").read_text())
    checksum = state_file.metadata_checksum(file.read_bytes())
    values["checksums"][name] = checksum + values["checksums"][name][len(checksum) :]
    if change_values:
        change_values(values)
    seal(directory, values)
    with rejects(CheckpointError, fix=f"array {name} of "):
        te.checkpoint.read_table(directory, "movie")


def test_a_large_description(saved, tmp_path):
    with rejects(ValueError, field="description"):
        te.save(tmp_path / "a", {"step": 1}, description={"text": "x" * 2**22})
    directory = shutil.copytree(saved[0], tmp_path / "b")
    (directory / "state.json").write_text("[" + "{}," * 2**22 + "{}]")
    with rejects(CheckpointError, fix=f"more than {2**23} bytes"):
        te.checkpoint.describe(directory)


def test_a_link_out_of_the_checkpoint(saved, plan, tmp_path):
    directory = shutil.copytree(saved[0], tmp_path / "a")
    (directory / "tables.movie.values").rename(tmp_path / "elsewhere")
    (directory / "tables.movie.values").symlink_to(tmp_path / "elsewhere")
    with rejects(CheckpointError, fix="symbolic link"):
        te.restore(directory, state_of(plan), plan=plan)
