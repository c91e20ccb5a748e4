"""Saving and restoring states, in whole and in part; damage to files."""

import asyncio
import concurrent.futures
import json
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax import nnx

import tpu_embedding as te
from tests.checkpoint.states import (
    RULE,
    SIZES,
    check_equal,
    make_layer,
    numbers_of,
    plan_of,
    state_of,
    with_random_slots,
)
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.checkpoint import CheckpointError, arrays
from tpu_embedding.tables import line_exchange


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 128)


@pytest.mark.full
def test_shapes_are_enough(tmp_path):
    """For tables of all types, keys, and arrays on devices and on the host."""
    sizes, rules = SIZES | {"word": 9}, dict.fromkeys(SIZES, RULE) | {"word": None}
    dtypes = {"user": "bfloat16", "word": "int8"}
    plan, other = (
        plan_of(sizes, devices=n, rules=rules, dtypes=dtypes) for n in (8, 3)
    )

    def make(plan):
        key = jax.random.key(5)
        return state_of(plan) | {"key": key, "rate": jnp.ones(3)}

    state = make(plan) | {"host": np.arange(3)}
    te.save(tmp_path / "a", state, plan=plan)
    shapes = jax.eval_shape(lambda: make(other)) | {"host": np.zeros(3, int), "step": 0}
    restored = te.restore(tmp_path / "a", shapes, plan=other)
    tables, _ = numbers = numbers_of(state, plan)
    check_equal(numbers_of(restored, other), numbers)
    np.testing.assert_array_equal(restored["host"], state["host"])
    assert restored["key"] == state["key"]
    assert restored["rate"].sharding == other.replicated
    for name in sizes:
        rows = te.checkpoint.read_table(tmp_path / "a", name, [5, 3])
        np.testing.assert_array_equal(np.float32(rows), tables[name][[5, 3]])


def test_saved_arrays_may_be_donated(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "MAX_PENDING_BYTES", 1)
    state = with_random_slots(state_of(plan), plan)
    numbers = numbers_of(state, plan)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=te.checkpoint.SaveState(state, plan))
        add_one = jax.jit(lambda x: jax.tree.map(lambda a: a + 1, x), donate_argnums=0)
        add_one({"tables": state["tables"], "slots": state["slots"]})
        manager.wait_until_finished()
        args = te.checkpoint.RestoreState(state_of(plan, 1), plan)
        check_equal(numbers_of(manager.restore(1, args=args), plan), numbers)


def test_a_checkpoint_is_read_without_its_plan(saved):
    directory, (tables, slots) = saved
    record = te.checkpoint.describe(directory)
    assert record.tables["movie"].vocabulary_size == 40
    assert record.dense == {"step": "int"}
    read = te.checkpoint.read_table
    np.testing.assert_array_equal(read(directory, "movie"), tables["movie"])
    rows = [17, 0, 39, 17]
    np.testing.assert_array_equal(read(directory, "movie", rows), tables["movie"][rows])
    part = read(directory, "movie", slice(5, 20), slot="accumulators")
    np.testing.assert_array_equal(part, slots["movie"]["accumulators"][5:20])
    for error, field, arguments in (
        (IndexError, "rows", {"rows": [40]}),
        (IndexError, "rows", {"rows": [0, -1]}),
        (TypeError, "rows", {"rows": [0.9, 1.9]}),
        (ValueError, "rows", {"rows": slice(0, 4, 2)}),
        (CheckpointError, "slot", {"slot": "mu"}),
        (CheckpointError, "table", {"table": "film"}),
    ):
        with rejects(error, field=field):
            read(directory, **{"table": "movie", **arguments})


class Towers(nnx.Module):
    """Two layers whose tables have one name, a dense layer and a random stream."""

    def __init__(self, devices, seed):
        self.first = make_layer({"item": (20, 4)}, RULE, devices, seed=seed)
        self.second = make_layer({"item": (30, 4)}, RULE, devices, seed=seed + 9)
        self.linear = nnx.Linear(4, 1, rngs=nnx.Rngs(seed))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))


