"""Splitting states: tables, their slot variables, and leaves that are no tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tpu_embedding.checkpoint.records import CheckpointError

SAVED = {
    "int": 2**40,
    "bool": True,
    "int64": np.int64(2**40),
    "float32": np.float32(0.1),
    "bool_": np.bool_(True),
    "empty": jnp.zeros((0, 3)),
    "none": None,
}


def test_numbers_and_empty_arrays_come_back(tmp_path):
    te.save(tmp_path / "a", SAVED)
    zeros = {
        k: SAVED[k] if k in ("empty", "none") else type(SAVED[k])(0) for k in SAVED
    }
    got = te.restore(tmp_path / "a", zeros)
    assert got.keys() == SAVED.keys()
    for name, wanted in SAVED.items():
        np.testing.assert_array_equal(got[name], wanted)
        assert type(got[name]) is type(wanted)


def test_only_empty_arrays(tmp_path):
    te.save(tmp_path / "a", {"empty": jnp.zeros((0, 3))})
    shape = jax.ShapeDtypeStruct((0, 3), jnp.float32)
    got = te.restore(tmp_path / "a", {"empty": shape})
    assert isinstance(got["empty"], jax.Array)


@pytest.mark.parametrize("leaf", ["movie", 1j])
def test_other_leaves_are_refused(leaf, tmp_path):
    with pytest.raises(TypeError, match=r"arrays or real numbers, got .* at 'name'"):
        te.save(tmp_path / "a", {"name": leaf, "step": 3})


def test_dtypes_that_no_file_holds(tmp_path):
    state = {"model": {"good": np.zeros(3), "bad": jnp.ones(3, jnp.uint4)}}
    with pytest.raises(CheckpointError, match="cannot be written.*uint4"):
        te.save(tmp_path / "a", state)
    assert not (tmp_path / "a").exists()


PLAN = te.make_plan(
    te.FeatureConfig(table=te.TableConfig(vocabulary_size=10, dim=4, name="movie")),
    optimizer=te.optimizers.adagrad(0.1),
)


def layer(seed):
    tables = te.functional.init_tables(PLAN, jax.random.key(seed))
    return {"tables": tables, "slots": te.functional.init_slots(tables, PLAN)}


def with_slots_apart(seed):
    parts = layer(seed)
    return {"tables": parts["tables"], "optimizer": {"slots": parts["slots"]}}


@pytest.mark.parametrize(
    "state",
    [
        {"params": {"tables": layer(0)["tables"]}, "average": layer(1)["tables"]}
        | {"slots": layer(0)["slots"]},
        {"user": with_slots_apart(0), "item": with_slots_apart(1)},
    ],
)
def test_slots_are_never_left_out(state, tmp_path):
    with pytest.raises(ValueError, match=r"slots at .* cannot be matched"):
        te.save(tmp_path / "a", state, plan=PLAN)


def test_a_key_may_be_called_value(tmp_path):
    state = {"scale": {"count": jnp.ones(2), "value": jnp.full(2, 3.0)}}
    te.save(tmp_path / "a", state)
    zeros = jax.tree.map(jnp.zeros_like, state)
    got = te.restore(tmp_path / "a", zeros)
    jax.tree.map(np.testing.assert_array_equal, got, state)
