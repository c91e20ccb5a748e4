"""Rules for hyper-parameters, which may be numbers, or traced by optax."""

from typing import Any, get_args

from jax.core import Tracer

Checked = tuple[Any, bool, str]
"""A value, whether its rule holds, and the rule in words."""


def check_hyperparameters(**rules: Checked) -> None:
    """Raises one error that names every broken rule.

    Args:
      **rules: name to `positive(value)` and the like. A traced value, as under
        `optax.inject_hyperparams`, passes: it is not known yet.

    Raises:
      ValueError: if a rule does not hold.
    """
    problems = [
        f"{name} must be {rule}, got {value}"
        for name, (value, is_kept, rule) in rules.items()
        if not is_kept
    ]
    if problems:
        raise ValueError("; ".join(problems) + ".")


def positive(value: Any) -> Checked:
    """The rule that a value is above zero."""
    return value, _is_traced(value) or bool(value > 0), "positive"


def not_negative(value: Any) -> Checked:
    """The rule that a value is zero or above."""
    return value, _is_traced(value) or bool(value >= 0), "not negative"


def not_positive(value: Any) -> Checked:
    """The rule that a value is zero or below."""
    return value, _is_traced(value) or bool(value <= 0), "not positive"


def decay(value: Any) -> Checked:
    """The rule that a value is in [0, 1)."""
    return value, _is_traced(value) or bool(0 <= value < 1), "in [0, 1)"


def fraction(value: Any) -> Checked:
    """The rule that a value is in [0, 1]."""
    return value, _is_traced(value) or bool(0 <= value <= 1), "in [0, 1]"


def one_of(value: Any, choices: Any) -> Checked:
    """The rule that a value is one of those of a `Literal`."""
    allowed = get_args(choices)
    return repr(value), value in allowed, f"one of {list(allowed)}"


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tracer)
