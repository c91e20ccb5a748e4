"""Keras' schedules and optimizers, against recorded runs of tf_keras and of Keras 3.

`tests/golden/make_keras_schedules.py` made the runs. Keras is not installed here.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.conftest import GOLDEN
from tests.optimizers.keras.test_instances import keras_class
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.optimizers.keras import from_keras_config

with np.load(GOLDEN / "keras_schedules.npz") as _file:
    GOLD = dict(_file)
START, STEPS = GOLD["start"], GOLD["steps"]
CONFIGS = [json.loads(config) for config in GOLD["tf_keras_configs"]]
CLASSES = [config["learning_rate"]["class_name"] for config in CONFIGS]
EACH_CLASS = {str(CLASSES.index(name)) for name in CLASSES}


def serialized(class_name, **fields):
    return {"name": "SGD", "learning_rate": {"class_name": class_name} | fields}


def on_tensorflow(config):
    """Returns an optimizer like `tf_keras`', whose schedule JAX cannot trace."""
    schedule = config["learning_rate"]
    cls = keras_class(schedule["class_name"], "tf_keras.src.optimizers.schedules")
    cls.__call__ = lambda self, step: float(step)
    optimizer = keras_class("SGD", "tf_keras.src.optimizers.sgd")(config)
    optimizer._learning_rate = cls(schedule["config"])
    return optimizer


# All forms of an optimizer are one rule.
FORMS = (
    on_tensorflow,
    lambda config: config,
    lambda config: config | {"learning_rate": on_tensorflow(config)._learning_rate},
)


def rates_of(rule, steps):
    """Returns the rates that SGD applies in the given steps."""
    rows = jnp.ones((1, 1))

    @jax.jit
    @jax.vmap
    def update(step):
        state = jax.tree.map(lambda _: step, rule.init(rows))
        return -rule.update(rows, state, rows)[0][0, 0]

    return update(jnp.asarray(steps, jnp.int32))


@pytest.mark.parametrize(
    "index", quick_cases(range(len(CONFIGS)), *EACH_CLASS, every_case=True)
)
def test_equals_the_recorded_rates(index):
    for flavour in ("tf_keras", "keras_3"):
        config = json.loads(GOLD[f"{flavour}_configs"][index])
        (rule,) = {from_keras_config(form(config), class_name="SGD") for form in FORMS}
        expected = GOLD[f"{flavour}_rates"][index]
        # Keras rounds 1 - step / steps to float32 before it takes a power.
        np.testing.assert_allclose(
            rates_of(rule, STEPS), expected, rtol=5e-6, atol=1e-7
        )


@pytest.mark.parametrize("power", [0.1, 0.5, 1.5])
def test_a_polynomial_ends_at_its_end_value(power):
    def last_rates(decay_steps):
        fields = {"decay_steps": int(decay_steps), "power": power}
        fields |= {"initial_learning_rate": 0.3, "end_learning_rate": 0.125}
        rule = from_keras_config(serialized("PolynomialDecay", config=fields))
        return rates_of(rule, [decay_steps, decay_steps + 1, 2**31 - 1])

    rates = np.stack([last_rates(x) for x in (1, 3, 7, 41, 121)])
    np.testing.assert_array_equal(rates, np.full_like(rates, 0.125))


EXPONENTIAL = {"initial_learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.7}
PIECES = {"boundaries": [2, 1], "values": [0.1, 0.2, 0.3]}
WRONG = {
    "a missing field": serialized("CosineDecay"),
    "an unknown field": serialized(
        "ExponentialDecay", config={**EXPONENTIAL, "decay": 1}
    ),
    "out of range": serialized(
        "ExponentialDecay", config={**EXPONENTIAL, "decay_steps": 0}
    ),
    "boundaries out of order": serialized("PiecewiseConstantDecay", config=PIECES),
    "a class of the user": serialized(
        "ExponentialDecay", config=EXPONENTIAL, registered_name="my>Ex"
    ),
}


@pytest.mark.parametrize("config", WRONG.values(), ids=WRONG)
def test_wrong_schedules_raise(config):
    with rejects(field="learning_rate"):
        from_keras_config(config)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("flavour", ["tf_keras", "keras_3"])
def test_equals_the_recorded_optimizer(flavour, index):
    rule = from_keras_config(json.loads(GOLD[f"{flavour}_optimizers"][index]))
    rows, state, tables = jnp.asarray(START), rule.init(jnp.asarray(START)), []
    for gradient in GOLD["gradients"]:
        updates, state = rule.update(jnp.asarray(gradient), state, rows)
        rows = optax.apply_updates(rows, updates)
        tables.append(rows)
    # float32 on both sides.
    np.testing.assert_allclose(
        np.stack(tables), GOLD[f"{flavour}_tables"][index], rtol=2e-5, atol=2e-6
    )
