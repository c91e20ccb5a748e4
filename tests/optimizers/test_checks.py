"""Range checks: each bound from both sides, and one error for all problems."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.optimizers import checks

NAN, INF = math.nan, math.inf

ACCEPTED = {
    checks.real_scalar: [0, -INF, NAN, np.float16(1), jnp.bfloat16(2), np.array(3)],
    checks.finite: [0, -1e30, np.int8(3), jnp.asarray(0.5)],
    checks.not_nan: [0, -INF, INF],
    checks.positive: [1e-30, 1, 2.5, np.float32(1)],
    checks.positive_bound: [1e-30, 1, INF],
    checks.non_negative: [0, 0.0, 1e-30, 7],
    checks.non_negative_bound: [0, INF],
    checks.non_positive: [0, 0.0, -1e-30, -7],
    checks.step_size: [0, -0.0, 1e-30, 3],
    checks.fraction: [0, 1e-30, 0.5, 1],
    checks.fraction_below_one: [0, 0.5, 0.999],
    checks.open_fraction: [1e-30, 0.5, 0.999],
}
REFUSED = {
    checks.real_scalar: [],
    checks.finite: [(INF, "finite"), (-INF, "finite"), (NAN, "finite")],
    checks.step_size: [
        (-1e-30, "at least 0 (negate the loss to ascend the gradient)"),
        (INF, "finite"),
        (NAN, "at least 0 (negate the loss to ascend the gradient)"),
    ],
    checks.not_nan: [(NAN, "a number")],
    checks.positive: [
        *((x, "positive") for x in (0, -0.0, -1, NAN)),
        *((x, "finite") for x in (INF, -INF)),
        *((x, "at least 1.18e-38 in size") for x in (1e-38, 1e-300, -1e-40)),
    ],
    checks.positive_bound: [(0, "positive"), (NAN, "positive")],
    checks.non_negative: [
        *((x, "non-negative") for x in (-1e-30, -1, NAN)),
        (INF, "finite"),
        (1e-38, "0 or at least 1.18e-38 in size"),
    ],
    checks.non_negative_bound: [(-1e-30, "non-negative"), (NAN, "non-negative")],
    checks.non_positive: [(x, "non-positive") for x in (1e-30, 1, NAN)],
    checks.fraction: [(x, "in [0, 1]") for x in (-1e-30, 1.0001, 2, NAN)],
    checks.fraction_below_one: [(x, "in [0, 1)") for x in (-1e-30, 1, 2, NAN)],
    checks.open_fraction: [(x, "in (0, 1)") for x in (0, -1, 1, 2, NAN)],
}
NO_REAL_SCALARS = [
    ("0.1", TypeError, "a number, got '0.1'"),
    (None, TypeError, "a number, got None"),
    (True, TypeError, "a number, got True"),
    ([0.1], TypeError, r"a number, got [0.1]"),
    (1j, TypeError, "a real number, got 1j"),
    (np.complex64(1), TypeError, "of dtype complex64"),
    (np.bool_(True), TypeError, "of dtype bool"),
    (np.str_("0.1"), TypeError, "a real number, got"),
    (np.ones(1), ValueError, "a scalar, got an array of shape (1,)"),
    (jnp.ones((2, 3)), ValueError, "a scalar, got an array of shape (2, 3)"),
]
NAMES = {check: name for name, check in vars(checks).items() if callable(check)}
each_check = pytest.mark.parametrize("check", ACCEPTED, ids=NAMES.get)


@each_check
def test_accepts_its_range(check):
    for value in ACCEPTED[check]:
        assert check(value) == checks.PASSED
        checks.check_hyperparameters("owner", x=check(value))


@each_check
def test_refuses_what_lies_beside_it(check):
    for value, text in REFUSED[check]:
        with pytest.raises(ValueError) as error:
            checks.check_hyperparameters("owner", x=check(value))
        assert str(error.value) == f"owner: x must be {text}, got {value}."


@each_check
def test_refuses_what_is_no_real_scalar(check):
    for value, error_type, text in NO_REAL_SCALARS:
        with pytest.raises(error_type) as error:
            checks.check_hyperparameters("owner", x=check(value))
        assert text in str(error.value)


def test_rounds_to_float32():
    text = checks.fraction_below_one(1 - 1e-9).problem
    assert text == "in [0, 1), got 0.999999999, 1 in float32"
    assert checks.finite(1e39).problem == "finite, got 1e+39, inf in float32"


def test_refuses_integers_beyond_floats():
    with pytest.raises(ValueError, match="x must be within float32's range, got 1000"):
        checks.check_hyperparameters(x=checks.positive(10**400))


@each_check
def test_a_traced_scalar_passes(check):
    found = []

    def trace(value):
        found.append(check(value))
        return value

    jax.eval_shape(trace, 5.0)
    jax.eval_shape(trace, np.ones(2))
    jax.eval_shape(trace, 1j)
    assert [x.problem is None for x in found] == [True, False, False]


@pytest.mark.parametrize("value", [2, 3, np.int64(2), np.array(2), jnp.asarray(2)])
def test_integers(value):
    assert checks.int_from(2, value) == checks.PASSED


@pytest.mark.parametrize("value", [2.0, "2", None, True, np.ones(3), np.array(2.0)])
def test_no_integers(value):
    with pytest.raises(TypeError, match="x must be an int of at least 2, got"):
        checks.check_hyperparameters(x=checks.int_from(2, value))


def test_flags():
    assert checks.flag(True) == checks.flag(np.bool_(False)) == checks.PASSED
    for value in (0, 1, None, "yes", 1.0):
        with pytest.raises(TypeError, match="x must be True or False, got"):
            checks.check_hyperparameters(x=checks.flag(value))


def test_none_is_allowed_where_it_means_off():
    assert checks.or_none(checks.positive, None) == checks.PASSED
    assert checks.or_none(checks.positive, 0).problem == "positive, got 0"


def test_choices():
    choices = Literal["a", "b"]
    assert checks.one_of("a", choices) == checks.one_of("b", choices) == checks.PASSED
    for value in ("c", None, ["a"]):
        problem = checks.one_of(value, choices).problem
        assert problem == f"one of ['a', 'b'], got {value!r}"


def test_names_every_problem_at_once():
    with pytest.raises(ValueError) as error:
        checks.check_hyperparameters(
            x=checks.positive(-1), y=checks.positive(1), z=checks.fraction(2)
        )
    expected = "x must be positive, got -1; z must be in [0, 1], got 2."
    assert str(error.value) == expected
