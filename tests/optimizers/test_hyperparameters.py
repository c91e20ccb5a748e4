"""Hyper-parameters of every rule: their ranges, and values that are traced."""

import itertools

import jax.numpy as jnp
import pytest

import tpu_embedding as te
from tests.optimizers.row_by_row import check_traced
from tests.optimizers.rule_cases import rowwise_momentum, rowwise_momentum_rule
from tpu_embedding.optimizers.rules.adafactor import adafactor
from tpu_embedding.optimizers.rules.adagrad import adagrad, rowwise_adagrad
from tpu_embedding.optimizers.rules.adam import adam
from tpu_embedding.optimizers.rules.bounded_adagrad import bounded_adagrad
from tpu_embedding.optimizers.rules.frequency import (
    frequency_aware_adagrad,
    frequency_estimator,
)
from tpu_embedding.optimizers.rules.ftrl import ftrl
from tpu_embedding.optimizers.rules.proximal import proximal_adagrad
from tpu_embedding.optimizers.rules.rmsprop import rmsprop
from tpu_embedding.optimizers.rules.rowwise import (
    lamb,
    partial_rowwise_adam,
    partial_rowwise_lamb,
    rowwise_rmsprop,
    scale_by_corrected_moments,
)
from tpu_embedding.optimizers.rules.yogi import online_yogi, proximal_yogi


def with_options(**options):
    return te.optimizers.with_options(te.optimizers.sgd(0.1), **options)


CORRECTED_MOMENTS = (partial_rowwise_adam, lamb, partial_rowwise_lamb)

