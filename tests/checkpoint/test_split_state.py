"""Splitting states: tables, their slot variables, and other leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.checkpoint.states import plan_of, state_of
from tests.rejections import rejects
from tpu_embedding.checkpoint.records import CheckpointError

SAVED = {
    "int": 2**63,
    "bool": True,
    "int64": np.int64(2**40),
    "float32": np.float32(0.1),
    "bool_": np.bool_(True),
    "none": None,
}


ARRAYS = {
    "empty": jnp.zeros((0, 3)),
    # A key may be called value.
    "scale": {"count": jnp.ones(2), "value": jnp.full(2, 3.0)},
}


@pytest.mark.parametrize("wanted", [SAVED | ARRAYS, {"empty": jnp.zeros((0, 3))}])
def test_numbers_and_empty_arrays_come_back(wanted, tmp_path):
    te.save(tmp_path / "a", wanted)
    zeros = jax.tree.map(
        lambda x: jax.eval_shape(lambda: x) if hasattr(x, "sharding") else type(x)(0),
        wanted,
    )
    got = te.restore(tmp_path / "a", zeros)
    assert jax.tree.map(type, got) == jax.tree.map(type, wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("leaf", ["movie", 1j])
def test_other_leaves_are_refused(leaf, tmp_path):
    with rejects(TypeError, field="leaf name", value=leaf):
        te.save(tmp_path / "a", {"name": leaf, "step": 3})


def test_dtypes_that_no_file_holds(tmp_path):
    state = {"model": {"good": np.zeros(3), "bad": jnp.ones(3, jnp.uint4)}}
    with rejects(CheckpointError, fix="uint4"):
        te.save(tmp_path / "a", state)
    assert not (tmp_path / "a").exists()


PLAN = plan_of({"movie": 10}, devices=1)


def layer(seed):
    return {key: x for key, x in state_of(PLAN, seed).items() if key != "step"}


def with_slots_apart(seed):
    tables, slots = layer(seed).values()
    return {"tables": tables, "optimizer": {"slots": slots}}


@pytest.mark.parametrize(
    "state",
    [
        {"params": {"tables": layer(0)["tables"]}, "average": layer(1)["tables"]}
        | {"slots": layer(0)["slots"]},
        {"user": with_slots_apart(0), "item": with_slots_apart(1)},
    ],
)
def test_slots_are_never_left_out(state, tmp_path):
    with rejects(ValueError, fix="{'user': {'tables': ..., 'slots': ...}}"):
        te.save(tmp_path / "a", state, plan=PLAN)
