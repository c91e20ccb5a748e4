"""Checks of the arguments of public functions, whose errors show the line to write.

An argument of the wrong type would fail deep inside JAX or Flax, with an error that
does not name it. The checks run at the call.
"""

import inspect
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class ArgumentType(NamedTuple):
    """The type of an argument.

    Attributes:
      type: class, or union of classes.
      text: completes "must be ..." in the error, such as `"a Mesh of jax.make_mesh"`.
    """

    type: Any
    text: str


def describe_value(value: Any) -> str:
    """Returns a short description of a value for an error.

    Example:
      >>> describe_value(0.1), describe_value([0]), describe_value(describe_value)
      ('0.1', '[0]', 'the function describe_value')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {reprlib.repr(list(value))}"
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    # A long text, as that of a plan or a model, would hide the rest of the error.
    text = repr(value) if isinstance(value, _SHOWN) else ""
    return text if 0 < len(text) <= _MAX_LENGTH else type(value).__name__


_SHOWN = bool | int | float | complex | str | bytes | list | None
_MAX_LENGTH = 80


def check_type(owner: str, expected: ArgumentType, value: Any, line: str) -> None:
    """Raises TypeError unless a value has a type.

    Args:
      owner: function and argument, as `"te.functional.lookup: plan"`.
      expected: the type.
      value: the value that the user gives.
      line: the line to write.
    """
    if not isinstance(value, expected.type):
        raise TypeError(
            f"{owner} must be {expected.text}, got {describe_value(value)}. Write "
            f"{line}."
        )


def check_mapping(owner: str, value: Any, line: str) -> None:
    """Raises TypeError unless a value is a mapping.

    Args:
      owner: function and argument, as `"te.functional.lookup: tables"`.
      value: the value that the user gives.
      line: the line to write.
    """
    check_type(owner, ArgumentType(Mapping, "a dict"), value, line)


def check_scalar(owner: str, value: Any, line: str) -> None:
    """Raises TypeError unless a value is a number or an array of shape `()`.

    Args:
      owner: function and argument, as `"te.gradients.scale: factor"`.
      value: the value that the user gives.
      line: the line to write.
    """
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) != ():
        raise TypeError(
            f"{owner} must be a number, got {describe_value(value)}. Write {line}."
        )