# Function, its arguments by name, and a part of the message. The learning rate is 0.1
# where a rule needs one.
WRONG = [
    (adagrad, {"initial_accumulator_value": 0.0}, "initial_accumulator_value"),
    (rowwise_adagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
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
    (rowwise_adagrad, {"epsilon": -1.0}, "epsilon must be non-negative"),
    (rowwise_adagrad, {"weight_decay": -1.0}, "weight_decay must be non-negative"),
    (
        rowwise_adagrad,
        {"weight_decay_mode": "cowclip"},
        r"weight_decay_mode must be one of \['l2', 'decoupled'\], got 'cowclip'",
    ),
    (adam, {"beta_1": 1.0}, r"beta_1 must be in \[0, 1\)"),
    (adam, {"beta_2": -0.1}, "beta_2"),
    (adam, {"epsilon": 0.0}, "epsilon must be positive"),
    (ftrl, {"learning_rate_power": 0.5}, "non-positive"),
    (ftrl, {"beta": -1.0}, "beta must be non-negative"),
    (
        ftrl,
        {"initial_accumulator_value": 0.0},
        "initial_accumulator_value must be positive",
    ),
    (rmsprop, {"epsilon": -1.0}, "epsilon"),
    (proximal_adagrad, {"l1": -1.0}, "l1"),
    (
        bounded_adagrad,
        {"initial_accumulator_value": 0.0},
        "initial_accumulator_value must be positive",
    ),
    (
        bounded_adagrad,
        {"max_var_update": -1.0},
        "max_var_update must be non-negative, got -1",
    ),
    (
        bounded_adagrad,
        {"max_accumulator": -1.0},
        "max_accumulator must be non-negative",
    ),
    (
        frequency_aware_adagrad,
        {"initial_accumulator_value": 0.0},
        "initial_accumulator_value must be positive",
    ),
    (
        frequency_aware_adagrad,
        {"probability_exponent": -1.0},
        "probability_exponent must be non-negative",
    ),
    (
        frequency_aware_adagrad,
        {"max_lr_multiplier": 0.0},
        "max_lr_multiplier must be positive",
    ),
    (frequency_aware_adagrad, {"l1": -1.0, "l2": -1.0}, "l1 .*; l2 must be"),
    (
        frequency_aware_adagrad,
        {"accumulator_decay": 1.1},
        r"accumulator_decay must be in \[0, 1\], got 1.1",
    ),
    (proximal_yogi, {"beta_1": 1.0}, r"beta_1 must be in \[0, 1\), got 1.0"),
    (proximal_yogi, {"beta_2": -0.1}, "beta_2"),
    (proximal_yogi, {"epsilon": 0.0}, "epsilon must be positive"),
    (proximal_yogi, {"l1": -1.0}, "l1 must be non-negative"),
    (proximal_yogi, {"l2": -1.0}, "l2 must be non-negative"),
    (
        proximal_yogi,
        {"initial_accumulator_value": -1.0},
        "initial_accumulator_value must be non-negative",
    ),
    (online_yogi, {"l1": -1.0, "beta_2": 1.0}, "l1 .*; beta_2 must be in"),
    (online_yogi, {"l2": -1.0}, "l2 must be non-negative"),
    *(
        (rule, {name: value}, match)
        for rule in CORRECTED_MOMENTS
        for name, value, match in (
            ("beta_1", 1.0, r"beta_1 must be in \[0, 1\), got 1.0"),
            ("beta_2", -0.1, "beta_2"),
            ("epsilon", 0.0, "epsilon must be positive"),
            ("weight_decay", -0.1, "weight_decay must be non-negative"),
        )
    ),
    (
        rowwise_rmsprop,
        {"rho": 1.0, "epsilon": 0.0},
        "rho must be in .*; epsilon must be positive",
    ),
    (
        scale_by_corrected_moments,
        {"velocity_of": "table"},
        r"velocity_of must be one of \['element', 'row'\], got 'table'",
    ),
    (adafactor, {"clip_threshold": 0.0}, "clip_threshold must be positive"),
    (adafactor, {"beta_2_decay": 0.8}, "beta_2_decay must be non-positive"),
    (adafactor, {"mode": "dense"}, "mode must be one of"),
    (adafactor, {"clipnorm": 1.0, "clipvalue": 1.0}, "one of clipnorm, clipvalue"),
    (adafactor, {"use_ema": True, "ema_momentum": 1.5}, "ema_momentum must be in"),
    (adafactor, {"gradient_accumulation_steps": 1}, "at least 2"),
    (
        adafactor,
        {"gradient_accumulation_steps": 2, "use_ema": True},
        "leave one out",
    ),
    (
        with_options,
        {"clipvalue": 1.0, "use_gradient_accumulation": False},
        "clipvalue bounds the summed gradient",
    ),
    (with_options, {"clipvalue": [1, 2]}, "clipvalue must be a number or a pair"),
    (
        with_options,
        {
            "weight_decay_factor": 0.1,
            "multiply_weight_decay_factor_by_learning_rate": True,
        },
        "needs the rule's learning_rate",
    ),
    *(
        (
            frequency_estimator,
            {"tau": 0.5, "max_delta": 9.0, "outlier_threshold": 2.0} | wrong,
            match,
        )
        for wrong, match in (
            ({"tau": 0.0}, r"tau must be in \(0, 1\), got 0"),
            ({"tau": 1.0}, r"tau must be in \(0, 1\)"),
            ({"max_delta": 0.0}, "max_delta must be positive"),
            ({"outlier_threshold": -2.0}, "outlier_threshold must be positive"),
        )
    ),
]
WITHOUT_LEARNING_RATE = (with_options, frequency_estimator, scale_by_corrected_moments)


def case_id(make, options, *_):
    """Names a case by its function and the arguments that matter."""
    values = (f"{k}={getattr(v, '__name__', v)}" for k, v in options.items())
    return " ".join([make.__name__, *values])


@pytest.mark.parametrize(
    ("make", "options", "match"), WRONG, ids=itertools.starmap(case_id, WRONG)
)
def test_wrong_hyperparameters(make, options, match):
    arguments = () if make in WITHOUT_LEARNING_RATE else (0.1,)
    with pytest.raises(ValueError, match=match):
        make(*arguments, **options)


def test_estimator_needs_rows_of_one_number():
    with pytest.raises(ValueError, match=r"TableConfig.dim must be 1, got .* \(2,\)"):
        frequency_estimator(0.5, 9.0, 2.0).init(jnp.ones((3, 2)))


TRACED = [
    *((rule, {"weight_decay": 0.0}, {}) for rule in CORRECTED_MOMENTS),
    *((rule, {"weight_decay": 0.3}, {}) for rule in CORRECTED_MOMENTS),
    (rowwise_rmsprop, {"rho": 0.5}, {}),
    (rowwise_adagrad, {"weight_decay": 0.2, "weight_decay_mode": "l2"}, {}),
    (rowwise_adagrad, {"weight_decay": 0.2, "weight_decay_mode": "decoupled"}, {}),
    (bounded_adagrad, {"max_var_update": 0.01, "max_accumulator": 0.5}, {}),
    (bounded_adagrad, {}, {}),
    (frequency_aware_adagrad, {"l1": 0.1, "accumulator_decay": 0.9}, {}),
    (
        frequency_estimator,
        {"tau": 0.5, "max_delta": 10.0, "outlier_threshold": 2.0},
        {"dim": 1},
    ),
    (proximal_yogi, {"l1": 0.1}, {}),
    (online_yogi, {"l2": 0.1, "beta_2": 0.9}, {}),
    (
        rowwise_momentum_rule,
        {"custom_computation": rowwise_momentum, "learning_rate": 0.3},
        {"static_args": ("custom_computation",)},
    ),
]


@pytest.mark.parametrize(
    ("make", "hyperparameters", "how"), TRACED, ids=itertools.starmap(case_id, TRACED)
)
def test_takes_traced_hyperparameters(make, hyperparameters, how):
    if make is not frequency_estimator:
        hyperparameters = {"learning_rate": 0.1} | hyperparameters
    check_traced(make, **how, **hyperparameters)
