"""Keras' optimizers given to tables as they are.

Keras is not installed here, so classes stand in for its own: their names, modules and
`get_config()` follow Keras 3.15 and `tf_keras` 2.21.
"""

import numpy as np
import pytest

import tpu_embedding as te
from tests.optimizers.keras.keras_reference import KERAS_3, keras_3, tf_keras
from tests.rejections import rejects
from tpu_embedding.optimizers.keras import from_keras_config


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
Nadam = keras_class("Nadam", "keras.src.optimizers.nadam")

FIELDS = {"initial_accumulator_value": 0.2, "epsilon": 1e-7}


def table(**options):
    return te.TableConfig(vocabulary_size=8, dim=4, **options)


def test_tables_and_layers_take_it():
    optimizer = TfAdagrad(tf_keras("Adagrad", 0.5, **FIELDS))
    rule = from_keras_config(optimizer.get_config(), class_name="Adagrad")
    of_rule, of_table, of_layer = (
        te.make_plan(te.FeatureConfig(table=config), optimizer=of_layer).stacks
        for config, of_layer in [
            (table(name="t"), rule),
            (table(name="t", optimizer=optimizer), None),
            (table(name="t"), optimizer),
        ]
    )
    assert of_table[0].optimizer == of_layer[0].optimizer == of_rule[0].optimizer


def inverse_time(step):
    return 0.5 / (1 + step)


def with_schedule(schedule):
    """Returns an optimizer as Keras keeps one with a schedule."""
    serialized = {"class_name": "Mine", "config": {}, "registered_name": "Mine"}
    optimizer = Adagrad({**keras_3("adagrad", **FIELDS), "learning_rate": serialized})
    optimizer._learning_rate = schedule
    return optimizer


def test_a_users_schedule_is_called_with_the_step():
    rule = from_keras_config(with_schedule(inverse_time))
    expected = te.optimizers.adagrad(inverse_time, 0.2, epsilon=1e-7)
    rows = np.ones((3, 2), np.float32)
    state, expected_state = rule.init(rows), expected.init(rows)
    for _ in range(3):
        found, state = rule.update(rows, state, rows)
        updates, expected_state = expected.update(rows, expected_state, rows)
        np.testing.assert_array_equal(found, updates)


WRONG = {
    "no equivalent": Nadam({"name": "nadam", "learning_rate": 0.1}),
    "a field without one": Adagrad({**keras_3("adagrad"), "clipnorm": 1.0}),
    "a user's schedule without the optimizer": Adagrad(
        {**KERAS_3, "learning_rate": {"class_name": "Mine"}}
    ),
    "a user's schedule of another backend": with_schedule(float),
    # Its formulas are not known, whatever its name is.
    "a class of the user": type(
        "Adagrad", (Adagrad,), {"__module__": "recommender.optimizers"}
    )(keras_3("adagrad")),
}


@pytest.mark.parametrize("case", WRONG)
def test_tables_and_layers_name_their_field(case):
    optimizer = WRONG[case]
    with rejects(field="TableConfig.optimizer", value=optimizer, fix="'t'"):
        table(name="t", optimizer=optimizer)
    with rejects(field="optimizer", value=optimizer):
        te.make_plan(te.FeatureConfig(table=table()), optimizer=optimizer)
