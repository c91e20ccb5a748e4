"""Descriptions of rules differ if rules or hyper-parameters do, and only then."""

import inspect

import jax.numpy as jnp
import optax
import pytest

import tpu_embedding as te
from tests.optimizers.rule_cases import rowwise_momentum_rule
from tpu_embedding.optimizers.names import known_optimizers
from tpu_embedding.optimizers.rule_description import describe_rule

RECIPES = known_optimizers()


NOT_DESCRIBED = {
    "learning_rate",
    "relative_step",  # of the learning rate
    "allow_zero_accumulator",  # only a check
    "low_dimensional_packing_status",
}


def numbers_of(recipe):
    """Hyper-parameters of a recipe that are numbers or flags, with another value."""
    for name, parameter in inspect.signature(recipe).parameters.items():
        default = parameter.default
        if name in NOT_DESCRIBED:
            continue
        if isinstance(default, bool):
            yield name, not default
        elif isinstance(default, int | float):
            yield name, default * 0.5 if default else 0.25
        elif name in ("clip_weight_max", "weight_decay_factor"):
            yield name, 0.25


@pytest.mark.parametrize("name", RECIPES)
def test_every_hyperparameter_is_described(name):
    recipe = RECIPES[name]
    default = describe_rule(recipe(0.1))
    assert describe_rule(recipe(0.2)) == default
    assert describe_rule(recipe(0.1)) == default
    num_accepted = 0
    for parameter, value in numbers_of(recipe):
        try:
            other = recipe(0.1, **{parameter: value})
        except (TypeError, ValueError):
            continue  # The value contradicts others.
        num_accepted += 1
        assert describe_rule(other) != default, parameter
    assert num_accepted > 0


OTHERS = {
    "clipping": (
        optax.chain(optax.clip(0.5), optax.sgd(0.1)),
        optax.chain(optax.clip(0.25), optax.sgd(0.1)),
    ),
    "slot type": (
        te.optimizers.with_slot_storage(optax.adam(0.1), jnp.bfloat16),
        te.optimizers.with_slot_storage(optax.adam(0.1), jnp.float16),
    ),
    "every row": (optax.adam(0.1), te.optimizers.every_row(optax.adam(0.1))),
    "user's function": (
        rowwise_momentum_rule(),
        rowwise_momentum_rule(lambda g, w, slots, rate, _: (w, *slots)),
    ),
    "injected": (
        optax.inject_hyperparams(te.optimizers.adam)(0.1, beta_1=0.9),
        optax.inject_hyperparams(te.optimizers.adam)(0.1, beta_1=0.8),
    ),
    "large array": (
        optax.trace(jnp.full(100, 0.5)),
        optax.trace(jnp.full(100, 0.25)),
    ),
}


@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS)
def test_other_rules_differ(one, other):
    assert describe_rule(one) != describe_rule(other)


def test_schedules_of_the_learning_rate_are_left_out():
    schedules = optax.cosine_decay_schedule(0.1, 10), optax.linear_schedule(0.2, 0, 5)
    for recipe in (te.optimizers.adagrad, te.optimizers.ftrl, optax.adamw):
        one, other = (describe_rule(recipe(schedule)) for schedule in schedules)
        assert one == other
