"""Hyper-parameters of every rule: their ranges, and the smallest that work."""

import inspect
import math
from typing import Literal, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rejections import rejects
from tpu_embedding import optimizers as opt
from tpu_embedding.optimizers.options import OPTIMIZERS

NAN, INF = math.nan, math.inf
TINY = float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_argument_is_checked_by_its_name(name):
    """`test_checks` has the ranges; here each argument meets its check."""
    make = getattr(opt, name)
    for x in inspect.signature(make).parameters.values():
        if x.name == "learning_rate":
            continue
        if isinstance(x.default, bool) and x.name != "low_dimensional_packing_status":
            for value in (0.5, "yes", None):
                with rejects(TypeError, field=x.name):
                    make(0.1, **{x.name: value})
        elif get_origin(x.annotation) is Literal:
            with rejects(field=x.name):
                make(0.1, **{x.name: "other"})
        elif type(x.default) in (int, float):
            for value, kind in ((NAN, ValueError), (True, TypeError), ("1", TypeError)):
                with rejects(kind, field=x.name):
                    make(0.1, **{x.name: value})


# Ranges of a rule's own, and arguments that depend on each other, by the field of the
# error, "" for the first argument. The learning rate is 0.1.
WRONG = [
    ("adagrad", {"initial_accumulator_value": 0.0}, ""),
    ("rowwise_adagrad", {"initial_accumulator_value": 0.0}, ""),
    ("rowwise_adagrad", {"initial_accumulator_value": -1.0, "epsilon": 0.1}, ""),
    ("ftrl", {"initial_accumulator_value": 0.0}, ""),
    ("ftrl", {"learning_rate_power": 0.5}, ""),
    ("ftrl", {"slot_initializers": {"linears": NAN}}, "slot_initializers['linears']"),
    ("ftrl", {"slot_dtype": jnp.int8}, ""),
    ("ftrl", {"slot_dtype": "brain"}, ""),
    ("adam", {"beta_1": 1.0}, ""),
    *(("adam", {"epsilon": x(1e-19)}, "") for x in (float, np.float32, jnp.float32)),
    ("adam", {"epsilon": np.ones(2)}, ""),
    ("adam", {"clip_weight_max": NAN}, ""),
    ("lamb", {"epsilon": 0}, ""),
    ("partial_rowwise_adam", {"weight_decay": -0.1}, ""),
    ("clippy_adagrad", {"epsilon": 0.0}, ""),
    ("adafactor", {"beta_2_decay": 0.8}, ""),
    ("adafactor", {"clipnorm": 1.0, "clipvalue": 1.0}, None),
    ("adafactor", {"gradient_accumulation_steps": 1}, ""),
    (
        "adafactor",
        {"gradient_accumulation_steps": 2, "ema_overwrite_frequency": 3}
        | {"use_ema": True},
        None,
    ),
    ("sgd", {"clipvalue": NAN}, ""),
    ("sgd", {"clipvalue": -1.0}, ""),
    ("sgd", {"clipvalue": (NAN, 1.0)}, "clipvalue's minimum"),
    ("sgd", {"clipvalue": (1.0, 2.0, 3.0)}, ""),
    ("sgd", {"clip_weight_min": 1.0, "clip_weight_max": 0.0}, ""),
    ("sgd", {"clipvalue": 1.0, "use_gradient_accumulation": False}, ""),
    ("sgd", {"slot_variable_creation_fn": print}, ""),
]


@pytest.mark.parametrize(("name", "options", "field"), WRONG)
def test_wrong_hyperparameters(name, options, field):
    with rejects(field=next(iter(options)) if field == "" else field):
        getattr(opt, name)(0.1, **options)


