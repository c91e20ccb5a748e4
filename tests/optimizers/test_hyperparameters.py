"""Hyper-parameters of every rule: their ranges, and values that are traced."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.optimizers.rule_cases import rowwise_momentum
from tpu_embedding.optimizers.row_optimizer import every_row, in_sequence
from tpu_embedding.optimizers.rules.adafactor import adafactor
from tpu_embedding.optimizers.rules.adagrad import (
    adagrad,
    adagrad_momentum,
    bounded_adagrad,
    clippy_adagrad,
    frequency_aware_adagrad,
    frequency_estimator,
    proximal_adagrad,
    rowwise_adagrad,
)
from tpu_embedding.optimizers.rules.adam import (
    adadelta,
    adam,
    online_yogi,
    proximal_yogi,
    rmsprop,
)
from tpu_embedding.optimizers.rules.ftrl import ftrl
from tpu_embedding.optimizers.rules.rowwise import (
    lamb,
    partial_rowwise_adam,
    partial_rowwise_lamb,
    rowwise_rmsprop,
)
from tpu_embedding.optimizers.rules.sgd import lion, momentum, sgd
from tpu_embedding.optimizers.rules.user_defined import user_defined


def with_options(**options):
    return te.optimizers.with_options(te.optimizers.sgd(0.1), **options)


CORRECTED_MOMENTS = (partial_rowwise_adam, lamb, partial_rowwise_lamb)
ESTIMATOR = {"tau": 0.5, "max_delta": 9.0, "outlier_threshold": 2.0}

# Function, its arguments by name, and a part of the message. The learning rate is 0.1
# where a rule needs one. `RANGES` has the ranges; here are some, and a rule's own.
WRONG = [
    (adagrad, {"initial_accumulator_value": 0.0}, "initial_accumulator_value"),
    (
        rowwise_adagrad,
        {"initial_accumulator_value": 0.0},
        "initial_accumulator_value must be positive",
    ),
    (
        rowwise_adagrad,
        {"initial_accumulator_value": -1.0, "epsilon": 0.1},
        "initial_accumulator_value must be non-negative",
    ),
    (adam, {"beta_1": 1.0}, r"beta_1 must be in \[0, 1\)"),
    (ftrl, {"learning_rate_power": 0.5}, "non-positive"),
    (
        ftrl,
        {"initial_accumulator_value": 0.0},
        "ftrl: initial_accumulator_value must be positive",
    ),
    (lamb, {"epsilon": 0}, "epsilon must be positive"),
    (partial_rowwise_adam, {"weight_decay": -0.1}, "weight_decay must be non-negative"),
    (
        bounded_adagrad,
        {"max_var_update": -1.0},
        "max_var_update must be non-negative, got -1",
    ),
    (frequency_aware_adagrad, {"l1": -1.0, "l2": -1.0}, "l1 .*; l2 must be"),
    (online_yogi, {"l1": -1.0, "beta_2": 1.0}, "l1 .*; beta_2 must be in"),
    (
        rowwise_rmsprop,
        {"rho": 1.0, "epsilon": 0.0},
        "rho must be in .*; epsilon must be positive",
    ),
    (adafactor, {"beta_2_decay": 0.8}, "beta_2_decay must be non-positive"),
    (adafactor, {"clipnorm": 1.0, "clipvalue": 1.0}, "one of clipnorm, clipvalue"),
    (adafactor, {"use_ema": True, "ema_momentum": 1.5}, "ema_momentum must be in"),
    (
        adafactor,
        {
            "gradient_accumulation_steps": 2,
            "use_ema": True,
            "ema_overwrite_frequency": 3,
        },
        "ema_overwrite_frequency must be None with gradient_accumulation_steps",
    ),
    (
        adafactor,
        {"gradient_accumulation_steps": 1},
        "gradient_accumulation_steps must be an int of at least 2",
    ),
    (
        with_options,
        {"clipvalue": 1.0, "use_gradient_accumulation": False},
        "clipvalue bounds the summed gradient",
    ),
    (
        with_options,
        {
            "weight_decay_factor": 0.1,
            "multiply_weight_decay_factor_by_learning_rate": True,
        },
        "needs the rule's learning_rate",
    ),
    (frequency_estimator, {**ESTIMATOR, "tau": 1.0}, r"tau must be in \(0, 1\)"),
]
NAN, INF = math.nan, math.inf

# Values that are no scalars of the range, for rules of each kind.
WRONG += [
    (make, {name: value}, rf"{make.__name__}: {name} must be .*, got {value}")
    for make, name, value in [
        (adagrad, "epsilon", NAN),
        (lion, "beta_1", NAN),
        (clippy_adagrad, "epsilon", 0.0),
        (adafactor, "epsilon_1", NAN),
        (adam, "clip_weight_max", NAN),
        (sgd, "clipvalue", NAN),
    ]
]
WRONG += [
    (
        sgd,
        {"clipvalue": -1.0},
        "sgd: clipvalue must be non-negative, got -1.0",
    ),
    (sgd, {"clipvalue": (NAN, 1.0)}, "sgd: clipvalue's minimum must be a number"),
    (sgd, {"clipvalue": (1.0, 2.0, 3.0)}, "sgd: clipvalue must be a number or a pair"),
    (
        sgd,
        {"clip_weight_min": 1.0, "clip_weight_max": 0.0},
        "sgd: clip_weight_min must not be above clip_weight_max, got 1.0 and 0.0",
    ),
    (ftrl, {"slot_initializers": {"linears": NAN}}, r"ftrl: slot_initializers\['lin"),
    (ftrl, {"slot_dtype": jnp.int8}, "ftrl: slot_dtype must be a floating type"),
    (adam, {"epsilon": np.ones(2)}, r"epsilon must be a scalar, got an array of"),
    (adam, {"beta_1": 1.0, "beta_2": 2.0, "epsilon": 0.0}, "beta_1.*beta_2.*epsilon"),
]

# Function, its arguments by name, and a part of the message of the TypeError.
WRONG_TYPES = [
    *(
        (make, {name: value}, rf"{make.__name__}: .*{name}\b.* must .*, got ")
        for make, name, value in [
            (adagrad, "epsilon", True),
            (adagrad_momentum, "use_nesterov", "yes"),
            (momentum, "use_nesterov", 0.9),
            (adam, "lazy_adam", 0),
            (ftrl, "multiply_linear_by_learning_rate", 0.1),
            (rmsprop, "centered", 1),
            (bounded_adagrad, "update_accumulator_first", 2.0),
            (clippy_adagrad, "clip_accumulator_update", None),
            (adafactor, "relative_step", None),
        ]
    ),
    (every_row, {"rule": "adagrad"}, "every_row: rule must be an optax transformation"),
    (in_sequence, {"rule": None}, "in_sequence: rule must be an optax"),
    (every_row, {"rule": sgd(0.1), "gradient_steps": 2.0}, "must be an int of at le"),
    (user_defined, {"custom_computation": None}, "must be a function of one row"),
    (
        user_defined,
        {"custom_computation": rowwise_momentum, "hyperparameters": ["0.9"]},
        r"user_defined: hyperparameters\[0\] must be a number, got '0.9'",
    ),
    (
        user_defined,
        {
            "custom_computation": rowwise_momentum,
            "slot_names": ["m"],
            "slot_initializers": ["0"],
        },
        r"user_defined: slot_initializers\[0\] must be a number, got '0'",
    ),
]
WITHOUT_LEARNING_RATE = (
    every_row,
    in_sequence,
    with_options,
    frequency_estimator,
)


def case_id(make, options, *_):
    """Names a case by its function and the arguments that matter."""
    names = (getattr(v, "__name__", v) for v in options.values())
    # The address of an object would differ between processes.
    names = (type(name).__name__ if " at 0x" in repr(name) else name for name in names)
    values = (f"{k}={v}" for k, v in zip(options, names, strict=True))
    return " ".join([make.__name__, *values])


@pytest.mark.parametrize(
    ("make", "options", "match"), WRONG, ids=itertools.starmap(case_id, WRONG)
)
def test_wrong_hyperparameters(make, options, match):
    rate = {} if make in WITHOUT_LEARNING_RATE else {"learning_rate": 0.1}
    with pytest.raises(ValueError, match=match):
        make(**rate | options)


@pytest.mark.parametrize(
    ("make", "options", "match"),
    WRONG_TYPES,
    ids=itertools.starmap(case_id, WRONG_TYPES),
)
def test_wrong_types(make, options, match):
    rate = {} if make in WITHOUT_LEARNING_RATE else {"learning_rate": 0.1}
    with pytest.raises(TypeError, match=match):
        make(**rate | options)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adafactor, {"clip_threshold": INF}),
        (adafactor, {"clipnorm": INF}),
        (bounded_adagrad, {"max_var_update": INF, "max_accumulator": INF}),
        (frequency_aware_adagrad, {"max_lr_multiplier": INF}),
        (clippy_adagrad, {"absolute_threshold": INF}),
        (sgd, {"clipvalue": (-INF, INF), "clip_weight_min": -INF}),
        (momentum, {"momentum": 1}),
        (lion, {"beta_1": 0, "beta_2": 1}),
        (ftrl, {"learning_rate_power": 0}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_edges_of_the_ranges(make, options):
    """An infinite bound is no bound."""
    rule, rows = make(0.1, **options), jnp.ones((3, 2))
    updates, _ = rule.update(0.5 * rows, rule.init(rows), rows)
    assert jnp.all(jnp.isfinite(updates) & (updates != 0))


def test_estimator_needs_rows_of_one_number():
    with pytest.raises(ValueError, match=r"TableConfig.dim must be 1, got .* \(2,\)"):
        frequency_estimator(0.5, 9.0, 2.0).init(jnp.ones((3, 2)))


TINY = float(np.finfo(np.float32).tiny)

# The smallest arguments that a rule accepts, where a fresh row divides by them.
SMALLEST = [
    (adadelta, {"epsilon": TINY}),
    (adafactor, {"epsilon_1": 0, "epsilon_2": 0}),
    (adafactor, {"epsilon_1": 0, "epsilon_2": 0, "mode": "exact"}),
    (adagrad, {"initial_accumulator_value": TINY}),
    (adagrad_momentum, {"epsilon": TINY}),
    (adagrad_momentum, {"exponent": 0.53}),
    (adam, {"epsilon": 1.1e-19}),
    (adam, {"epsilon": 1.1e-19, "beta_2": 0, "bias_correction": True}),
    (adam, {"epsilon": TINY, "sum_inside_sqrt": False}),
    (bounded_adagrad, {"initial_accumulator_value": TINY}),
    (clippy_adagrad, {"initial_accumulator_value": 0, "epsilon": TINY}),
    (frequency_aware_adagrad, {"initial_accumulator_value": TINY}),
    (ftrl, {"initial_accumulator_value": TINY, "learning_rate_power": -5.0}),
    (ftrl, {"initial_accumulator_value": 0, "allow_zero_accumulator": True}),
    (lion, {}),
    (momentum, {}),
    (online_yogi, {}),
    (proximal_adagrad, {"initial_accumulator_value": TINY, "l2": 1.0}),
    (proximal_yogi, {"initial_accumulator_value": 0, "epsilon": TINY, "l1": 1.0}),
    (rmsprop, {"epsilon": TINY}),
    (rowwise_adagrad, {"initial_accumulator_value": 0, "epsilon": TINY}),
    (rowwise_adagrad, {"initial_accumulator_value": TINY}),
    (rowwise_rmsprop, {"epsilon": TINY}),
    (sgd, {}),
    *((make, {"epsilon": TINY, "beta_2": 0}) for make in CORRECTED_MOMENTS),
]


@pytest.mark.parametrize(("make", "arguments"), SMALLEST)
def test_the_smallest_arguments_leave_rows_without_gradient_finite(make, arguments):
    rule = make(0.1, **arguments)
    for value in (0.0, 1.0):
        rows = jnp.full((2, 3), value)
        updates, state = rule.update(0 * rows, rule.init(rows), rows)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state)))


def test_centered_rmsprop_stays_finite_at_equal_gradients():
    """`ms - mg**2` is 0, and float32 rounds it to below -epsilon in some steps."""
    rule = rmsprop(0.1, rho=0.5, centered=True)
    gradient = jnp.linspace(1, 100, 1000)[None]
    state = rule.init(gradient)
    update = jax.jit(rule.update)
    for _ in range(30):
        updates, state = update(gradient, state, gradient)
        assert np.isfinite(updates).all()
