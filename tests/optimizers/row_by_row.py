"""Compares a rule with a NumPy loop over single rows, for other tests."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import (
    initial_state,
    logical_slots,
    one_table_plan,
    update,
)

VOCABULARY_SIZE, DIM, NUM_IDS = 11, 4, 12
UNTOUCHED_ROW = VOCABULARY_SIZE - 1


def steps(dim=DIM):
    """Ids and gradients of steps that repeat rows, skip rows and have nothing to say.

    No step looks up the last row; row 0 begins with a gradient of zero.
    """
    generator = np.random.default_rng(0)
    all_rows = np.arange(NUM_IDS) % UNTOUCHED_ROW
    for ids, scale in [
        (all_rows, 1.0),
        (generator.integers(0, UNTOUCHED_ROW, NUM_IDS), 3.0),
        (np.full(NUM_IDS, 3), 0.5),
        (all_rows, 0.0),
        (generator.integers(0, UNTOUCHED_ROW, NUM_IDS), 0.01),
        (all_rows, 1.0),
    ]:
        gradients = scale * generator.normal(size=(NUM_IDS, dim))
        gradients[ids == 0] *= scale == 3.0
        yield ids.astype(np.int32), gradients.astype(np.float32)


def start_rows(dim=DIM):
    """Rows of which the first two are zero."""
    rows = np.random.default_rng(1).normal(size=(VOCABULARY_SIZE, dim))
    rows[:2] = 0
    return rows.astype(np.float32)


def check_against_loop(optimizer, step, slots, *, start=None, rtol=1e-4, atol=1e-5):
    """Asserts that table and slots follow the formula, through the public calls.

    Args:
      optimizer: the rule.
      step: `(row, gradient, slots, t) -> (row, slots)` in float64, with `slots` a list
        of arrays or numbers in the order of the state, and the step t from 1.
      slots: of one row, in the beginning.
      start: values of the table; None: `start_rows()`.
      rtol: relative to float64; the default is what `1 - 0.999` loses in float32.
      atol: of rows that are near zero after steps of about one.
    """
    start = start_rows() if start is None else start
    dim = start.shape[1]
    plan = one_table_plan(optimizer, VOCABULARY_SIZE, dim, mesh_of(3))
    tables, state = initial_state(plan, start)
    rows = [row.astype(np.float64) for row in start]
    row_slots = [[np.float64(x) for x in slots] for _ in rows]
    for t, (ids, gradients) in enumerate(steps(dim), 1):
        tables, state = update(tables, state, ids, gradients, plan)
        for r in np.unique(ids):
            gradient = gradients[ids == r].astype(np.float64).sum(axis=0)
            rows[r], row_slots[r] = step(rows[r], gradient, row_slots[r], t)
        table = te.functional.unstack_tables(tables, plan)["table"]
        np.testing.assert_allclose(table, np.stack(rows), rtol=rtol, atol=atol)
        actual = logical_slots(state, plan)
        assert len(actual) == len(slots)
        for i, slot in enumerate(actual):
            expected = np.stack([x[i] + np.zeros(slot.shape[1:]) for x in row_slots])
            np.testing.assert_allclose(slot, expected, rtol=rtol, atol=atol)
    np.testing.assert_array_equal(table[UNTOUCHED_ROW], start[UNTOUCHED_ROW])
    return table, actual


def check_traced(make, *, static_args=(), dim=DIM, **hyperparameters):
    """Asserts that traced hyper-parameters, and pytrees of tables, give the same."""
    injected = optax.inject_hyperparams(make, static_args)(**hyperparameters)
    _, plain_rows = _run(make(**hyperparameters), dim)
    state, injected_rows = _run(injected, dim)
    assert state.hyperparams
    # float32 hyper-parameters instead of float64: `1 - 0.999` differs by 1e-5.
    chex.assert_trees_all_close(injected_rows, plain_rows, rtol=1e-4, atol=1e-5)


def _run(optimizer: Any, dim: int) -> tuple[Any, Any]:
    rows = {"a": jnp.asarray(start_rows(dim)), "b": jnp.ones((2, dim))}
    state = optimizer.init(rows)
    step = jax.jit(optimizer.update)
    for i in range(2):
        gradients = jax.tree.map(lambda x, i=i: jnp.cos(x + i), rows)
        updates, state = step(gradients, state, rows)
        rows = optax.apply_updates(rows, updates)
    return state, rows
