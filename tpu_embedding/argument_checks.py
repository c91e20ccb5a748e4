"""Checks of the arguments of public functions, whose errors show the line to write.

An argument of the wrong type would fail deep inside JAX or Flax, with an error that
does not name it. The checks run at the call.
"""

import difflib
import functools
import inspect
import numbers
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


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


def right_names(
    aliases: Mapping[str, str] | None = None, /, **right: str
) -> Callable[[T], T]:
    """Decorates a function or a class whose errors tell the right names of arguments.

    Args:
      aliases: second name of an argument to the argument.
      **right: name of another library to the argument here, or to what to write.

    Example:
      >>> @right_names(num_rows="size")
      ... def make(*, size):
      ...     return size
      >>> make(num_rows=3)
      Traceback (most recent call last):
      TypeError: te.make has no argument 'num_rows': write size=...
    """
    aliases = aliases or {}

    def decorate(target: Any) -> Any:
        is_class = isinstance(target, type)
        function = target.__init__ if is_class else target
        parameters = inspect.signature(function).parameters
        known = [name for name in parameters if name != "self"]
        kind = inspect.Parameter.KEYWORD_ONLY
        by_name = [name for name in known if parameters[name].kind is kind]
        num_by_place = len(parameters) - len(by_name)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            owner = f"te.{target.__name__}"
            if unnamed := by_name[: max(0, len(args) - num_by_place)]:
                line = ", ".join(f"{name}=..." for name in unnamed)
                raise TypeError(f"{owner} takes these by name: write {line}")
            for alias in aliases.keys() & kwargs.keys():
                name = aliases[alias]
                if name in kwargs:
                    raise TypeError(
                        f"{owner} takes {alias} or {name}, which is the same, got both."
                        f" Give {name} alone; dataclasses.replace takes no {alias}."
                    )
                kwargs[name] = kwargs.pop(alias)
            for name in kwargs:
                if name not in known:
                    way_out = _right_name(name, known, right)
                    raise TypeError(f"{owner} has no argument {name!r}: {way_out}")
            return function(*args, **kwargs)

        if not is_class:
            return checked
        target.__init__ = checked
        return target

    return decorate


def _right_name(name: str, known: list[str], right: Mapping[str, str]) -> str:
    """Returns what to write in place of a name that a function does not take."""
    similar = difflib.get_close_matches(name, known, n=1)
    found = right.get(name, similar[0] if similar else "")
    if not found:
        return f"it takes {', '.join(known)}."
    return f"write {found}=..." if found in known else f"write {found}."
