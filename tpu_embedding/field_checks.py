"""Checks of the fields of configuration classes."""

import math
import numbers
from typing import Any


def is_int(value: Any) -> bool:
    """Returns True for ints, NumPy's included, but not for bools."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite(*values: Any) -> bool:
    """Returns True if all values are finite numbers, but not bools."""
    return all(
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and math.isfinite(value)
        for value in values
    )


def convert_ints(config: Any, *fields: str) -> None:
    """Replaces NumPy's integers by ints, also in tuples, before the fields are checked.

    The arithmetic of NumPy's narrow integers would wrap.
    """
    for field in fields:
        value = getattr(config, field)
        if isinstance(value, tuple):
            converted: Any = tuple(int(v) if is_int(v) else v for v in value)
        else:
            converted = int(value) if is_int(value) else value
        object.__setattr__(config, field, converted)


def raise_all(problems: list[str]) -> None:
    """Raises one ValueError with all problems, if there are any."""
    if problems:
        raise ValueError("; ".join(problems) + ".")
