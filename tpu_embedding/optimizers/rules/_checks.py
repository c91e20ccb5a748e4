"""Range checks of hyper-parameters.

A hyper-parameter is a Python scalar, or an array that is traced under
`optax.inject_hyperparams`. A traced value is unknown, so it passes every check.
"""

from typing import Any, NamedTuple, get_args

from jax.core import Tracer


class RangeCheck(NamedTuple):
    """A hyper-parameter, compared with its range.

    Attributes:
      value: the hyper-parameter, as the error shows it.
      is_in_range: True for a traced value, too.
      range: completes "must be ..." in the error.
    """

    value: Any
    is_in_range: bool
    range: str


def check_hyperparameters(owner: str | None = None, /, **checks: RangeCheck) -> None:
    """Raises one error that names every hyper-parameter out of its range.

    Args:
      owner: the function that takes the hyper-parameters; None where the caller adds
        the owner to the error.
      **checks: hyper-parameter to its check, such as `positive(value)`.

    Raises:
      ValueError: if a value is out of its range.
    """
    problems = [
        f"{name} must be {check.range}, got {check.value}"
        for name, check in checks.items()
        if not check.is_in_range
    ]
    if problems:
        prefix = "" if owner is None else f"{owner}: "
        raise ValueError(prefix + "; ".join(problems) + ".")


def positive(value: Any) -> RangeCheck:
    """Checks that a value is above 0."""
    return RangeCheck(value, _is_traced(value) or bool(value > 0), "positive")


def non_negative(value: Any) -> RangeCheck:
    """Checks that a value is at least 0."""
    return RangeCheck(value, _is_traced(value) or bool(value >= 0), "non-negative")


def non_positive(value: Any) -> RangeCheck:
    """Checks that a value is at most 0."""
    return RangeCheck(value, _is_traced(value) or bool(value <= 0), "non-positive")


def fraction(value: Any) -> RangeCheck:
    """Checks that a value is in [0, 1]."""
    return RangeCheck(value, _is_traced(value) or bool(0 <= value <= 1), "in [0, 1]")


def fraction_below_one(value: Any) -> RangeCheck:
    """Checks that a value is in [0, 1)."""
    return RangeCheck(value, _is_traced(value) or bool(0 <= value < 1), "in [0, 1)")


def open_fraction(value: Any) -> RangeCheck:
    """Checks that a value is in (0, 1)."""
    return RangeCheck(value, _is_traced(value) or bool(0 < value < 1), "in (0, 1)")


def one_of(value: Any, choices: Any) -> RangeCheck:
    """Checks that a value is one of the choices of a `Literal`."""
    allowed = get_args(choices)
    return RangeCheck(repr(value), value in allowed, f"one of {list(allowed)}")


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tracer)
