"""Lazy Adam that catches up equals dense Adam in the steps that look a row up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tests.tiers import quick_cases

NUM_STEPS, NUM_ROWS, DIM = 60, 8, 3
TOUCHED = np.float32([1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.0])
"""How often each row is looked up."""


@jax.jit
def run(rates, b1, b2, eps, rows, gradients, is_touched):
    """Returns the largest errors of touched rows, and of their moments, by step."""

    def rate(count):
        return rates[count]

    dense = optax.adam(rate, b1, b2, eps)
    lazy = te.optimizers.lazy_adam(
        rate, b1=b1, b2=b2, eps=eps, skipped_steps="catch_up"
    )

    def step(carry, given):
        rows, state, dense_rows, dense_state = carry
        gradient, touched = given
        updates, dense_state = dense.update(gradient, dense_state, dense_rows)
        dense_rows = dense_rows + updates
        updates, new = lazy.update(gradient, state, rows)
        moved = (rows + updates, new)
        # A layer writes the rows of a step alone; a count belongs to no row.
        rows, state = jax.tree.map(
            lambda x, y: (
                jnp.where(jnp.expand_dims(touched, range(1, x.ndim)), y, x)
                if x.ndim
                else y
            ),
            (rows, state),
            moved,
        )
        pairs = [(rows, dense_rows), (state.mu, dense_state[0].mu)]
        pairs += [(state.nu, dense_state[0].nu)]
        errors = [
            jnp.where(touched[:, None], jnp.abs(x - y) / (1 + jnp.abs(y)), 0).max()
            for x, y in pairs
        ]
        return (rows, state, dense_rows, dense_state), jnp.stack(errors)

    carry = rows, lazy.init(rows), rows, dense.init(rows)
    return jax.lax.scan(step, carry, (gradients, is_touched))[1]


@pytest.mark.parametrize("seed", quick_cases(range(50), *map(str, range(3))))
def test_equals_dense_adam_where_rows_are_touched(seed):
    random = np.random.default_rng(seed)
    is_touched = random.random((NUM_STEPS, NUM_ROWS)) < random.permutation(TOUCHED)
    size = 10.0 ** random.uniform(-4, 1, (NUM_STEPS, NUM_ROWS, 1))
    gradients = random.normal(size=(NUM_STEPS, NUM_ROWS, DIM)) * size
    gradients *= is_touched[:, :, None]
    rates = np.float32(random.uniform(0, 0.05) * random.random(NUM_STEPS))
    b2 = random.choice([0.9, 0.99, 0.999])
    b1 = random.choice([0.0, 0.5, 0.9])
    errors = run(
        rates,
        np.float32(b1),
        np.float32(b2),
        np.float32(10.0 ** random.uniform(-8, -2)),
        np.float32(random.uniform(-0.5, 0.5, (NUM_ROWS, DIM))),
        np.float32(gradients),
        is_touched,
    )
    assert np.max(errors) < 1e-6


def test_a_row_that_waits_for_long():
    """Far more steps than the loop takes; the moments are those of all of them."""
    rows, gradient = jnp.full((1, 1), 0.25), jnp.full((1, 1), 0.5)
    lazy = te.optimizers.lazy_adam(0.01, skipped_steps="catch_up")
    dense = te.optimizers.lazy_adam(0.01)
    found, expected = [], []
    for rule, results, waits in ((lazy, found, False), (dense, expected, True)):
        update = jax.jit(rule.update)
        state, new = rule.init(rows), rows
        for step in range(1002):
            is_due = step in (0, 1001)
            if waits or is_due:
                updates, state = update(gradient * is_due, state, new)
                new = new + updates
            else:
                state = state._replace(count=state.count + 1)
        results += [new, *jax.tree.leaves(state)[1:3]]
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_numbers_are_those_of_optax():
    rows = jnp.asarray([[0.5, -1.0], [2.0, 0.25]])
    decay = {"eps": 1e-3, "weight_decay": 0.2}
    for rule, dense in (
        (te.optimizers.lazy_adam(0.1, b1=0.5), optax.adam(0.1, b1=0.5)),
        (te.optimizers.adamw(0.1, **decay), optax.adamw(0.1, **decay)),
    ):
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.tree.leaves(rule.update(rows**2, rule.init(rows), rows)),
            jax.tree.leaves(dense.update(rows**2, dense.init(rows), rows)),
        )


ONES = jnp.ones((1, 2))


def caught_up(rate=0.1, state=None, gradient=ONES, **options):
    """Returns updates of a row without a gradient now, which waited for 10 steps."""
    rule = te.optimizers.lazy_adam(rate, skipped_steps="catch_up", **options)
    _, first = rule.update(gradient, rule.init(gradient), gradient)
    state = first if state is None else first._replace(**state)
    state = state._replace(count=state.count + 10)
    return rule.update(0 * gradient, state, gradient)


def test_moments_of_a_rule_that_ignored_skipped_steps_skipped_none():
    updates, state = caught_up(state={"last_counts": jnp.zeros(1, jnp.int32)})
    # One step of 0.9 * mu and 0.999 * nu at count 12, and no others.
    mu, nu = (0.9 * 0.1) / (1 - 0.9**12), (0.999 * 0.001) / (1 - 0.999**12)
    np.testing.assert_allclose(updates, -0.1 * mu / np.sqrt(nu) * ONES, rtol=1e-4)
    assert state.last_counts.tolist() == [12]


def test_a_rate_that_was_not_finite_moved_nothing():
    found, expected = (
        caught_up(lambda count, rate=rate: jnp.where(count == 3, rate, 0.1))[0]
        for rate in (jnp.nan, 0.0)
    )
    np.testing.assert_array_equal(found, expected)
    assert np.all(found < 0)


def test_columns_without_a_gradient_stay_at_any_epsilon():
    updates, _ = caught_up(gradient=jnp.array([[1.0, 0.0]]), epsilon=1e-37, rate=1e3)
    assert np.isfinite(updates).all() and updates[0, 1] == 0


def test_what_cannot_catch_up_is_rejected():
    with rejects(field="beta_1", value=0.9):
        caught_up(b1=0.9, b2=0.81)
    with rejects(fix="optax.adam"):
        caught_up(gradient=jnp.ones(3))
