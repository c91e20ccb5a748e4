"""Tests the checkpoints of a run: saving, restoring, deletion and errors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tpu_embedding.checkpoint import (
    CheckpointError,
    RunCheckpoints,
    describe_plan,
    describe_state,
)

DESCRIPTION = {"run": {"seed": 0}, "plan": {"num_shards": 8, "sizes": [1, 2]}}


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", kept=2)
    yield checkpoints
    checkpoints.close()


def make_state(value):
    sharding = NamedSharding(mesh_of(8), PartitionSpec("shard"))
    rows = jnp.full((16, 3), value, jnp.float32) * jnp.pi
    return {
        "tables": {"stack_0": jax.device_put(rows, sharding)},
        "moments": (jnp.float32(value), [jnp.arange(3, dtype=jnp.int32)]),
    }


def test_restored_state_is_bitwise_the_saved_one(checkpoints):
    state = make_state(1 / 3)
    checkpoints.save(5, state, DESCRIPTION)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    step, restored = checkpoints.restore(abstract, DESCRIPTION)
    assert step == 5
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for got, wanted in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
    ):
        assert got.dtype == wanted.dtype
        assert got.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)
        np.testing.assert_array_equal(got, wanted)


class Unsorted(NamedTuple):
    """A state whose fields are not in alphabetical order."""

    gradient: jax.Array
    count: jax.Array


def test_leaves_come_back_in_their_places(checkpoints):
    state = {
        "slots": Unsorted(gradient=jnp.ones((2, 3)), count=jnp.zeros((2, 3))),
        "many": [jnp.full(1, i) for i in range(11)],
        "small": jnp.ones(3, jnp.bfloat16),
    }
    checkpoints.save(1, state, DESCRIPTION)
    _, restored = checkpoints.restore(state, DESCRIPTION)
    for got, wanted in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
    ):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def test_two_leaves_of_one_path_are_refused(checkpoints):
    with pytest.raises(ValueError, match="same path .*contains a dot"):
        checkpoints.save(1, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, DESCRIPTION)


def test_latest_ones_are_kept(checkpoints):
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), DESCRIPTION)
    names = sorted(p.name for p in checkpoints.directory.iterdir() if p.is_dir())
    assert names == ["2", "3"]
    assert checkpoints.restore(make_state(0), DESCRIPTION)[0] == 3


def test_saved_state_may_be_donated(checkpoints):
    add_one = jax.jit(lambda x: jax.tree.map(lambda a: a + 1, x), donate_argnums=0)
    state = make_state(2)
    checkpoints.save(1, state, DESCRIPTION)
    for _ in range(10):
        state = add_one(state)
    _, restored = checkpoints.restore(make_state(0), DESCRIPTION)
    np.testing.assert_array_equal(
        restored["tables"]["stack_0"], make_state(2)["tables"]["stack_0"]
    )


def test_what_a_kill_left_behind_is_no_checkpoint(checkpoints, tmp_path):
    checkpoints.save(1, make_state(1), DESCRIPTION)
    half = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp-0"
    half.mkdir()
    (half / "state").write_text("half")
    reopened = RunCheckpoints(tmp_path / "checkpoints", kept=2)
    assert reopened.latest_step == 1
    assert reopened.restore(make_state(0), DESCRIPTION)[0] == 1
    reopened.close()


def test_no_checkpoint(checkpoints):
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        checkpoints.restore(make_state(0), DESCRIPTION)


def test_every_difference_is_named(checkpoints):
    checkpoints.save(1, make_state(1), DESCRIPTION | {"old": 1})
    wanted = {
        "run": {"seed": 1},
        "plan": {"num_shards": 2, "sizes": [1, 2]},
        "new": 1,
    }
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(make_state(0), wanted)
    message = str(error.value)
    assert "run.seed: 0 in the checkpoint, 1 now" in message
    assert "plan.num_shards: 8 in the checkpoint, 2 now" in message
    assert "old: only in the checkpoint" in message
    assert "new: not in the checkpoint" in message
    assert "sizes" not in message


def plan_of(
    *,
    num_devices=2,
    dim=4,
    vocabulary_size=9,
    optimizer=None,
    hardware="cpu",
    kernels=None,
):
    table = te.TableConfig(vocabulary_size=vocabulary_size, dim=dim, name="movie")
    return te.make_plan(
        {"watched": te.FeatureConfig(table=table)},
        mesh_of(num_devices),
        optimizer=optimizer or te.optimizers.adagrad(0.1),
        kernels=kernels,
        hardware=te.hardware_by_name(hardware),
    )


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"optimizer": te.optimizers.adagrad(0.2)}, True),
        ({"num_devices": 3}, False),
        ({"dim": 5}, False),
        ({"vocabulary_size": 10}, False),
        ({"optimizer": optax.sgd(0.1)}, False),
        ({"hardware": "v5p"}, False),
    ],
)
def test_description_of_a_plan(change, is_same):
    assert (describe_plan(plan_of(**change)) == describe_plan(plan_of())) == is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (te.optimizers.adagrad(0.1), te.optimizers.proximal_adagrad(0.1)),
        (optax.adam(0.1), optax.adamw(0.1)),
        (optax.adam(0.1), te.optimizers.every_row(optax.adam(0.1))),
        (optax.sgd(0.1), te.optimizers.in_sequence(optax.sgd(0.1))),
    ],
)
def test_descriptions_of_rules_with_equal_slots_differ(one, other):
    one, other = (
        describe_plan(plan_of(optimizer=rule))["stacks"]["stack_0"]
        for rule in (one, other)
    )
    assert one["slots"] == other["slots"]
    assert one["optimizer"] != other["optimizer"]


def test_description_of_a_state():
    plan = plan_of()
    tables = te.init_tables(plan, jax.random.key(0))
    moments = Unsorted(gradient=jnp.ones(4), count=jnp.int32(0))
    state = {"tables": tables, "dense": [np.ones((2, 3)), moments]}
    assert describe_state(state) == {
        "tables": {"stack_0": "rows"},
        "dense": {
            "0": "float64[2, 3]",
            "1": {"gradient": "float32[4]", "count": "int32[]"},
        },
    }


@needs_kernels
def test_description_of_a_spare_row():
    plans = [
        plan_of(hardware="v5p", dim=32, vocabulary_size=8, kernels=kernels)
        for kernels in ("xla", "interpreter")
    ]
    none, kernels = (describe_plan(plan)["stacks"]["stack_0"] for plan in plans)
    # The 4 rows of a device fill one line. The spare row of the kernels needs another.
    assert (none["num_lines"], kernels["num_lines"]) == (1, 2)
