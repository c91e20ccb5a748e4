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
from tests.checkpoint.test_saving import check_equal, plan_of
from tests.tiers import quick_cases, with_ids
from tpu_embedding.checkpoint import CheckpointError
from tpu_embedding.tables import line_exchange

STEPS = (1000, 2000)
SEEDS = 15
"""Cases of each kind of damage; every other one is restored by a manager."""
SIZES = {"movie": 40, "user": 7, "word": te.Dynamic(capacity=64)}


def values_of(state):
    return jax.tree.map(
        lambda x: np.array(jax.random.key_data(x) if is_key(x) else x), state
    )


def is_key(leaf):
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


class Run:
    """A run's directory with two steps, and the values of each."""

    def __init__(self, directory):
        self.directory = directory
        self.plan = plan_of(SIZES, devices=1)
        self.values = {}
        with ocp.CheckpointManager(directory / "checkpoints") as manager:
            for step in STEPS:
                state = self._state_of(step)
                manager.save(step, args=te.checkpoint.SaveState(state, self.plan))
                manager.wait_until_finished()
                self.values[step] = values_of(state)
        (directory / "metrics.jsonl").write_text('{"step": 1}\n')
        self.initial = jax.device_get(self._state_of(5) | {"key": 0})

    def _state_of(self, seed):
        @jax.jit
        def make(ids):
            tables = te.functional.init_tables(self.plan, jax.random.key(seed))
            slots = te.functional.init_slots(tables, self.plan)
            batch = {"movie": ids % 40, "user": ids % 7}
            batch["word"] = te.functional.Ids64.of_array(ids)
            result = te.functional.insert_ids(tables, slots, batch, self.plan)
            return {"tables": result.tables, "slots": result.slots}

        own = {
            "step": 3 + seed,
            "weights": np.full(5, seed),
            "key": jax.random.key(seed),
        }
        return make(np.arange(20 + seed)) | own

    def state(self):
        """Returns a new state, which is neither step's."""
        arrays = jax.tree.map(jnp.array, self.initial)
        return arrays | {
            "key": jax.random.key(9),
            "step": 0,
            "weights": np.zeros(5, int),
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 128)
        return Run(tmp_path_factory.mktemp("damage") / "run")


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
    inner = values
    while True:
        places = list(inner) if isinstance(inner, dict) else range(len(inner))
        place = rng.choice(places)
        deeper = isinstance(inner[place], dict | list) and inner[place]
        if not deeper or rng.random() < 0.2:
            break
        inner = inner[place]
    if rng.random() < 0.3:
        del inner[place]
    else:
        inner[place] = rng.choice(
            [None, True, -1, 2**70, 0.5, "x", [], {}, [{}], 8, 20]
        )
    file.write_text(json.dumps(values))


DAMAGES = {
    damage.__name__: damage
    for damage in (
        *(flip, truncate, extend, delete, delete_directory, swap, copy, swap_within),
        *(swap_arrays, swap_steps, add_foreign, link, pipe, change_json),
    )
}


def step_of(path):
    return next(p for p in path.parents if p.parent.name == "checkpoints")


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def restore_by_path(checkpoints, step, state, plan):
    return te.restore(checkpoints / str(step), state, plan=plan)


def restore_by_manager(checkpoints, step, state, plan):
    if not (checkpoints / str(step) / "default").exists():
        return restore_by_path(
            checkpoints, step, state, plan
        )  # Orbax has its own error.
    with ocp.CheckpointManager(checkpoints) as manager:
        args = te.checkpoint.RestoreState(state, plan)
        return manager.restore(step, args=args)


WAYS = (restore_by_path, restore_by_manager)


@pytest.mark.parametrize(
    "damage", quick_cases(with_ids(DAMAGES), "swap", "change_json", every_case=True)
)
@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, SEEDS), marks=pytest.mark.full)]
)
def test_a_restore_is_right_or_raises(run, damage, seeds, tmp_path):
    for seed in seeds:
        rng = random.Random(f"{damage.__name__}-{seed}")
        directory = shutil.copytree(run.directory, tmp_path / f"run{seed}")
        step, other_step = rng.sample(STEPS, 2)
        checkpoints = directory / "checkpoints"
        path = rng.choice(files_of(checkpoints / str(step)))
        inner = path.relative_to(checkpoints / str(step))
        damage(rng, path, checkpoints / str(other_step) / inner)
        state = run.state()
        before = values_of(state)
        try:
            restored = WAYS[seed % 2](checkpoints, step, state, run.plan)
        except CheckpointError as error:
            assert str(checkpoints) in str(error)
            check_equal(values_of(state), before)
        else:
            check_equal(values_of(restored), run.values[step])
