"""Slot variables that start with one value are found, and no others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tpu_embedding.optimizers.analysis.initial_slots import (
    constant_parts,
    initial_slot_values,
)

DIM = 8


class State(NamedTuple):
    slot: jax.Array


def rule(make_slot):
    return optax.GradientTransformation(
        lambda rows: State(make_slot(rows)),
        lambda updates, state, rows=None: (updates, state),
    )


CONSTANT = {
    "zeros": (jnp.zeros_like, 0),
    "full": (lambda rows: jnp.full_like(rows, 0.1), np.float32(0.1)),
    "one value per row": (lambda rows: jnp.full(rows.shape[:1], 3, jnp.int32), 3),
    "rounded": (
        lambda rows: jnp.full_like(rows, 0.1).astype(jnp.bfloat16),
        np.asarray(0.1, jnp.bfloat16),
    ),
    "jitted": (jax.jit(lambda rows: jnp.ones_like(rows)), 1),
    "constant array": (
        lambda rows: jnp.broadcast_to(jnp.asarray(np.float32(2)), rows.shape),
        2,
    ),
}

VARYING = {
    "the rows": lambda rows: rows,
    "a product with the rows": lambda rows: 0 * rows,
    "row numbers": lambda rows: jnp.arange(rows.shape[0], dtype=jnp.float32),
    "columns": lambda rows: jnp.broadcast_to(jnp.arange(DIM), rows.shape),
    "number of rows": lambda rows: jnp.full_like(rows, 1 / rows.shape[0]),
    "number of rows in a call": lambda rows: jax.jit(jnp.full_like)(
        rows, np.float32(rows.shape[0])
    ),
    "random": lambda rows: jax.random.normal(jax.random.key(0), rows.shape),
    "constant rows": lambda rows: jnp.broadcast_to(
        jnp.asarray(np.arange(DIM, dtype=np.float32)), rows.shape
    ),
}


@pytest.mark.parametrize("case", CONSTANT)
def test_one_value_is_found(case):
    make_slot, expected = CONSTANT[case]
    (found,) = constant_parts(rule(make_slot), DIM)
    rows = jnp.ones((3, DIM))
    np.testing.assert_array_equal(
        jnp.full_like(make_slot(rows), found), make_slot(rows)
    )
    assert float(found) == pytest.approx(float(expected), rel=1e-7)


@pytest.mark.parametrize("case", VARYING)
def test_other_values_are_left_alone(case):
    assert constant_parts(rule(VARYING[case]), DIM) in (None, (None,))


def test_parts_are_those_of_the_state():
    count, momenta, velocities = constant_parts(te.optimizers.adam(0.1), DIM)
    assert (count, momenta, velocities) == (0, 0, 0)
    rate, *parts = constant_parts(
        optax.chain(optax.adam(optax.constant_schedule(1))), 8
    )
    assert rate == 0 and len(parts) == 3


def test_values_of_slots_leave_out_counts():
    assert initial_slot_values(te.optimizers.adam(0.1), DIM) == (0.0, 0.0)
    stored = te.optimizers.adagrad(0.1, 0.3, slot_dtype=jnp.bfloat16)
    assert initial_slot_values(stored, DIM) == (float(jnp.bfloat16(0.3)),)
    averaged = te.optimizers.adafactor(0.1, use_ema=True)
    assert initial_slot_values(averaged, DIM) == (0.0, 0.0, None, 0.0)


COMPUTED = {
    "a product": (lambda rows: 0.1 * jnp.ones(rows.shape, rows.dtype), 0.1),
    "an array of NumPy": (
        lambda rows: jnp.asarray(np.full(rows.shape, 0.1, np.float32)),
        0.1,
    ),
    "a sum": (lambda rows: jnp.zeros_like(rows) + 0.3, 0.3),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_values_that_are_computed(case):
    make_slot, expected = COMPUTED[case]
    assert initial_slot_values(rule(make_slot), DIM) == (float(np.float32(expected)),)


@pytest.mark.parametrize("case", [case for case in VARYING if case[0] != "a"])
def test_values_of_slots_that_vary(case):
    assert initial_slot_values(rule(VARYING[case]), DIM) == (None,)


def test_a_rule_that_cannot_be_traced_is_left_alone():
    def refuse(rows):
        raise RuntimeError("no")

    assert constant_parts(rule(refuse), DIM) is None
