"""A restore reads one save: digests, steps, races, formats and forged sizes."""

import json
import pathlib
import shutil
import threading

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.checkpoint.test_saving import (
    check_equal,
    numbers_of,
    plan_of,
    state_of,
    with_random_slots,
)
from tpu_embedding.checkpoint import CheckpointError, arrays, state_file
from tpu_embedding.tables import row_windows


@pytest.fixture(scope="module")
def plan():
    return plan_of()


@pytest.fixture(scope="module")
def saved(plan, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    state = with_random_slots(state_of(plan), plan)
    te.save(directory, state, plan=plan, description={"run": "a"})
    return directory, numbers_of(state, plan)


def as_old(directory):
    """Changes a checkpoint to format 2, which has no digest, checksums or step."""
    file = directory / "state.json"
    values = json.loads(file.read_text()) | {"format": 2}
    for field in ("digest", "checksums", "step"):
        del values[field]
    file.write_text(json.dumps(values, indent=1))
    return directory


def test_a_checkpoint_without_a_digest_is_restored(saved, plan, tmp_path):
    directory = as_old(shutil.copytree(saved[0], tmp_path / "a"))
    restored = te.restore(directory, state_of(plan, 1), plan=plan)
    check_equal(numbers_of(restored, plan), saved[1])


def places_in(values, path=()):
    """Yields the path of each value in JSON."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places_in(value, (*path, key))


REPLACEMENTS = (None, True, -1, 2**70, 1, 0.5, "x", [], {}, [{}])


@pytest.mark.parametrize("age", ["new", "old"])
@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_changed_json(saved, plan, age, stride, tmp_path):
    """A changed description raises, or restores the same rows."""
    directory = shutil.copytree(saved[0], tmp_path / "a")
    file = (as_old(directory) if age == "old" else directory) / "state.json"
    original = json.loads(file.read_text())
    changes = [(p, r) for p in places_in(original) for r in (*REPLACEMENTS, "delete")]
    state = state_of(plan, 1)
    for path, replacement in changes[::stride]:
        if age == "old" and path[0] in ("description", "dense"):
            continue
        values = json.loads(json.dumps(original))
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        if replacement == "delete":
            del inner[path[-1]]
        else:
            inner[path[-1]] = replacement
        file.write_text(json.dumps(values))
        try:
            restored = te.restore(directory, state, plan=plan)
        except CheckpointError as error:
            assert str(directory) in str(error)
        else:
            check_equal(numbers_of(restored, plan), saved[1])
            state = restored
    numbers_of(state, plan)  # It is usable.


@pytest.mark.parametrize("stride", [701, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_flipped_bits_of_the_description(saved, stride, tmp_path):
    directory = shutil.copytree(saved[0], tmp_path / "a")
    file = directory / "state.json"
    text, record = file.read_bytes(), te.checkpoint.describe(directory)
    for bit in range(0, 8 * len(text), stride):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        try:
            assert te.checkpoint.describe(directory) == record
        except CheckpointError as error:
            assert str(file) in str(error) or "has format" in str(error)


def test_a_smaller_vocabulary_than_the_array_is_damage(saved, plan, tmp_path):
    """One flipped bit in format 2 left the last rows at their initial values."""
    directory = as_old(shutil.copytree(saved[0], tmp_path / "a"))
    file = directory / "state.json"
    text = file.read_text()
    changed = text.replace('"vocabulary_size": 40', '"vocabulary_size": 20')
    assert changed != text
    file.write_text(changed)
    with pytest.raises(CheckpointError, match="state.json is .*vocabulary_size"):
        te.restore(directory, state_of(plan), plan=plan)


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
    with pytest.raises(CheckpointError, match=f"{root} is in the directory of step"):
        state_file._check_step(root, old)


@pytest.mark.parametrize("links", [True, False])
def test_a_replaced_directory(saved, plan, links, tmp_path, monkeypatch):
    """Through the open directory, the restore ends; by path, it raises."""
    first = shutil.copytree(saved[0], tmp_path / "a")
    te.save(tmp_path / "b", state_of(plan, 1), plan=plan)
    if not links:
        monkeypatch.setattr(arrays, "_OPEN_FILES", "/no/such/directory")
    read = arrays.SavedArray.read

    def read_and_replace(array, *index):
        if first.exists() and not (tmp_path / "old").exists():
            first.rename(tmp_path / "old")
            (tmp_path / "b").rename(first)
        return read(array, *index)

    monkeypatch.setattr(arrays.SavedArray, "read", read_and_replace)
    shapes = jax.eval_shape(lambda: state_of(plan)) | {"step": 0}
    if links:
        restored = te.restore(first, shapes, plan=plan)
        check_equal(numbers_of(restored, plan), saved[1])
    else:
        with pytest.raises(CheckpointError, match=f"{first}"):
            te.restore(first, shapes, plan=plan)


@pytest.mark.parametrize("rounds", [2, pytest.param(60, marks=pytest.mark.full)])
def test_restores_while_a_directory_is_replaced(plan, rounds, tmp_path, monkeypatch):
    monkeypatch.setattr(row_windows, "_MIN_BLOCK_BYTES", 128)
    numbers = []
    for seed in (1, 2):
        state = state_of(plan, seed)
        numbers.append(numbers_of(state, plan))
        te.save(tmp_path / str(seed), state, plan=plan)
    path, other, spare = (tmp_path / name for name in ("1", "2", "spare"))
    stop = threading.Event()

    def replace():
        while not stop.is_set():
            path.rename(spare)
            other.rename(path)
            spare.rename(other)

    thread = threading.Thread(target=replace)
    thread.start()
    shapes = jax.eval_shape(lambda: state_of(plan)) | {"step": 0}
    try:
        for _ in range(rounds):
            try:
                restored = te.restore(path, shapes, plan=plan)
            except CheckpointError as error:
                assert str(tmp_path) in str(error)
                continue
            found = numbers_of(restored, plan)
            check_equal(found, numbers[restored["step"] - 4])
    finally:
        stop.set()
        thread.join()


def forge(directory, array, **changes):
    """Changes the metadata of an array, as an attacker would."""
    as_old(directory)
    file = directory / array / "zarr.json"
    metadata = json.loads(file.read_text())
    file.write_text(json.dumps(metadata | changes))
    return metadata


FORGED = {
    "chunks": {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40, 4]}}
    },
    "codecs": {"codecs": [{"name": "bytes"}, {"name": "gzip"}]},
    "names": {"chunk_key_encoding": {"name": "v2"}},
    "shape": {"shape": [2**40, 4]},
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_metadata(saved, plan, name, tmp_path):
    directory = shutil.copytree(saved[0], tmp_path / "a")
    forge(directory, "tables.movie.values", **FORGED[name])
    with pytest.raises(CheckpointError, match="array tables.movie.values of "):
        te.restore(directory, state_of(plan), plan=plan)


def test_a_forged_size_allocates_nothing(saved, tmp_path):
    """Tensorstore ended the process: std::bad_alloc."""
    directory = shutil.copytree(saved[0], tmp_path / "a")
    size = 2**44
    forge(directory, "tables.movie.values", shape=[size, 4])
    file = directory / "state.json"
    values = json.loads(file.read_text())
    movie = values["tables"]["movie"]
    movie["vocabulary_size"] = size
    for array in (movie["values"], *movie["slots"].values()):
        array["shape"][0] = size
    file.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="array tables.movie.values of "):
        te.checkpoint.read_table(directory, "movie")


def test_a_large_description(saved, tmp_path):
    with pytest.raises(ValueError, match="description must have at most"):
        te.save(tmp_path / "a", {"step": 1}, description={"text": "x" * 2**22})
    directory = shutil.copytree(saved[0], tmp_path / "b")
    (directory / "state.json").write_text("[" + "{}," * 2**22 + "{}]")
    with pytest.raises(CheckpointError, match="state.json has more than 8388608 bytes"):
        te.checkpoint.describe(directory)


def test_a_link_out_of_the_checkpoint(saved, plan, tmp_path):
    directory = shutil.copytree(saved[0], tmp_path / "a")
    (directory / "tables.movie.values").rename(tmp_path / "elsewhere")
    (directory / "tables.movie.values").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="tables.movie.values/.*symbolic link"):
        te.restore(directory, state_of(plan), plan=plan)


def test_integers_above_int64_are_restored(tmp_path):
    te.save(tmp_path / "a", {"seed": 2**63, "n": np.int32(3)})
    restored = te.restore(tmp_path / "a", {"seed": 0, "n": np.int32(0)})
    assert restored == {"seed": 2**63, "n": 3}
