"""A rule in two halves: values of a step, and arithmetic on rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.tiers import quick_cases
from tpu_embedding.optimizers.jaxprs import evaluate
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.optimizers.row_optimizer import row_optimizer_of
from tpu_embedding.sparse_core.rule_split import split_rule

DIM, NUM_ROWS = 4, 136  # the probe traces 136 rows
SCHEDULE = optax.linear_schedule(0.1, 0.0, 100)

RULES = {
    "adam": optax.adam(SCHEDULE),
    "adagrad": te.optimizers.adagrad(0.1),
    "ftrl": te.optimizers.ftrl(SCHEDULE, l1_regularization_strength=0.1),
    "radam": optax.radam(0.1),
    "conditional": optax.conditionally_transform(
        optax.scale_by_adam(), lambda step: step > 2, forward_extra_args=False
    ),
    "steps in a conditional": te.optimizers.every_row(
        optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation()
    ),
}
CROSSING = {"adagrad": 0, "adam": 3, "radam": 4, "conditional": 2}
"""Scalars that rows need: Adam's two bias corrections and its learning rate."""


def arguments_of(rule, num_rows):
    """Returns gradients and rows of normal numbers, and the state after two steps."""
    gradient, rows = np.random.default_rng(0).normal(size=(2, num_rows, DIM))
    gradient, rows = jnp.float32(gradient), jnp.float32(rows)
    state = rule.init(rows)
    for _ in range(2):
        _, state = rule.update(gradient, state, rows)
    return gradient, rows, state


@pytest.mark.parametrize(
    "name", quick_cases(RULES, "adam", "conditional", every_case=True)
)
def test_both_halves_compute_what_the_rule_does(name):
    rule = row_optimizer_of(RULES[name]).transformation
    probed = probe_rule(rule, DIM)
    split = split_rule(probed)
    gradient, rows, state = arguments_of(rule, NUM_ROWS)
    leaves, tree = jax.tree.flatten(state)
    scalars, slots = probed.partition(leaves)
    hyperparameters, new_scalars = split.values(scalars)
    is_touched = jnp.ones(NUM_ROWS, bool)
    arguments = [gradient, rows, is_touched, *slots, *hyperparameters]
    found = [*new_scalars, *evaluate(split.row_jaxpr, arguments)]
    updates, new_state = rule.update(gradient, state, rows)
    expected_scalars, expected_slots = probed.partition(tree.flatten_up_to(new_state))
    expected = [*expected_scalars, updates, *expected_slots]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert all(jnp.shape(x) == () for x in hyperparameters)
    assert split.num_hyperparameters == CROSSING.get(name, split.num_hyperparameters)


def test_side_effects_stay():
    """A user prints values of a rule, in either half."""
    seen = []

    def update(g, count, rows):
        jax.debug.callback(lambda x: seen.append(("rows", x.shape)), g)
        jax.debug.callback(lambda x: seen.append(("values", x.shape)), count)
        return g, count

    rule = optax.GradientTransformation(lambda rows: jnp.zeros(()), update)
    split = split_rule(probe_rule(rule, DIM))
    jax.effects_barrier()
    seen.clear()
    hyperparameters, _ = split.values([jnp.float32(1)])
    jax.effects_barrier()
    assert seen == [("values", ())]
    g = jnp.ones((NUM_ROWS, DIM))
    evaluate(split.row_jaxpr, [g, g, jnp.ones(NUM_ROWS, bool), *hyperparameters])
    jax.effects_barrier()
    assert seen == [("values", ()), ("rows", (NUM_ROWS, DIM))]
