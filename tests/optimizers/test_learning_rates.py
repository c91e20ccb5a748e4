"""Learning rates of every rule: 0, schedules, and what is no learning rate."""

import functools
import inspect
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tests.tiers import full_cases

opt = te.optimizers
ROWS, DIM = 6, 4

BY_NAME = sorted(
    name
    for name, value in vars(opt).items()
    if inspect.isfunction(value)
    and next(iter(inspect.signature(value).parameters), "") == "learning_rate"
)


def user_defined(rate):
    def compute(gradient, row, slots, rate, _):
        return row - rate * gradient / jnp.sqrt(slots[0] + gradient**2), slots[0]

    return opt.user_defined(compute, rate, slot_names=["a"], slot_initializers=[0.1])


def collected(rate):
    return opt.every_row(opt.adam(rate), gradient_steps=1)


# With options whose terms the rate must also multiply.
VARIANTS = {
    "ftrl": {
        "l1_regularization_strength": 0.1,
        "l2_regularization_strength": 0.1,
        "beta": 0.1,
        "l2_shrinkage_regularization_strength": 0.1,
    },
    "online_yogi": {"l1": 0.1, "l2": 0.1},
    "proximal_adagrad": {"l1": 0.1, "l2": 0.1},
    "proximal_yogi": {"l1": 0.1, "l2": 0.1},
    "frequency_aware_adagrad": {"l1": 0.1, "l2": 0.1},
    "lamb": {"weight_decay": 0.1},
    "partial_rowwise_adam": {"weight_decay": 0.1},
    "partial_rowwise_lamb": {"weight_decay": 0.1},
    "rowwise_adagrad": {"weight_decay": 0.1, "weight_decay_mode": "decoupled"},
    "adafactor": {"weight_decay": 0.1, "clipnorm": 0.1, "mode": "exact"},
    "adagrad": {
        "weight_decay_factor": 0.1,
        "multiply_weight_decay_factor_by_learning_rate": True,
    },
}
RULES = {
    **{name: getattr(opt, name) for name in BY_NAME},
    **{
        f"{name} with options": functools.partial(getattr(opt, name), **options)
        for name, options in VARIANTS.items()
    },
    "user_defined": user_defined,
    "every_row": collected,
    **{f"optax.{name}": getattr(optax, name) for name in ("adam", "radam", "novograd")},
}


def warm_up(count):
    """The rates 0, 0, 0.1, 0.1, ..."""
    return jnp.where(count < 2, 0.0, 0.1)


def without_warm_up(count):
    """The rate 0.1, which XLA must not fold into other constants."""
    return jnp.where(count < 0, 0.0, 0.1)


def start():
    return np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)


def gradients():
    for seed in range(5):
        gradient = np.random.default_rng(seed + 1).normal(size=(ROWS, DIM))
        gradient[0] = 0
        yield gradient.astype(np.float32)


def run(optimizer, batches):
    """Yields rows and state before the first step and after each one."""
    rows = jnp.asarray(start())
    state = optimizer.init(rows)
    yield np.asarray(rows), state
    for gradient in batches:
        updates, state = optimizer.update(gradient, state, rows)
        rows = rows + updates
        yield np.asarray(rows), state


@pytest.mark.parametrize(
    "name",
    full_cases(
        RULES,
        *(name for name in RULES if "optax" in name or f"{name} with options" in RULES),
        "clippy_adagrad",
        "adafactor with options",
    ),
)
def test_a_rate_of_zero_leaves_rows_alone(name):
    """Every warm-up begins there; later steps move the rows to finite values."""
    (first, _), *steps = run(RULES[name](warm_up), gradients())
    for rows, _ in steps[:2]:
        np.testing.assert_array_equal(rows, first)
    assert np.isfinite(steps[-1][0]).all()
    assert (steps[-1][0] != first).any(axis=1)[1:].all()


@pytest.mark.parametrize("name", ["ftrl", "ftrl with options", "online_yogi"])
def test_rules_that_divide_by_the_rate_skip_steps_at_zero(name):
    """The steps after a warm-up at 0 are those that they would be without it."""
    batches = list(gradients())
    *_, (late, late_state) = run(RULES[name](warm_up), batches)
    *_, (plain, plain_state) = run(RULES[name](without_warm_up), batches[2:])
    np.testing.assert_array_equal(late, plain)
    for after, without in zip(late_state[1:], plain_state[1:], strict=True):
        np.testing.assert_array_equal(after, without)


WRONG = [
    *((x, TypeError) for x in ("0.1", None, True, [0.1, 0.2], {"rate": 0.1}, 0.1j)),
    *((x, ValueError) for x in (math.nan, math.inf, -0.1, np.ones(2))),
    *((np.float32(x), ValueError) for x in ("nan", -1)),
    *((x, TypeError) for x in (lambda: 0.1, lambda step, epoch: 0.1)),
    # TensorFlow calls it without arguments; the step must not become the rate.
    (lambda rate=0.1: rate, TypeError),
]


@pytest.mark.parametrize("name", [*BY_NAME, "user_defined"])
def test_rejects_what_is_not_a_learning_rate(name):
    for value, kind in WRONG:
        with rejects(kind, field="learning_rate", fix=name):
            RULES[name](value)


def test_injected_rates_and_new_values_are_checked():
    rows = jnp.ones((2, 3))
    state = optax.inject_hyperparams(opt.sgd)(learning_rate=0.1).init(rows)
    # Under jit, a function would be called once, and its value would stay.
    for value, kind in [*WRONG, (lambda step: 0.1, TypeError)]:
        with rejects(kind, field="learning_rate"):
            opt.with_hyperparameters(state, learning_rate=value)
    with rejects(field="momentum", fix="optax.inject_hyperparams"):
        opt.with_hyperparameters(state, momentum=0.5)
    for value in (math.nan, "0.1", None, np.ones(2), -0.1):
        rule = optax.inject_hyperparams(opt.adagrad)(learning_rate=value)
        with rejects((TypeError, ValueError), field="learning_rate"):
            rule.init(rows)
