"""Options that float32 rounds to 0, or whose squares and powers it cannot hold."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.optimizers.options import OPTIMIZERS, CommonOptions

VALUES = [1 - 1e-9, 1e-10, 1e-18, 1e-19, 1e-30, 1e-38, 1e-45, 1e-300]


def numeric_options(name):
    parameters = inspect.signature(getattr(te.optimizers, name)).parameters.values()
    for x in parameters:
        is_number = type(x.default) in (int, float) and x.name != "learning_rate"
        if is_number and x.name not in CommonOptions.__annotations__:
            yield x.name


CASES = [(name, option) for name in OPTIMIZERS for option in numeric_options(name)]
# The gradient divided by such a scale overflows, as it should.
OVERFLOWS = ("loss_scale_factor",)


def is_finite(rule):
    """Returns True if steps without and with gradients give finite rows and slots."""
    rows = jnp.asarray([[0.5, -0.5], [0.0, 0.0]])
    state, update = rule.init(rows), jax.jit(rule.update)
    for scale in (0.0, 1.0, 0.0):
        updates, state = update(scale * jnp.asarray([[0, 0], [1, 1e-3]]), state, rows)
        rows += updates
    floats = [x for x in jax.tree.leaves((rows, state)) if x.dtype == jnp.float32]
    return all(np.isfinite(x).all() for x in floats)


@pytest.mark.parametrize(
    ("name", "option"),
    quick_cases(
        [pytest.param(*x, id="-".join(x)) for x in CASES if x[1] not in OVERFLOWS],
        "adam-epsilon",
        "adagrad_momentum-exponent",
        "bounded_adagrad-max_accumulator",
        "lamb-beta_2",
    ),
)
def test_a_small_option_is_rejected_or_harmless(name, option):
    accepted = []
    for value in VALUES:
        try:
            rule = getattr(te.optimizers, name)(0.1, **{option: value})
        except ValueError as error:
            assert option in str(error)
            continue
        accepted.append(value)
        assert is_finite(rule), value
    if option == "epsilon":
        assert accepted


@pytest.mark.parametrize("epsilon", [1e-19, np.float32(1e-20), jnp.float32(1e-30)])
def test_adam_rejects_an_epsilon_whose_square_is_zero(epsilon):
    with rejects(field="epsilon", value=epsilon, fix="sum_inside_sqrt=False"):
        te.optimizers.adam(0.1, epsilon=epsilon)
    assert is_finite(te.optimizers.adam(0.1, epsilon=epsilon, sum_inside_sqrt=False))