def towers_of(devices, seed):
    model = Towers(devices, seed)
    return model, te.Optimizer(model, optax.adam(1e-2))


@pytest.mark.full
def test_modules_are_restored_in_place_by_a_manager(tmp_path):
    model, _ = pair = towers_of(8, 0)
    args = te.checkpoint.SaveState(pair, description={"epoch": 2})
    new = towers_of(3, 1)
    with ocp.CheckpointManager(tmp_path / "alone") as manager:
        manager.save(4, args=args)
        manager.wait_until_finished()
        manager.restore(4, args=te.checkpoint.RestoreState(new))
    te.save(tmp_path / "again", new)
    saved = te.checkpoint.describe(tmp_path / "alone" / "4")
    assert saved.checksums == te.checkpoint.describe(tmp_path / "again").checksums
    assert sorted(saved.tables) == ["first/item", "second/item"]
    assert saved.description == {"epoch": 2}
    both = ocp.args.Composite(state=args, epoch=ocp.args.JsonSave({"epoch": 1}))
    with ocp.CheckpointManager(tmp_path / "items") as manager:
        manager.save(4, args=both)
    # For serving: the model without its optimizer.
    served = Towers(1, 2)
    te.restore(tmp_path / "items" / "4", (served,))
    check_equal(served.second.embedding_tables(), model.second.embedding_tables())
    np.testing.assert_array_equal(served.linear.kernel, model.linear.kernel)


@pytest.mark.full
def test_a_part_under_another_name(saved):
    """The state has no other leaves, so the checkpoint's are not compared."""
    directory, numbers = saved
    other = plan_of({"film": 40, "user": 7, "new": 9})
    state = {k: x for k, x in state_of(other, 1).items() if k != "step"}
    before = numbers_of(state, other)
    options = {"tables": ["film"], "rename": {"film": "movie"}}
    restored = te.restore(directory, state, plan=other, **options)
    for now, old, was in zip(numbers_of(restored, other), numbers, before, strict=True):
        check_equal(now, {**was, "film": old["movie"]})


@pytest.mark.parametrize("devices", quick_cases([1, 3], "1"))
def test_a_grown_table_has_initial_values_in_new_rows(saved, devices, small_blocks):
    directory, numbers = saved
    other = plan_of({"user": 7, "movie": 55}, devices=devices)
    shapes = jax.eval_shape(lambda: state_of(other)) | {"step": 0}
    with rejects(CheckpointError, field="vocabulary"):
        te.restore(directory, shapes, plan=other)
    fresh = numbers_of(state_of(other), other)
    restored = te.restore(directory, state_of(other), plan=other)
    assert restored["step"] == 3
    for new, old, first in zip(
        *map(jax.tree.leaves, (numbers_of(restored, other), numbers, fresh)),
        strict=True,
    ):
        np.testing.assert_array_equal(new[: len(old)], old)
        np.testing.assert_array_equal(new[len(old) :], first[len(old) :])


@pytest.mark.full
def test_any_table_names(tmp_path):
    names = ["a/b", "a.b", "a", "a.slots.b", "values", "ü %41", "x" * 100]
    plan = plan_of(dict.fromkeys(names, 5))
    state = with_random_slots(state_of(plan), plan)
    te.save(tmp_path / "a", state, plan=plan)
    numbers = numbers_of(state, plan)
    restored = te.restore(tmp_path / "a", state_of(plan, 1), plan=plan)
    check_equal(numbers_of(restored, plan), numbers)
    assert sorted(te.checkpoint.describe(tmp_path / "a").tables) == sorted(names)
    # Plain orbax and tensorstore read it.
    tree = ocp.StandardCheckpointer().restore(tmp_path / "a")
    table, slots = tree["tables"]["a%2Eb"], numbers[1]["a.b"]
    np.testing.assert_array_equal(table["values"], numbers[0]["a.b"])
    check_equal(table["slots"], slots)
    assert tree["dense"] == {"step": 3}
    path = tmp_path / "a" / "tables.values.values"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    rows = tensorstore.open(spec).result()[2:4].read().result()
    np.testing.assert_array_equal(rows, numbers[0]["values"][2:4])


