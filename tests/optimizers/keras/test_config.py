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
    KERAS_3,
    NUM_ROWS,
    SCHEDULE,
    STEPS,
    adadelta,
    adagrad,
    adam,
    ftrl,
    gradients,
    keras_3,
    keras_tables,
    lion,
    rmsprop,
    sgd,
    start_rows,
    tf_keras,
)
from tests.optimizers.rule_cases import initial_state, one_table_plan, update
from tests.tiers import quick_cases
from tpu_embedding.optimizers.keras import classes
from tpu_embedding.optimizers.keras.config import from_keras_config
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
ADADELTA = {"rho": 0.9, "epsilon": 1e-3}
LION = {"beta_1": 0.9, "beta_2": 0.99}

# Configuration, Keras' rule, and whether a row without a gradient moves, or its slots.
CASES = {
    "sgd": (keras_3("sgd", **PLAIN), sgd, False),
    "sgd_tf_keras": (tf_keras("SGD", **PLAIN), sgd, False),
    "sgd_momentum": (keras_3("sgd_1", **MOMENTUM), sgd, True),
    "sgd_nesterov": (tf_keras("SGD", **NESTEROV), sgd, True),
    "sgd_momentum_schedule": (keras_3("sgd", SCHEDULE, **MOMENTUM), sgd, True),
    "sgd_nesterov_schedule": (tf_keras("SGD", SCHEDULE, **NESTEROV), sgd, True),
    "sgd_clip": (keras_3("sgd", **PLAIN, clipvalue=0.5), sgd, False),
    "sgd_clip_off": (keras_3("sgd", **PLAIN, clipvalue=0.0, clipnorm=0), sgd, False),
    "sgd_decay": (keras_3("sgd", SCHEDULE, **PLAIN, weight_decay=0.2), sgd, True),
    "sgd_scale": (keras_3("sgd", **PLAIN, loss_scale_factor=8.0), sgd, False),
    "adagrad": (keras_3("adagrad", **ADAGRAD), adagrad, False),
    "adagrad_zero": (
        keras_3("adagrad", initial_accumulator_value=0.0, epsilon=1e-3),
        adagrad,
        False,
    ),
    "adagrad_all": (
        keras_3(
            "adagrad",
            SCHEDULE,
            **ADAGRAD,
            clipvalue=0.1,
            weight_decay=0.2,
            loss_scale_factor=4.0,
        ),
        adagrad,
        True,
    ),
    "adam": (keras_3("adam", **ADAM), adam, True),
    "adam_tf_keras": (tf_keras("Adam", SCHEDULE, **ADAM), adam, True),
    "adam_decay": (keras_3("adam_2", SCHEDULE, **ADAM, weight_decay=0.2), adam, True),
    "adamw": (keras_3("adam_w", **{**ADAM, "weight_decay": 0.1}), adam, True),
    "rmsprop": (keras_3("rm_sprop", **RMSPROP), rmsprop, True),
    "rmsprop_all": (
        tf_keras("RMSprop", SCHEDULE, **{**CENTERED, "momentum": 0.8}),
        rmsprop,
        True,
    ),
    "adadelta": (keras_3("adadelta", 1.0, **ADADELTA), adadelta, True),
    "ftrl": (keras_3("ftrl", **FTRL), ftrl, True),
    "ftrl_decay": (tf_keras("Ftrl", SCHEDULE, **FTRL, weight_decay=0.1), ftrl, True),
    "lion": (keras_3("lion", **LION), lion, True),
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
        return resolve_optimizer(rule, "table", ("table",)).rows == "every"

    assert passes("every") == moves_every_row
    assert not passes("touched")


THROUGH_THE_LAYER = {
    "every_row": (CASES["adam_decay"], "every", False),
    "every_row_anew": (CASES["ftrl"], "every", False),
    "lazy_on_request": (CASES["adam_decay"], "touched", True),
    "every_row_of_momentum": (CASES["sgd_nesterov_schedule"], "every", False),
    "accumulation": (
        (
            keras_3(
                "sgd",
                SCHEDULE,
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
    "accumulation_bias": (
        (keras_3("adam", **ADAM, gradient_accumulation_steps=3), adam),
        "every",
        False,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", quick_cases(THROUGH_THE_LAYER, "accumulation"))
def test_equals_keras_through_a_layer(name):
    (config, rule, *_), rows, is_lazy = THROUGH_THE_LAYER[name]
    np.testing.assert_allclose(
        layer_tables(from_keras_config(config, rows=rows)),
        keras_tables(rule, config, lazy=is_lazy),
        rtol=2e-5,
        atol=5e-6,
    )


FIELDS = {"learning_rate": 0.1, **KERAS_3, **ADAM}
SERIALIZED = {
    "keras_3": {
        "module": "keras.optimizers",
        "class_name": "Adam",
        "config": {"name": "mine", **FIELDS},
        "registered_name": None,
    },
    "registered": {
        "registered_name": "Custom>Adam",
        "config": {"name": "mine", **FIELDS},
    },
    "tf_keras_old_format": {"class_name": "Custom>Adam", "config": FIELDS},
    "lower_case": {"class_name": "adam", "config": FIELDS},
    "second_of_a_session": {"name": "adam_13", **FIELDS},
    "another_name_is_no_matter": {"class_name": "Adam", "config": {"name": "sgd"}},
}


@pytest.mark.parametrize("config", SERIALIZED.values(), ids=SERIALIZED.keys())
def test_finds_the_class(config):
    if "config" in config:
        config = {**config, "config": {**FIELDS, **config["config"]}}
    expected = dense_tables(from_keras_config({**FIELDS, "name": "adam"}))
    np.testing.assert_array_equal(dense_tables(from_keras_config(config)), expected)


def test_class_name_goes_before_all_names():
    config = {"name": "towers", "learning_rate": 0.1, **KERAS_3, **ADAGRAD}
    rule = from_keras_config(config, class_name="Adagrad")
    expected = from_keras_config({**config, "name": "adagrad"})
    np.testing.assert_array_equal(dense_tables(rule), dense_tables(expected))


def test_missing_fields_have_the_defaults_of_keras():
    short = {"class_name": "AdamW", "config": {"learning_rate": 0.1}}
    full = {**ADAM, "beta_2": 0.999, "epsilon": 1e-7, "weight_decay": 0.004}
    expected = from_keras_config(keras_3("adam_w", **full))
    np.testing.assert_array_equal(
        dense_tables(from_keras_config(short)), dense_tables(expected)
    )


def test_a_schedule_of_the_user_replaces_that_of_keras():
    config = keras_3("sgd", lambda step: 0.2 / (1 + 0.7 * step / 2), **PLAIN)
    expected = keras_tables(sgd, keras_3("sgd", SCHEDULE, **PLAIN))
    np.testing.assert_allclose(
        dense_tables(from_keras_config(config)), expected, rtol=1e-5, atol=1e-6
    )


def test_the_configuration_is_not_changed():
    config = keras_3("sgd", SCHEDULE, **PLAIN)
    before = repr(config)
    from_keras_config(config)
    assert repr(config) == before


ADAFACTOR = {
    "beta_2_decay": -0.7,
    "epsilon_1": 1e-20,
    "epsilon_2": 1e-2,
    "clip_threshold": 0.9,
    "relative_step": False,
}
OFF = {
    "weight_decay": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
    "mode": "exact",
    "ema_start": "first_update",
    "clipnorm_of": "sum",
}
KERAS_2 = {"ema_start": "initial_values", "clipnorm_of": "occurrences"}
ON = {
    "weight_decay": 0.1,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 3,
    "loss_scale_factor": 2.0,
    "global_clipnorm": 1.5,
}
COLLECTS = {"use_ema": True, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("config", "rows", "options"),
    [
        (keras_3("adafactor", **ADAFACTOR), "every", OFF),
        (keras_3("adafactor", **ADAFACTOR), "touched", {**OFF, "mode": "lazy"}),
        (
            keras_3("adafactor", **ADAFACTOR, clipnorm=2.0),
            "every",
            {**OFF, "clipnorm": 2.0},
        ),
        (keras_3("adafactor", **{**ADAFACTOR, **ON}), "every", {**OFF, **ON}),
        (keras_3("adafactor", **ADAFACTOR, **COLLECTS), "every", {**OFF, **COLLECTS}),
        (
            tf_keras("Adafactor", **ADAFACTOR, clipvalue=2.0, clipnorm=0.0),
            "every",
            {**OFF, **KERAS_2, "clipvalue": 2.0, "ema_overwrite_frequency": 100},
        ),
    ],
)
def test_adafactor_gets_its_arguments(monkeypatch, config, rows, options):
    calls = []

    def adafactor(*args, **kwargs):
        calls.append((args, kwargs))
        return optax.identity()

    monkeypatch.setattr(classes, "adafactor", adafactor)
    from_keras_config(config, rows=rows)
    ((rate,), given), *others = calls
    assert not others
    np.testing.assert_allclose(rate, 0.1)
    assert given == {**ADAFACTOR, **options}


@pytest.mark.full
def test_adafactor_is_that_of_this_package():
    config = keras_3("adafactor", SCHEDULE, **ADAFACTOR)
    rule = te.optimizers.adafactor(
        lambda step: 0.2 / (1 + 0.7 * step / 2),
        beta_2_decay=-0.7,
        epsilon_1=1e-20,
        epsilon_2=1e-2,
        clip_threshold=0.9,
        mode="exact",
    )
    np.testing.assert_allclose(
        dense_tables(from_keras_config(config), 2), dense_tables(rule, 2), rtol=1e-5
    )


REFUSED = {
    "amsgrad": (keras_3("adam", **{**ADAM, "amsgrad": True}), "amsgrad=True: .*optax"),
    "adaptive_epsilon": (
        tf_keras("Adam", **ADAM, adaptive_epsilon=True),
        "adaptive_epsilon=True: .*optax.adam",
    ),
    "clipnorm": (
        keras_3("sgd", **PLAIN, clipnorm=1.0),
        r"clipnorm=1.0: .*optax.chain\(optax.clip_by_global_norm\(1.0\), .*clipvalue",
    ),
    "global_clipnorm": (
        keras_3("sgd", **PLAIN, global_clipnorm=2),
        r"global_clipnorm=2: .*te.gradients.clip_by_global_norm\(gradients, 2\)",
    ),
    "use_ema": (keras_3("sgd", **{**PLAIN, "use_ema": True}), "use_ema=True: .*checkp"),
    "loss_scale_factor": (
        keras_3("sgd", **PLAIN, loss_scale_factor=0.0),
        "loss_scale_factor=0.0: must be positive",
    ),
    "gradient_accumulation_steps": (
        keras_3("sgd", **PLAIN, gradient_accumulation_steps=1),
        "gradient_accumulation_steps=1: must be None or an integer of at least 2",
    ),
    "unknown": (keras_3("sgd", **PLAIN, lookahead=5), "lookahead=5: .*not known"),
    "field_of_another_class": (keras_3("lion", **LION, epsilon=0.1), "epsilon=0.1: "),
    "text": (
        keras_3("adam", **{**ADAM, "beta_1": "0.9"}),
        "beta_1='0.9': must be a number",
    ),
    "none": (keras_3("adam", **{**ADAM, "beta_1": None}), "beta_1=None: must be a num"),
    "no_boolean": (
        keras_3("sgd", momentum=0.9, nesterov="no"),
        "nesterov='no': must be True",
    ),
    "rate": ({"name": "sgd", **PLAIN}, "learning_rate=None: must be a number"),
    "schedule": (
        keras_3("sgd", {"class_name": "MySchedule", "config": {}}, **PLAIN),
        "MySchedule.*a function of the step",
    ),
    "range": (keras_3("adam", **{**ADAM, "epsilon": 0.0}), "epsilon must be positive"),
    "adafactor": (
        tf_keras("Adafactor", **ADAFACTOR, clipnorm=1.0, weight_decay=0.1),
        "clipnorm=1.0: .*clipnorm_of='sum'",
    ),
    "adafactor_overwrites": (
        keras_3(
            "adafactor",
            **ADAFACTOR,
            use_ema=True,
            ema_overwrite_frequency=3,
            gradient_accumulation_steps=2,
        ),
        "ema_overwrite_frequency=3: .*finalize_variable_values",
    ),
    "adafactor_global": (
        keras_3(
            "adafactor", **ADAFACTOR, global_clipnorm=1.0, gradient_accumulation_steps=2
        ),
        "global_clipnorm=1.0: .*te.gradients.clip_by_global_norm",
    ),
    "adamax": (keras_3("adamax"), "optax.adamax"),
    "nadam": (tf_keras("Nadam"), "optax.nadam"),
    "before_2.11_by_field": ({"name": "SGD", "decay": 0.0}, "Keras 2.11.*decay=0.0"),
    "before_2.11_by_flag": (
        {"name": "SGD", "is_legacy_optimizer": True},
        "is_legacy_optimizer=True of an older one.*InverseTimeDecay",
    ),
    "before_2.11_by_module": (
        {"module": "keras.optimizers.legacy", "class_name": "SGD", "config": PLAIN},
        "module='keras.optimizers.legacy' of an older one",
    ),
    "lamb": (keras_3("lamb"), "lamb of this package"),
    "muon": (keras_3("muon"), "adam_weight_decay / adam_lr_ratio"),
    "schedule_free": (keras_3("schedule_free_adam_w"), "AdamW"),
    "loss_scale": ({"name": "loss_scale_optimizer"}, "give its inner_optimizer"),
    "several": (
        {"class_name": "MultiOptimizer", "config": {"name": "multi"}},
        "give that of the tables",
    ),
    "unknown_name": (keras_3("towers"), "'towers'; say which by class_name"),
    "no_name": ({"learning_rate": 0.1}, "None; say which"),
    "users_class": (
        {
            "class_name": "Adam",
            "registered_name": "Mine>Adam",
            "config": {"name": "adam", "learning_rate": 0.1},
        },
        "'Mine>Adam'; say which",
    ),
    "no_mapping": ("adam", r"get_config\(\)"),
}


@pytest.mark.parametrize("name", ["sgd", pytest.param("adam", marks=pytest.mark.full)])
def test_clipping_before_the_translation_is_clipnorm_of_keras(name):
    own = {"sgd": {"momentum": 0.9, "nesterov": False}, "adam": ADAM}[name]
    config = keras_3(name, **own, clipnorm=0.5, weight_decay=0.1)
    with pytest.raises(ValueError, match="clipnorm=0.5"):
        from_keras_config(config)
    rule = optax.chain(
        optax.clip_by_global_norm(0.5), from_keras_config(config | {"clipnorm": None})
    )
    expected = keras_tables({"sgd": sgd, "adam": adam}[name], config)
    np.testing.assert_allclose(layer_tables(rule), expected, rtol=1e-4, atol=1e-5)


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


def test_all_problems_are_in_one_error():
    config = keras_3("adam", {"class_name": "Mine", "config": {}}, **ADAM, weird=1)
    config.update(amsgrad=True, clipnorm=1.0, use_ema=True, beta_1="a")
    with pytest.raises(ValueError) as error:
        from_keras_config(config)
    lines = str(error.value).splitlines()
    assert lines[0] == "Keras' adam has no equivalent with these values:"
    named = [line.split("=")[0].strip() for line in lines[1:]]
    assert sorted(named) == [
        "amsgrad",
        "beta_1",
        "clipnorm",
        "learning_rate",
        "use_ema",
        "weird",
    ]