def test_wrong_arguments_of_functions_around_rules():
    def user_defined(**options):
        return opt.user_defined(lambda *_: None, 0.1, **options)

    rows, sgd = jnp.ones((3, 2)), opt.sgd(0.1)
    with rejects(field="tau"):
        opt.frequency_estimator(1.0, 9.0, outlier_threshold=2.0)
    with rejects():
        opt.frequency_estimator(0.5, 9.0, 2.0).init(rows)
    options = {"multiply_weight_decay_factor_by_learning_rate": True}
    with rejects(field="learning_rate", value=None):
        opt.with_options(sgd, weight_decay_factor=0.1, **options)
    with rejects(field="slot_initializers", value="velocity"):
        opt.adagrad(0.1, slot_initializers={"velocity": 1.0}).init(rows)
    with rejects(TypeError, field="rule", value="adagrad"):
        opt.every_row("adagrad")
    with rejects(TypeError, field="rule", value=None):
        opt.in_sequence(None)
    with rejects(TypeError, field="gradient_steps"):
        opt.every_row(sgd, gradient_steps=2.0)
    with rejects(TypeError, field="custom_computation", value=None):
        opt.user_defined(None, 0.1)
    with rejects(TypeError, field="hyperparameters[0]"):
        user_defined(hyperparameters=["0.9"])
    with rejects(TypeError, field="slot_initializers[0]"):
        user_defined(slot_names=["m"], slot_initializers=["0"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adafactor", {"clip_threshold": INF, "clipnorm": INF}),
        ("bounded_adagrad", {"max_var_update": INF, "max_accumulator": INF}),
        ("frequency_aware_adagrad", {"max_lr_multiplier": INF}),
        ("clippy_adagrad", {"absolute_threshold": INF}),
        ("sgd", {"clipvalue": (-INF, INF), "clip_weight_min": -INF}),
        ("momentum", {"momentum": 1}),
        ("lion", {"beta_1": 0, "beta_2": 1}),
        ("ftrl", {"learning_rate_power": 0}),
    ],
)
def test_edges_of_the_ranges(name, options):
    """An infinite bound is no bound."""
    rule, rows = getattr(opt, name)(0.1, **options), jnp.ones((3, 2))
    updates, _ = rule.update(0.5 * rows, rule.init(rows), rows)
    assert jnp.all(jnp.isfinite(updates) & (updates != 0))


# The smallest arguments that a rule accepts, where a fresh row divides by them.
SMALLEST = [
    ("adadelta", {"epsilon": TINY}),
    ("adafactor", {"epsilon_1": 0, "epsilon_2": 0}),
    ("adagrad", {"initial_accumulator_value": TINY}),
    ("adagrad_momentum", {"epsilon": TINY}),
    ("adagrad_momentum", {"exponent": 0.53}),
    ("adam", {"epsilon": 1.1e-19}),
    ("adam", {"epsilon": 1.1e-19, "beta_2": 0, "bias_correction": True}),
    ("adam", {"epsilon": TINY, "sum_inside_sqrt": False}),
    ("clippy_adagrad", {"initial_accumulator_value": 0, "epsilon": TINY}),
    ("ftrl", {"initial_accumulator_value": TINY, "learning_rate_power": -5.0}),
    ("ftrl", {"initial_accumulator_value": 0, "allow_zero_accumulator": True}),
    ("proximal_adagrad", {"initial_accumulator_value": TINY, "l2": 1.0}),
    ("proximal_yogi", {"initial_accumulator_value": 0, "epsilon": TINY, "l1": 1.0}),
    ("rmsprop", {"epsilon": TINY}),
    ("rowwise_adagrad", {"initial_accumulator_value": 0, "epsilon": TINY}),
    ("rowwise_rmsprop", {"epsilon": TINY}),
    ("partial_rowwise_adam", {"epsilon": TINY, "beta_2": 0}),
    ("lamb", {"epsilon": TINY, "beta_2": 0}),
    ("partial_rowwise_lamb", {"epsilon": TINY, "beta_2": 0}),
]


@pytest.mark.parametrize(("name", "arguments"), SMALLEST)
def test_the_smallest_arguments_keep_rows_finite(name, arguments):
    rule = getattr(opt, name)(0.1, **arguments)
    # The squares of the last ones underflow.
    for value, gradient in [(0.0, 0.0), (1.0, 0.0), (1e-30, 1e-30)]:
        rows = jnp.full((3, 2), value)
        gradients = jnp.full((3, 2), gradient)
        updates, state = rule.update(gradients, rule.init(rows), rows)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state)))


def test_centered_rmsprop_stays_finite_at_equal_gradients():
    """`ms - mg**2` is 0, and float32 rounds it to below -epsilon in some steps."""
    rule = opt.rmsprop(0.1, rho=0.5, centered=True)
    gradient = jnp.linspace(1, 100, 1000)[None]
    state = rule.init(gradient)
    update = jax.jit(rule.update)
    for _ in range(30):
        updates, state = update(gradient, state, gradient)
        assert np.isfinite(updates).all()
