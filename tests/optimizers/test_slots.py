"""Slot variables are found in the state of any transformation."""

import jax
import jax.numpy as jnp
import optax
import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tpu_embedding.optimizers.probe import slot_row_shapes

DIM = 16
FULL, SCALAR = (DIM,), ()

OPTIMIZERS = {
    "rowwise_adagrad": (te.optimizers.rowwise_adagrad(0.1), [SCALAR]),
    "optax.adam": (optax.adam(0.1), [FULL, FULL]),
    "chain": (
        optax.chain(
            optax.clip(1.0),
            optax.scale_by_rss(),
            te.optimizers.rowwise_adagrad(0.1),
            optax.trace(0.9),
        ),
        [FULL, SCALAR, FULL],
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        [FULL, FULL],
    ),
}


@pytest.mark.parametrize(("optimizer", "slots"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_slots_of(optimizer, slots):
    found = jax.tree.leaves(slot_row_shapes(optimizer, (DIM,)))
    assert [slot.shape for slot in found] == slots
    assert all(slot.dtype == jnp.float32 for slot in found)


def transformation(make_state):
    """A transformation with this state, of which only `init` is of interest."""
    return optax.GradientTransformation(
        lambda params: {"part": make_state(params)},
        lambda updates, state, params=None: (updates, state),
    )


WRONG = {
    "transposed": lambda x: jnp.zeros(x.shape[::-1]),
    "one_more_row": lambda x: jnp.zeros((x.shape[0] + 1, x.shape[1])),
    "rows_by_rows": lambda x: jnp.zeros((x.shape[0], x.shape[0])),
    "rows_behind": lambda x: jnp.zeros((2, *x.shape)),
    "half_of_the_rows": lambda x: jnp.zeros((x.shape[0] // 2,)),
}


@pytest.mark.parametrize("make_state", WRONG.values(), ids=WRONG)
def test_parts_that_grow_otherwise_are_refused_by_name(make_state):
    with rejects(te.optimizers.NotRowLocalError, fix="'part'"):
        slot_row_shapes(transformation(make_state), (DIM,))
