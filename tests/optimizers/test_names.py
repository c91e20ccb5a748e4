"""optax' names of arguments, positions, and the rate of an optimizer's name."""

import functools

import pytest

import tpu_embedding as te
from tests.rejections import rejects

MAKE = {
    name: functools.partial(getattr(te.optimizers, name), learning_rate=0.1)
    for name in ("lazy_adam", "adam", "lamb", "proximal_yogi")
}


@pytest.mark.parametrize("name", MAKE)
def test_names_of_optax(name):
    make = MAKE[name]
    assert make(b1=0.5, b2=0.7, eps=0.1) is make(beta_1=0.5, beta_2=0.7, epsilon=0.1)
    for short, full in (("b1", "beta_1"), ("b2", "beta_2"), ("eps", "epsilon")):
        with rejects(TypeError, field=short, fix=full):
            make(**{short: 0.5, full: 0.5})


def test_wrong_arguments_name_the_right_ones():
    with rejects(TypeError, field="b1"):
        te.optimizers.adam(0.1, 0.9, b1=0.9)
    with rejects(TypeError, fix="'b1'"):
        te.optimizers.sgd(0.1, b1=0.9)
    for make in (te.optimizers.adagrad, te.optimizers.adafactor):
        with rejects(TypeError, fix="'learning_rate'"):
            make()
    with rejects(TypeError, fix="learning_rate"):
        te.optimizers.ftrl(0.1, -0.5, 0.0, 0.0, 0.0, 0.1, True)


def test_a_named_optimizer_has_its_own_stack_with_its_rate():
    tables = [
        te.TableConfig(vocabulary_size=5, dim=2, name=name, optimizer=optimizer)
        for name, optimizer in {
            "a": "Adagrad",
            "b": te.optimizers.adagrad(0.001),
            "c": te.optimizers.sgd(0.1),
        }.items()
    ]
    plan = te.make_plan([te.FeatureConfig(table=table) for table in tables])
    assert [len(stack.tables) for stack in plan.stacks] == [2, 1]
