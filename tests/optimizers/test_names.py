"""Names of optimizers, whose rate the plan says, and optax' names of arguments."""

import functools

import pytest

import tpu_embedding as te

MAKE = {
    "lazy_adam": functools.partial(te.optimizers.lazy_adam, 0.1),
    "adam": functools.partial(te.optimizers.adam, 0.1),
    "lamb": functools.partial(te.optimizers.lamb, learning_rate=0.1),
    "proximal_yogi": functools.partial(te.optimizers.proximal_yogi, 0.1),
}


@pytest.mark.parametrize("name", MAKE)
def test_names_of_optax(name):
    make = MAKE[name]
    assert make(b1=0.5, b2=0.7, eps=0.1) is make(beta_1=0.5, beta_2=0.7, epsilon=0.1)
    for short, full in (("b1", "beta_1"), ("b2", "beta_2"), ("eps", "epsilon")):
        with pytest.raises(TypeError, match=f"{name}: {short} and {full} are .* both"):
            make(**{short: 0.5, full: 0.5})
    with pytest.raises(TypeError, match="b1 and beta_1"):
        te.optimizers.adam(0.1, 0.9, b1=0.9)
    with pytest.raises(TypeError, match="unexpected keyword argument 'b1'"):
        te.optimizers.sgd(0.1, b1=0.9)


@pytest.mark.parametrize(
    "make", [te.optimizers.adagrad, te.optimizers.adafactor], ids=["adagrad", "own"]
)
def test_a_rate_is_required(make):
    with pytest.raises(TypeError, match="missing a required argument: 'learning_rate'"):
        make()


def test_the_plan_says_the_rate_of_a_name():
    tables = [
        te.TableConfig(vocabulary_size=5, dim=2, name=name, optimizer=optimizer)
        for name, optimizer in {
            "a": "Adagrad",
            "b": te.optimizers.adagrad(0.001),
            "c": te.optimizers.sgd(0.1),
        }.items()
    ]
    plan = te.make_plan([te.FeatureConfig(table=table) for table in tables])
    assert len(plan.stacks) == 2
    text = str(plan)
    assert "stack_0: trained by 'adagrad', at its default learning rate" in text
    assert "stack_1: trained by" not in text
