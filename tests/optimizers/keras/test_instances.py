"""Keras' optimizers given to tables as they are.

Keras is not installed here, so classes stand in for its own: their names, modules and
`get_config()` follow Keras 3.15 and `tf_keras` 2.21.
"""

import gc

import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.optimizers.keras.keras_reference import KERAS_3, keras_3, tf_keras
from tpu_embedding.optimizers.keras import config as keras_config
from tpu_embedding.optimizers.keras.config import from_keras_config, rule_of_keras
from tpu_embedding.optimizers.keras_instances import is_keras_optimizer


class Base:
    """Stands in for Keras' base class, which all its optimizers have."""

    def __init__(self, config):
        self.config = config

    def get_config(self):
        return dict(self.config)


Base.__module__ = "keras.src.optimizers.base_optimizer"


def keras_class(name, module):
    return type(name, (Base,), {"__module__": module})


Adagrad = keras_class("Adagrad", "keras.src.optimizers.adagrad")
TfAdagrad = keras_class("Adagrad", "tf_keras.src.optimizers.adagrad")
LegacyAdagrad = keras_class("Adagrad", "tf_keras.src.optimizers.legacy.adagrad")
Nadam = keras_class("Nadam", "keras.src.optimizers.nadam")
Dense = keras_class("Dense", "keras.src.layers.core.dense")
# Of the user: its formulas are not known, whatever its name is.
OwnAdagrad = type("Adagrad", (Adagrad,), {"__module__": "recommender.optimizers"})

FIELDS = {"initial_accumulator_value": 0.2, "epsilon": 1e-7}
CASES = {
    "Keras 3": Adagrad(keras_3("adagrad", 0.5, **FIELDS)),
    "Keras 3 with another name": Adagrad(keras_3("for_tables", 0.5, **FIELDS)),
    "tf_keras": TfAdagrad(tf_keras("Adagrad", 0.5, **FIELDS)),
}


def table(**options):
    return te.TableConfig(vocabulary_size=8, dim=4, **options)


def trained(config, optimizer):
    """Returns the table and its slot variables after one step."""
    features = te.FeatureConfig(table=config)
    model = te.TPUEmbedding(features, optimizer, rngs=nnx.Rngs(0))
    trainer = te.Optimizer(model, optax.adam(1e-3))
    ids = model.prepare(np.array([1, 2, 2, 7, 0, 0, 0, 0]))
    _, gradients = te.value_and_grad(lambda m: (m(ids) ** 2).sum())(model)
    trainer.update(model, gradients)
    return model.embedding_tables()["t"], trainer.slot_values()["t"]


@pytest.mark.parametrize("case", CASES)
def test_a_table_takes_it(case):
    optimizer = CASES[case]
    rule = from_keras_config(optimizer.get_config(), class_name="Adagrad")
    expected, expected_slots = trained(table(name="t"), rule)
    of_table = trained(table(name="t", optimizer=optimizer), None)
    of_layer = trained(table(name="t"), optimizer)
    for found, slots in (of_table, of_layer):
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_equal(slots, expected_slots)
    assert (expected_slots["accumulators"][1] > 0.2).all()


def test_tables_of_one_optimizer_are_stacked():
    optimizer = CASES["Keras 3"]
    features = {
        name: te.FeatureConfig(table=table(name=name, optimizer=optimizer))
        for name in ("a", "b")
    }
    assert len(te.make_plan(features).stacks) == 1
    te.optimizers.check_row_local(optimizer, dim=4)


def test_fields_that_changed_are_read_again():
    optimizer = Adagrad(keras_3("adagrad", 0.5, **FIELDS))
    first = rule_of_keras(optimizer)
    assert rule_of_keras(optimizer) is first
    optimizer.config["learning_rate"] = 0.25
    assert rule_of_keras(optimizer) is not first


def test_rules_do_not_keep_optimizers_alive():
    optimizer = Adagrad(keras_3("adagrad", 0.5, **FIELDS))
    rule_of_keras(optimizer)
    count = len(keras_config._RULES)
    del optimizer
    gc.collect()
    assert len(keras_config._RULES) == count - 1


FUNCTION = {
    "module": "builtins",
    "class_name": "function",
    "config": "current_rate",
    "registered_name": "function",
}
WRONG = {
    "no equivalent": (
        Nadam({"name": "nadam", "learning_rate": 0.1}),
        "follows its own",
    ),
    "a field without one": (
        Adagrad({**keras_3("adagrad"), "use_ema": True}),
        "use_ema=True: only Adafactor",
    ),
    "older than Keras 2.11": (
        LegacyAdagrad({"name": "Adagrad", "learning_rate": 0.1, "decay": 0.0}),
        "of Keras 2.11 or later",
    ),
    # As Keras 3 writes a rate that is a function without arguments.
    "a callable rate": (
        Adagrad({**KERAS_3, "learning_rate": FUNCTION}),
        "see te.nn.set_each_step",
    ),
    "a layer of Keras": (Dense({"units": 3}), "got 'Dense'"),
    "a class of the user": (
        OwnAdagrad(keras_3("adagrad")),
        "got 'recommender.optimizers.Adagrad'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_refusals_name_the_field(case):
    optimizer, match = WRONG[case]
    with pytest.raises(ValueError, match=f"(?s)TableConfig.optimizer .*'t'.*{match}"):
        table(name="t", optimizer=optimizer)
    with pytest.raises(ValueError, match=f"(?s)^optimizer.*{match}"):
        te.make_plan(te.FeatureConfig(table=table()), optimizer=optimizer)


class Settings:
    """Has a configuration, and is not of Keras."""

    def get_config(self):
        return {"learning_rate": 0.1}


@pytest.mark.parametrize("value", [Settings(), Adagrad, "adagrad", None, {}, optax.sgd])
def test_other_values_are_no_keras_optimizers(value):
    assert not is_keras_optimizer(value)
