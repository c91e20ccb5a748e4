"""Learning rates that are not finite are found before the step, whatever made them."""

import jax
import jax.numpy as jnp
import optax
import pytest

from tpu_embedding import optimizers
from tpu_embedding.optimizers.probe import probe_rule, rates_are_finite


def nan_at_1(count):
    return jnp.where(count == 1, jnp.nan, 0.1)


def inf_at_1(count):
    return jnp.where(count == 1, jnp.inf, 0.1)


def found_at_1(rule):
    """Asks before the second step."""
    rows = jnp.ones((3, 8))
    _, state = rule.update(rows, rule.init(rows), rows)
    leaves = zip(jax.tree.leaves(state), probe_rule(rule, 8).leaves, strict=True)
    return rates_are_finite(rule, 8, [leaf for leaf, slot in leaves if slot is None])


@pytest.mark.parametrize(
    "rule",
    {
        "inf": optax.adam(inf_at_1),
        "totals": optimizers.adafactor(nan_at_1),
        "injected": optax.inject_hyperparams(optax.adam)(nan_at_1),
        "selected": optax.radam(nan_at_1),
        "every": optimizers.every_row(optimizers.adagrad(nan_at_1)),
    }.values(),
)
def test_a_rate_that_is_not_finite_is_found(rule):
    assert not found_at_1(rule)


@pytest.mark.parametrize(
    "rule",
    {
        # Its first steps compute NaN, and do not use it.
        "radam": optax.radam(0.1),
        "no_bound": optax.inject_hyperparams(optimizers.bounded_adagrad)(
            0.1, max_var_update=float("inf")
        ),
        "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 3)),
    }.values(),
)
def test_a_finite_rate_is_not(rule):
    assert found_at_1(rule)


@pytest.mark.parametrize("rule", [optax.sgd(0.1), optimizers.assign()])
def test_a_rule_whose_numbers_never_change_is_not_asked(rule):
    assert found_at_1(rule) is None
