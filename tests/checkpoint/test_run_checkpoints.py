"""Tests the checkpoints of a run: saving, restoring, deletion and errors."""

import datetime
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.checkpoint import CheckpointError, RunCheckpoints
from tpu_embedding.tables import row_windows

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
    checkpoints.wait()
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
    checkpoints.wait()
    _, restored = checkpoints.restore(state, DESCRIPTION)
    for got, wanted in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
    ):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("other", [{"a": {"b": jnp.ones(1)}}, {"a": jnp.ones(1)}])
def test_two_leaves_of_one_path_are_refused(checkpoints, other):
    with pytest.raises(ValueError, match="same path .*contains a dot"):
        checkpoints.save(1, other | {"a.b": jnp.ones(1)}, DESCRIPTION)


def test_a_saved_step_is_never_replaced(checkpoints):
    checkpoints.save(1, {"weight": jnp.ones(1)}, DESCRIPTION)
    with pytest.raises(
        CheckpointError, match="has a checkpoint of step 1, and a saved"
    ):
        checkpoints.save(1, {"weight": jnp.zeros(1)}, DESCRIPTION)
    _, restored = checkpoints.restore({"weight": jnp.zeros(1)}, DESCRIPTION)
    assert restored["weight"] == 1


def test_latest_ones_are_kept(checkpoints):
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), DESCRIPTION)
    checkpoints.wait()
    names = sorted(p.name for p in checkpoints.directory.iterdir() if p.is_dir())
    assert names == ["2", "3"]
    assert checkpoints.restore(make_state(0), DESCRIPTION)[0] == 3


def test_saved_state_may_be_donated(checkpoints):
    add_one = jax.jit(lambda x: jax.tree.map(lambda a: a + 1, x), donate_argnums=0)
    state = make_state(2)
    checkpoints.save(1, state, DESCRIPTION)
    checkpoints.wait()
    for _ in range(10):
        state = add_one(state)
    _, restored = checkpoints.restore(make_state(0), DESCRIPTION)
    np.testing.assert_array_equal(
        restored["tables"]["stack_0"], make_state(2)["tables"]["stack_0"]
    )


def test_what_a_kill_left_behind_is_no_checkpoint(checkpoints, tmp_path):
    checkpoints.save(1, make_state(1), DESCRIPTION)
    checkpoints.wait()
    half = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp-0"
    half.mkdir()
    (half / "state").write_text("half")
    reopened = RunCheckpoints(tmp_path / "checkpoints", kept=2)
    assert reopened.latest_step == 1
    assert reopened.restore(make_state(0), DESCRIPTION)[0] == 1
    reopened.save(3, make_state(3), DESCRIPTION)
    reopened.wait()
    assert not half.exists()
    reopened.close()


def test_no_checkpoint(checkpoints):
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        checkpoints.restore(make_state(0), DESCRIPTION)


def test_every_difference_is_named(checkpoints):
    checkpoints.save(1, make_state(1), DESCRIPTION | {"old": 1})
    checkpoints.wait()
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


def damage(checkpoints, step):
    """Flips a bit of a file of a checkpoint."""
    path = checkpoints.directory / str(step) / "state" / "state.json"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture
def three(tmp_path):
    """Three checkpoints, of which the last two are damaged."""
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", kept=3)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), DESCRIPTION)
    checkpoints.wait()
    for step in (2, 3):
        damage(checkpoints, step)
    yield checkpoints
    checkpoints.close()


def test_the_given_step_is_restored(three):
    """Not the latest one, which the hosts of a job may list differently."""
    step, state = three.restore(make_state(0), DESCRIPTION, step=1)
    assert step == state["moments"][0] == 1
    with pytest.raises(CheckpointError, match=r"got 7; those are \[1, 2, 3\]"):
        three.restore(make_state(0), DESCRIPTION, step=7)


def test_an_older_checkpoint_is_used_on_request_only(three):
    with pytest.raises(
        CheckpointError, match=r"checkpoints/3/state/state.json.*damage"
    ):
        three.restore(make_state(0), DESCRIPTION)
    step, restored = three.restore(make_state(0), DESCRIPTION, fallback="older")
    assert step == three.latest_step == 1
    np.testing.assert_array_equal(
        restored["tables"]["stack_0"], make_state(1)["tables"]["stack_0"]
    )
    # The run comes to the damaged steps again. They are kept under another name.
    three.save(2, make_state(2), DESCRIPTION)
    three.wait()
    names = sorted(p.name for p in three.directory.iterdir())
    assert names == ["1", "2", "damaged-2", "damaged-3"]
    reopened = RunCheckpoints(three.directory, kept=3)
    assert reopened.restore(make_state(0), DESCRIPTION)[0] == 2
    damage(three, 2)
    assert reopened.restore(make_state(0), DESCRIPTION, fallback="older")[0] == 1
    names = sorted(p.name for p in three.directory.iterdir())
    assert names == ["1", "damaged-2", "damaged-2.2", "damaged-3"]
    reopened.close()


def test_no_checkpoint_is_whole(three):
    damage(three, 1)
    with pytest.raises(CheckpointError, match="(?s)is whole.*/3/.*/2/.*/1/"):
        three.restore(make_state(0), DESCRIPTION, fallback="older")
    assert three.steps == [1, 2, 3]


def test_another_run_is_not_restored_as_a_fallback(three):
    with pytest.raises(CheckpointError, match="run.seed: 0 in the checkpoint, 1 now"):
        three.restore(
            make_state(0), DESCRIPTION | {"run": {"seed": 1}}, fallback="older"
        )


def test_one_checkpoint_per_interval_is_kept(tmp_path):
    checkpoints = RunCheckpoints(
        tmp_path / "all", kept=1, keep_every=datetime.timedelta(microseconds=1)
    )
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), DESCRIPTION)
    checkpoints.wait()
    assert checkpoints.steps == [1, 2, 3]
    checkpoints.close()


@pytest.mark.full
def test_lost_arrays_are_named_in_place_of_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(row_windows, "_MIN_BLOCK_BYTES", 100)
    table = te.TableConfig(vocabulary_size=50, dim=4, name="movie")
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(1))
    checkpoints = RunCheckpoints(tmp_path, kept=2, plan=plan)
    state = {"tables": te.functional.init_tables(plan, jax.random.key(0))}
    shapes = jax.eval_shape(lambda: state)
    for step in (1, 2):
        checkpoints.save(step, state, DESCRIPTION)
    checkpoints.wait()
    (path,) = (tmp_path / "2").rglob("movie.values/c/4/0")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="arrays of the given state are lost"):
        checkpoints.restore(state, DESCRIPTION, fallback="older")
    assert checkpoints.restore(shapes, DESCRIPTION, fallback="older")[0] == 1
    checkpoints.close()