def test_wrong_arguments(saved, plan):
    state = state_of(plan)
    for field in ("tables", "rename"):
        with rejects(ValueError, field=field, value=["film"]):
            te.restore(saved[0], state, plan=plan, **{field: {"film": "movie"}})
    for other in (None, plan_of(devices=3)):
        with rejects(ValueError, fix="plan="):
            te.restore(saved[0], state, plan=other)


def test_of_two_saves_to_one_path_one_is_refused(tmp_path):
    def save(number):
        try:
            te.save(tmp_path / "a", {"step": np.full(10_000, number)})
        except CheckpointError as error:
            return error.field

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        errors = list(threads.map(save, [1, 2]))
    (winner,) = (number for number in (1, 2) if errors[number - 1] is None)
    assert errors[2 - winner] == "directory"
    saved = te.restore(tmp_path / "a", {"step": np.zeros(10_000, int)})["step"]
    np.testing.assert_array_equal(saved, np.full(10_000, winner))


def test_a_full_disk_ends_with_one_error_and_no_checkpoint(tmp_path):
    """A limit on the size of files has the effect of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with rejects(CheckpointError):
            te.save(tmp_path / "a", {"step": np.arange(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with rejects(CheckpointError):
        te.restore(tmp_path / "a", {"step": np.arange(1000)})
    te.save(tmp_path / "a", {"step": 5})
    assert te.restore(tmp_path / "a", {"step": 0})["step"] == 5


def test_directories_without_a_state(saved, tmp_path):
    (tmp_path / "_METADATA").write_text("{}")
    with rejects(CheckpointError, fix="te.checkpoint.open_tables"):
        te.checkpoint.describe(tmp_path)
    file = shutil.copytree(saved[0], tmp_path / "12") / "state.json"
    (tmp_path / "_METADATA").unlink()
    with rejects(CheckpointError, fix=f"{tmp_path}/12"):
        te.checkpoint.describe(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    with rejects(CheckpointError, field="format", value=1):
        te.checkpoint.describe(tmp_path / "12")


def test_saving_within_an_event_loop(tmp_path):
    """As in a notebook. A coroutine that is never awaited warns, which is an error."""

    async def save():
        te.save(tmp_path / "a", {"step": 3})

    asyncio.run(save())
    with rejects(CheckpointError, field="directory"):
        te.save(tmp_path / "a", {"step": 4})
    assert te.restore(tmp_path / "a", {"step": 0}) == {"step": 3}


@pytest.mark.full
def test_the_last_chunk_is_not_padded(small_blocks, tmp_path):
    """A chunk has at most 8 rows of 16 bytes here; each ends with its checksum."""
    sizes = {"a": 8, "b": 63, "c": 1000}
    plan = plan_of(sizes, devices=1)
    state = with_random_slots(state_of(plan), plan)
    te.save(tmp_path / "a", state, plan=plan)
    tables, _ = numbers = numbers_of(state, plan)
    for name, rows in sizes.items():
        chunks = (tmp_path / "a" / f"tables.{name}.values" / "c").rglob("*")
        size = sum(path.stat().st_size - 4 for path in chunks if path.is_file())
        assert rows * 16 <= size <= rows * 16 * (1 + 1 / 128)
        read = te.checkpoint.read_table(tmp_path / "a", name)
        np.testing.assert_array_equal(read, tables[name])
    restored = te.restore(tmp_path / "a", state_of(plan, 1), plan=plan)
    check_equal(numbers_of(restored, plan), numbers)
