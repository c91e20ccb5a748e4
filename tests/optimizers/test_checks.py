"""Range checks: each bound from both sides, and one error for all problems."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rejections import rejects
from tpu_embedding.optimizers import checks

NAN, INF = math.nan, math.inf
TINY = (1e-38, 1e-300, -1e-40)
"""Numbers that XLA rounds to 0."""

# Numbers at the edges of each range: those within, and those outside.
RANGES = {
    checks.real_scalar: ([0, -INF, NAN, np.float16(1), jnp.bfloat16(2)], []),
    checks.finite: ([0, -1e30, np.int8(3), jnp.asarray(0.5)], [INF, -INF, NAN, 1e39]),
    checks.step_size: ([0, -0.0, 1e-30, 3], [-1e-30, INF, NAN]),
    checks.not_nan: ([0, -INF, INF], [NAN]),
    checks.positive: ([1e-30, 1, 2.5], [0, -0.0, -1, NAN, INF, 10**400, *TINY]),
    checks.positive_bound: ([1e-30, 1, INF], [0, NAN, -INF]),
    checks.non_negative: ([0, 0.0, 1e-30, 7], [-1e-30, -1, NAN, INF, 1e-38]),
    checks.non_negative_bound: ([0, INF], [-1e-30, NAN]),
    checks.non_positive: ([0, 0.0, -1e-30, -7], [1e-30, 1, NAN]),
    checks.fraction: ([0, 1e-30, 0.5, 1], [-1e-30, 1.0001, 2, NAN]),
    checks.fraction_below_one: ([0, 0.5, 0.999], [-1e-30, 1, 2, NAN, 1 - 1e-9]),
    checks.open_fraction: ([1e-30, 0.5, 0.999], [0, -1, 1, 2, NAN]),
}
NO_NUMBERS = ["0.1", None, True, [0.1], 1j, np.complex64(1), np.bool_(1), np.str_("1")]
each_check = pytest.mark.parametrize("check", RANGES)


def assert_rejects(check, kind=ValueError):
    with rejects(kind, field="x"):
        checks.check_hyperparameters("owner", x=check)


@each_check
def test_ranges(check):
    inside, outside = RANGES[check]
    for value in inside:
        assert check(value) == checks.PASSED
        checks.check_hyperparameters("owner", x=check(value))
    for value in outside:
        assert_rejects(check(value))
    for value in NO_NUMBERS:
        assert_rejects(check(value), TypeError)
    for value in (np.ones(1), jnp.ones((2, 3))):
        assert_rejects(check(value))


def test_a_traced_scalar_passes():
    found = []

    def trace(value):
        found.append(all(check(value) == checks.PASSED for check in RANGES))
        return value

    for value in (5.0, np.ones(2), 1j):
        jax.eval_shape(trace, value)
    assert found == [True, False, False]


def test_integers():
    for value in (2, 3, np.int64(2), np.array(2), jnp.asarray(2)):
        assert checks.int_from(2, value) == checks.PASSED
    for value in (2.0, "2", None, True, np.ones(3), np.array(2.0)):
        assert_rejects(checks.int_from(2, value), TypeError)
    assert_rejects(checks.int_from(2, 1))


def test_flags_choices_and_none():
    for check in (
        *(checks.flag(True), checks.flag(np.bool_(False))),
        *(checks.one_of(x, Literal["a", "b"]) for x in "ab"),
        checks.or_none(checks.positive, None),
    ):
        assert check == checks.PASSED
    for value in (0, 1, None, "yes", 1.0):
        assert_rejects(checks.flag(value), TypeError)
    for value in ("c", None, ["a"]):
        assert_rejects(checks.one_of(value, Literal["a", "b"]))
    assert_rejects(checks.or_none(checks.positive, 0))


def test_names_every_problem_at_once():
    with rejects(field="x", fix="z must be") as error:
        checks.check_hyperparameters(
            x=checks.positive(-1), y=checks.positive(1), z=checks.fraction(2)
        )
    assert "y must" not in str(error.value)
