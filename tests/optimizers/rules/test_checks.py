"""Range checks: each bound from both sides, and one error for all problems."""

from typing import Literal

import jax
import pytest

from tpu_embedding.optimizers.rules import _checks

ACCEPTED = {
    _checks.positive: [1e-30, 1, 2.5],
    _checks.non_negative: [0, 0.0, 1e-30, 7],
    _checks.non_positive: [0, 0.0, -1e-30, -7],
    _checks.fraction: [0, 1e-30, 0.5, 1],
    _checks.fraction_below_one: [0, 0.5, 0.999],
    _checks.open_fraction: [1e-30, 0.5, 0.999],
}
REFUSED = {
    _checks.positive: ([0, -0.0, -1], "positive"),
    _checks.non_negative: ([-1e-30, -1], "non-negative"),
    _checks.non_positive: ([1e-30, 1], "non-positive"),
    _checks.fraction: ([-1e-30, 1.0001, 2], "in [0, 1]"),
    _checks.fraction_below_one: ([-1e-30, 1, 2], "in [0, 1)"),
    _checks.open_fraction: ([0, -1, 1, 2], "in (0, 1)"),
}
each_check = pytest.mark.parametrize("check", ACCEPTED, ids=lambda x: x.__name__)


@each_check
def test_accepts_its_range(check):
    for value in ACCEPTED[check]:
        assert check(value) == (value, True, REFUSED[check][1])
        _checks.check_hyperparameters("owner", x=check(value))


@each_check
def test_refuses_what_lies_beside_it(check):
    values, text = REFUSED[check]
    for value in values:
        assert check(value) == (value, False, text)
        with pytest.raises(ValueError) as error:
            _checks.check_hyperparameters("owner", x=check(value))
        assert str(error.value) == f"owner: x must be {text}, got {value}."


@each_check
def test_a_traced_value_passes(check):
    found = []

    def trace(value):
        found.append(check(value).is_in_range)
        return value

    jax.eval_shape(trace, 5.0)
    assert found == [True]


def test_choices():
    choices = Literal["a", "b"]
    assert _checks.one_of("a", choices).is_in_range
    assert _checks.one_of("b", choices).is_in_range
    assert _checks.one_of("c", choices) == ("'c'", False, "one of ['a', 'b']")


def test_names_every_problem_at_once():
    with pytest.raises(ValueError) as error:
        _checks.check_hyperparameters(
            x=_checks.positive(-1), y=_checks.positive(1), z=_checks.fraction(2)
        )
    expected = "x must be positive, got -1; z must be in [0, 1], got 2."
    assert str(error.value) == expected
