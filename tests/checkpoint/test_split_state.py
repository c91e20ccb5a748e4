"""Splitting states: tables, their slot variables, and other leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te

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
    with pytest.raises(ValueError, match=r"slots.* must belong to the tables of one"):
        te.save(tmp_path / "a", state, plan=PLAN)


def test_a_key_may_be_called_value(tmp_path):
    state = {"scale": {"count": jnp.ones(2), "value": jnp.full(2, 3.0)}}
    te.save(tmp_path / "a", state)
    zeros = jax.tree.map(jnp.zeros_like, state)
    got = te.restore(tmp_path / "a", zeros)
    jax.tree.map(np.testing.assert_array_equal, got, state)
