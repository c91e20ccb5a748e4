"""Keras' configurations, against Keras' rules written in NumPy's float64."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.keras.keras_reference import (
    DIM,
    NUM_ROWS,
    STEPS,
    adagrad,
    adam,
    ftrl,
    gradients,
    inverse_time_decay,
    keras_3,
    keras_tables,
    rmsprop,
    sgd,
    start_rows,
    tf_keras,
)
from tests.optimizers.rule_cases import initial_state, one_table_plan, update
from tpu_embedding.optimizers.keras import from_keras_config
from tpu_embedding.optimizers.resolve import resolve_optimizer

NUM_STEPS = len(STEPS)


def dense_tables(rule, num_steps=NUM_STEPS):
    """Runs a translated rule on the dense gradients."""
    w: Any = jnp.asarray(start_rows(), jnp.float32)
    state, tables = rule.init(w), []
    for _, gradient in itertools.islice(gradients(), num_steps):
        updates, state = rule.update(jnp.asarray(gradient, jnp.float32), state, w)
        w = optax.apply_updates(w, updates)
        assert w.dtype == jnp.float32
        tables.append(w)
    return np.stack(tables)


def layer_tables(rule):
    """Runs a translated rule as a layer does, from ids and their gradients."""
    plan = one_table_plan(rule, NUM_ROWS, DIM, mesh_of(2))
    tables, slots = initial_state(plan, start_rows())
    result = []
    for ids, gradient in gradients():
        cotangents = np.zeros((4, DIM), np.float32)
        cotangents[: len(ids)] = gradient[ids]
        padded = np.full(4, -1, np.int32)
        padded[: len(ids)] = ids
        tables, slots = update(tables, slots, padded, cotangents, plan)
        result.append(te.functional.unstack_tables(tables, plan)["table"])
    return np.stack(result)


ADAM = {"beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-3, "amsgrad": False}
ADAGRAD = {"initial_accumulator_value": 0.1, "epsilon": 1e-2}
RMSPROP = {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-2, "centered": False}
FTRL = {
    "learning_rate_power": -0.4,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.02,
    "l2_regularization_strength": 0.03,
    "l2_shrinkage_regularization_strength": 0.01,
    "beta": 0.1,
}
MOMENTUM = {"momentum": 0.9, "nesterov": False}
NESTEROV = {"momentum": 0.9, "nesterov": True}
PLAIN = {"momentum": 0.0, "nesterov": False}
CENTERED = {**RMSPROP, "centered": True}

# Configuration, Keras' rule, and whether a row without a gradient moves, or its slots.
CASES = {
    "sgd": (keras_3("sgd", **PLAIN), sgd, False),
    "sgd_momentum": (keras_3("sgd_1", **MOMENTUM), sgd, True),
    "sgd_nesterov": (tf_keras("SGD", **NESTEROV), sgd, True),
    "sgd_nesterov_schedule": (
        tf_keras("SGD", inverse_time_decay, **NESTEROV),
        sgd,
        True,
    ),
    "adagrad": (keras_3("adagrad", **ADAGRAD), adagrad, False),
    "adagrad_all": (
        keras_3(
            "adagrad",
            inverse_time_decay,
            **ADAGRAD,
            clipvalue=0.1,
            weight_decay=0.2,
            loss_scale_factor=4.0,
        ),
        adagrad,
        True,
    ),
    "adam_decay": (
        keras_3("adam_2", inverse_time_decay, **ADAM, weight_decay=0.2),
        adam,
        True,
    ),
    "rmsprop_all": (
        tf_keras("RMSprop", inverse_time_decay, **{**CENTERED, "momentum": 0.8}),
        rmsprop,
        True,
    ),
    "ftrl": (keras_3("ftrl", **FTRL), ftrl, True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_keras_on_dense_gradients(case):
    config, rule, _ = case
    translated = from_keras_config(config, rows="every")
    # float32 against float64; Ftrl divides differences of powers by the rate.
    np.testing.assert_allclose(
        dense_tables(translated), keras_tables(rule, config), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_passes_over_every_row_only_where_it_changes_something(case):
    config, _, moves_every_row = case

    def passes(rows):
        rule = from_keras_config(config, rows=rows)
        return resolve_optimizer(rule, "table", DIM).moves_every_row

    assert passes("every") == moves_every_row
    assert not passes("touched")


THROUGH_THE_LAYER = {
    "lazy_on_request": (CASES["adam_decay"], "touched", True),
    "accumulation": (
        (
            keras_3(
                "sgd",
                inverse_time_decay,
                **MOMENTUM,
                gradient_accumulation_steps=2,
                loss_scale_factor=2.0,
                clipvalue=0.3,
                weight_decay=0.1,
            ),
            sgd,
        ),
        "every",
        False,
    ),
}


@pytest.mark.parametrize("name", THROUGH_THE_LAYER)
def test_equals_keras_through_a_layer(name):
    (config, rule, *_), rows, is_lazy = THROUGH_THE_LAYER[name]
    np.testing.assert_allclose(
        layer_tables(from_keras_config(config, rows=rows)),
        keras_tables(rule, config, lazy=is_lazy),
        rtol=2e-5,
        atol=5e-6,
    )


def test_finds_the_class_by_the_name_that_keras_gave():
    expected = from_keras_config(keras_3("adam", **ADAM))
    assert from_keras_config(keras_3("adam", **ADAM) | {"name": "adam"}) is expected
    np.testing.assert_array_equal(
        dense_tables(from_keras_config(keras_3("adam_13", **ADAM))),
        dense_tables(expected),
    )


ADAFACTOR = {
    "beta_2_decay": -0.7,
    "epsilon_1": 1e-20,
    "epsilon_2": 1e-2,
    "clip_threshold": 0.9,
    "relative_step": False,
}


REFUSED = {
    "amsgrad": (keras_3("adam", **{**ADAM, "amsgrad": True}), "amsgrad=True: .*optax"),
    "clipnorm": (
        keras_3("sgd", **PLAIN, clipnorm=1.0),
        r"clipnorm=1.0: .*te.gradients.clip_by_global_norm\(gradients, 1.0\)",
    ),
    "ema_overwrite_frequency": (
        keras_3("sgd", **{**PLAIN, "use_ema": True, "ema_overwrite_frequency": 0}),
        "ema_overwrite_frequency=0: must be an int.*at least 1",
    ),
    "gradient_accumulation_steps": (
        keras_3("sgd", **PLAIN, gradient_accumulation_steps=1),
        "gradient_accumulation_steps=1: must be None or an integer of at least 2",
    ),
    "adafactor": (
        tf_keras("Adafactor", **ADAFACTOR, clipnorm=1.0, weight_decay=0.1),
        "clipnorm_of='sum'",
    ),
    "momentum, a string": (
        keras_3("sgd", **{**PLAIN, "momentum": "0.9"}),
        "momentum='0.9': must be numeric",
    ),
    "nesterov, a string": (
        keras_3("sgd", **{**MOMENTUM, "nesterov": "no"}),
        "nesterov='no': must be bool",
    ),
    "clipvalue, a string": (
        keras_3("sgd", **PLAIN, clipvalue="x"),
        "clipvalue='x': must be numeric",
    ),
    "adamax": (keras_3("adamax"), "class must be one of.*got 'adamax'"),
    "before_2.11": ({"name": "SGD", "decay": 0.0}, "decay=0.0: .*before Keras 2.11"),
    "no_mapping": ("adam", r"get_config\(\)"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_equivalent_is_refused(case):
    config, message = case
    with pytest.raises(ValueError, match=message):
        from_keras_config(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "all"}, "rows='all': must be one of"),
        ({"rows": "touched"}, "gradient_accumulation_steps=2: .*rows='every'"),
    ],
)
def test_rows_that_do_not_go_with_it_are_refused(options, message):
    config = keras_3("sgd", **PLAIN, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=message):
        from_keras_config(config, **options)
