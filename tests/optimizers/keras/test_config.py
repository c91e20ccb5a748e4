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
    gradients,
    inverse_time_decay,
    keras_3,
    keras_tables,
    sgd,
    start_rows,
    tf_keras,
)
from tests.optimizers.rule_cases import initial_state, one_table_plan, update
from tests.rejections import rejects
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
CENTERED = {"rho": 0.9, "momentum": 0.8, "epsilon": 1e-2, "centered": True}

# Configuration, Keras' rule, and whether a row without a gradient moves, or its slots.
CASES = {
    "sgd_nesterov": (tf_keras("SGD", inverse_time_decay, **NESTEROV), sgd, True),
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
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_keras_on_dense_gradients(case):
    config, rule, moves_every_row = case
    translated = from_keras_config(config, rows="every")
    for rows, moves in (("every", moves_every_row), ("touched", False)):
        resolved = resolve_optimizer(from_keras_config(config, rows=rows), "t", DIM)
        assert resolved.moves_every_row == moves
    # float32 against float64; Ftrl divides differences of powers by the rate.
    np.testing.assert_allclose(
        dense_tables(translated), keras_tables(rule, config), rtol=2e-5, atol=2e-6
    )


# Configurations whose formula is a rule's, and that rule.
SAME = {
    "sgd": (PLAIN, te.optimizers.sgd(0.1)),
    "rmsprop": (CENTERED, te.optimizers.rmsprop(0.1, **CENTERED)),
    "ftrl": (FTRL, te.optimizers.ftrl(0.1, **FTRL, allow_zero_accumulator=True)),
}


@pytest.mark.parametrize("name", SAME)
def test_is_the_rule_with_the_same_formula(name):
    fields, rule = SAME[name]
    config = keras_3(name, **fields)
    assert from_keras_config(config, rows="touched") == rule
    on_every_row = rule if name == "sgd" else te.optimizers.every_row(rule)
    assert from_keras_config(config) == on_every_row


def test_accumulation_equals_keras_through_a_layer():
    config = keras_3(
        *("sgd", inverse_time_decay),
        **(MOMENTUM | {"gradient_accumulation_steps": 2, "loss_scale_factor": 2.0}),
        **{"clipvalue": 0.3, "weight_decay": 0.1},
    )
    np.testing.assert_allclose(
        layer_tables(from_keras_config(config)),
        keras_tables(sgd, config),
        rtol=2e-5,
        atol=5e-6,
    )


def test_finds_the_class_by_the_name_that_keras_gave():
    first, thirteenth = (
        dense_tables(from_keras_config(keras_3(name, **ADAM)))
        for name in ("adam", "adam_13")
    )
    np.testing.assert_array_equal(first, thirteenth)


ADAFACTOR = {
    **{"beta_2_decay": -0.7, "epsilon_1": 1e-20, "epsilon_2": 1e-2},
    **{"clip_threshold": 0.5, "relative_step": False},
}
AVERAGES = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
CLIPPED = {"clipnorm": 0.5, "loss_scale_factor": 2.0}


def test_adafactor_has_the_arguments_of_its_flavour():
    """Recorded runs of Keras show what the arguments compute."""
    adafactor, own = te.optimizers.adafactor, {**ADAFACTOR, "mode": "exact"}
    decay = {"weight_decay": 0.1, "gradient_accumulation_steps": 2}
    assert from_keras_config(
        keras_3("adafactor", **(ADAFACTOR | CLIPPED | decay))
    ) == adafactor(0.1, **own, **CLIPPED, **decay)
    of_tf = from_keras_config(tf_keras("Adafactor", 0.5, **(ADAFACTOR | AVERAGES)))
    options = {"ema_start": "initial_values", "clipnorm_of": "occurrences"}
    assert of_tf == adafactor(0.5, **own, **AVERAGES, **options)
    touched = from_keras_config(keras_3("adafactor", **ADAFACTOR), rows="touched")
    assert touched == adafactor(0.1, **ADAFACTOR)


TWO_STEPS = {"gradient_accumulation_steps": 2}
# Configurations, and the field of the error.
WRONG = {
    "amsgrad": (keras_3("adam", **{**ADAM, "amsgrad": True}), "amsgrad"),
    "clipnorm": (keras_3("sgd", **PLAIN, clipnorm=1.0), "clipnorm"),
    "frequency": (
        keras_3("sgd", **PLAIN) | {"use_ema": True, "ema_overwrite_frequency": 0},
        "ema_overwrite_frequency",
    ),
    "steps": (
        keras_3("sgd", **PLAIN) | {"gradient_accumulation_steps": 1},
        "gradient_accumulation_steps",
    ),
    "string": (keras_3("sgd", **PLAIN) | {"momentum": "0.9"}, "momentum"),
    "no bool": (keras_3("sgd", **MOMENTUM) | {"nesterov": "no"}, "nesterov"),
    "before 2.11": ({"name": "SGD", "decay": 0.0}, "decay"),
}


@pytest.mark.parametrize(("config", "field"), WRONG.values(), ids=WRONG)
def test_a_field_without_equivalent_is_rejected(config, field):
    with rejects(field=field, value=config[field]):
        from_keras_config(config)


def test_wrong_arguments_are_rejected():
    with rejects(field="class_name", value="adamax"):
        from_keras_config(keras_3("adamax"))
    with rejects(field="config", value="adam"):
        from_keras_config("adam")
    config = keras_3("sgd", **PLAIN) | TWO_STEPS
    with rejects(field="rows", value="all"):
        from_keras_config(config, rows="all")
    with rejects(field="gradient_accumulation_steps", value=2, fix="rows='every'"):
        from_keras_config(config, rows="touched")
    adafactor = tf_keras("Adafactor", clipnorm=1.0, weight_decay=0.1)
    with rejects(fix="clipnorm_of='sum'"):
        from_keras_config(adafactor)
