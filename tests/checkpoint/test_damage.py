"""Random damage to the checkpoints of a run: a restore is right, or raises an error."""

import json
import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import tpu_embedding as te
from tests.checkpoint.states import check_equal, plan_of
from tests.checkpoint.test_one_save import REPLACEMENTS, changed, places_in
from tests.tiers import quick_cases
from tpu_embedding.checkpoint import CheckpointError
from tpu_embedding.tables import line_exchange

STEPS = (1000, 2000)
SEEDS = 15
"""Cases of each kind of damage; every other one is restored by a manager."""
SIZES = {"movie": 40, "user": 7, "word": te.Dynamic(capacity=64)}


PLAN = plan_of(SIZES, devices=1)


def values_of(state):
    raw = {**state, "key": jax.random.key_data(state["key"])}
    return jax.tree.map(np.array, raw)


@jax.jit
def arrays_of(seed):
    tables = te.functional.init_tables(PLAN, jax.random.key(seed))
    slots = te.functional.init_slots(tables, PLAN)
    ids = jnp.arange(200) + seed  # More than the places of a bucket.
    batch = {"movie": ids % 40, "user": ids % 7}
    batch["word"] = te.functional.Ids64.of_array(ids)
    result = te.functional.insert_ids(tables, slots, batch, PLAN)
    return {"tables": result.tables, "slots": result.slots}


def state_of(seed):
    own = {"step": 3 + seed, "weights": np.full(5, seed), "key": jax.random.key(seed)}
    return arrays_of(seed) | own


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory with two steps, and the values of each."""
    directory, values = tmp_path_factory.mktemp("damage") / "run", {}
    with (
        pytest.MonkeyPatch.context() as patch,
        ocp.CheckpointManager(directory / "checkpoints") as manager,
    ):
        patch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 128)
        for step in STEPS:
            state = state_of(step)
            manager.save(step, args=te.checkpoint.SaveState(state, PLAN))
            manager.wait_until_finished()
            values[step] = values_of(state)
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    return directory, values


def flip(rng, path, other):
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(rng, path, other):
    os.truncate(path, rng.randrange(max(1, path.stat().st_size)))


def extend(rng, path, other):
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 9)))


def delete(rng, path, other):
    path.unlink()


def delete_directory(rng, path, other):
    shutil.rmtree(path.parent)


def swap(rng, path, other):
    if path == other:
        return
    path.rename(path.with_name("moved"))
    other.rename(path)
    path.with_name("moved").rename(other)


def copy(rng, path, other):
    shutil.copy(other, path)


def swap_within(rng, path, other):
    swap(rng, path, rng.choice(files_of(step_of(path))))


def swap_arrays(rng, path, other):
    swap(rng, path.parent, other.parent)


def swap_steps(rng, path, other):
    swap(rng, step_of(path), step_of(other))


def add_foreign(rng, path, other):
    (path.parent / rng.choice(["notes.txt", "state.json.bak", "c9"])).write_text("{}")
    (path.parent / "empty").mkdir()


def link(rng, path, other):
    path.unlink()
    path.symlink_to(other)


def pipe(rng, path, other):
    if path.name.startswith("_"):  # Orbax would wait for its writer.
        return
    path.unlink()
    os.mkfifo(path)


def change_json(rng, path, other):
    root = step_of(path)
    file = rng.choice([*root.rglob("*.json"), *root.rglob("_*METADATA")])
    values = json.loads(file.read_text())
    place = rng.choice([*places_in(values)])
    replacement = "delete" if rng.random() < 0.3 else rng.choice([*REPLACEMENTS, 8, 20])
    file.write_text(json.dumps(changed(values, place, replacement)))


DAMAGES = (
    *(flip, truncate, extend, delete, delete_directory, swap, copy, swap_within),
    *(swap_arrays, swap_steps, add_foreign, link, pipe, change_json),
)


def step_of(path):
    return next(p for p in path.parents if p.parent.name == "checkpoints")


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def restore(checkpoints, step, state, by_manager):
    # Orbax has its own error if the item is missing.
    if not by_manager or not (checkpoints / str(step) / "default").exists():
        return te.restore(checkpoints / str(step), state, plan=PLAN)
    with ocp.CheckpointManager(checkpoints) as manager:
        args = te.checkpoint.RestoreState(state, PLAN)
        return manager.restore(step, args=args)


@pytest.mark.parametrize("damage", quick_cases(DAMAGES, every_case=True))
@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, SEEDS), marks=pytest.mark.full)]
)
def test_a_restore_is_right_or_raises(run, damage, seeds, tmp_path):
    directory, values = run
    for seed in seeds:
        rng = random.Random(f"{damage.__name__}-{seed}")
        checkpoints = shutil.copytree(directory, tmp_path / f"{seed}") / "checkpoints"
        step, other_step = rng.sample(STEPS, 2)
        path = rng.choice(files_of(checkpoints / str(step)))
        inner = path.relative_to(checkpoints / str(step))
        damage(rng, path, checkpoints / str(other_step) / inner)
        state = state_of(5)
        before = values_of(state)
        try:
            restored = restore(checkpoints, step, state, by_manager=seed % 2)
        except CheckpointError as error:
            assert str(checkpoints) in str(error)
            check_equal(values_of(state), before)
        else:
            check_equal(values_of(restored), values[step])
