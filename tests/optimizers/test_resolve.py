"""What may be given as an optimizer: names, wrappers, and dicts of tables."""

import jax.numpy as jnp
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tpu_embedding.optimizers.resolve import resolve_optimizer
from tpu_embedding.optimizers.row_optimizer import (
    EveryRow,
    InSequence,
    KeptGradient,
    Touched,
)

adagrad = te.optimizers.adagrad


def resolve(optimizer, name="movie"):
    return resolve_optimizer(optimizer, name, 3)


SCHEDULE = optax.linear_schedule(0.1, 0.2, 10)


CONTRADICTIONS = {
    "every row of a sequence": lambda: te.optimizers.every_row(
        te.optimizers.in_sequence(optax.sgd(0.1))
    ),
    "sequence of every row": lambda: te.optimizers.in_sequence(adam(lazy_adam=False)),
    "sequence of dense Adam": lambda: adam(
        lazy_adam=False, use_gradient_accumulation=False
    ),
    "norm of occurrences of every row": lambda: te.optimizers.every_row(
        DRIVERS["norm"][0]
    ),
    "steps within steps": lambda: te.optimizers.every_row(
        DRIVERS["collected"][0], gradient_steps=2
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_drivers_that_contradict_each_other_cannot_be_declared(name):
    with rejects():
        CONTRADICTIONS[name]()


def test_tables_of_equal_calls_are_stacked():
    rules = {
        "adagrad": lambda rate: "Adagrad" if rate == 0.1 else adagrad(rate),
        "by_name": lambda rate: te.optimizers.sgd(
            learning_rate=rate, clip_weight_max=1.0
        ),
        "schedule": lambda rate: te.optimizers.sgd(SCHEDULE, clip_weight_max=rate),
        "every_row": lambda rate: te.optimizers.every_row(te.optimizers.sgd(rate)),
        "slot_dtype": lambda rate: adagrad(
            0.1, slot_dtype=jnp.bfloat16 if rate == 0.2 else None
        ),
        "slots": lambda rate: adagrad(0.1, slot_initializers={"accumulators": rate}),
        "keras": lambda rate: te.optimizers.from_keras_config(
            {"name": "adam", "learning_rate": rate}
        ),
    }
    for make in rules.values():
        features = {
            name: te.FeatureConfig(
                table=te.TableConfig(
                    vocabulary_size=5, dim=2, name=name, optimizer=make(rate)
                )
            )
            for name, rate in {"a": 0.1, "b": 0.2, "c": 0.1}.items()
        }
        plan = te.make_plan(features, mesh_of(1))
        stacks = [[t.name for t in stack.tables] for stack in plan.stacks]
        assert stacks == [["a", "c"], ["b"]]


def adam(**options):
    return te.optimizers.adam(0.1, **options)


DRIVERS = {
    "every_row": (adam(lazy_adam=False), EveryRow()),
    "sequence": (
        te.optimizers.adagrad(0.1, use_gradient_accumulation=False),
        InSequence(),
    ),
    "collected": (
        te.optimizers.every_row(optax.sgd(0.1), gradient_steps=3),
        KeptGradient(gradient_steps=3),
    ),
    "totals": (
        te.optimizers.every_row(te.optimizers.clippy_adagrad(0.1)),
        KeptGradient(),
    ),
    "rows_that_are_set": (
        te.optimizers.every_row(te.optimizers.assign()),
        KeptGradient(),
    ),
    "norm": (
        te.optimizers.adafactor(0.1, clipnorm=1.0, clipnorm_of="occurrences"),
        Touched(occurrence_norm=True),
    ),
}


@pytest.mark.parametrize("name", DRIVERS)
def test_the_plan_chooses_the_driver(name):
    optimizer, driver = DRIVERS[name]
    assert resolve(optimizer).driver == driver
