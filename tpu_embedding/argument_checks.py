"""Checks of the arguments of public functions, whose errors show the line to write.

An argument in the wrong place, or of the wrong type, would fail deep inside JAX or
Flax, with an error that names neither. The checks run at the call, before `jax.jit`.
"""

import functools
import inspect
import numbers
import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


class Wanted(NamedTuple):
    """The type of an argument.

    Attributes:
      type: class, or union of classes.
      text: completes "must be ..." in the error, such as `"a Mesh of jax.make_mesh"`.
    """

    type: Any
    text: str


PATH: Final = Wanted(str | os.PathLike, "a path")


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


def check_type(owner: str, wanted: Wanted, value: Any, line: str) -> None:
    """Raises TypeError unless a value has a type.

    Args:
      owner: function and argument, as `"te.functional.lookup: plan"`.
      wanted: the type.
      value: the value that the user gives.
      line: the line to write.
    """
    if not isinstance(value, wanted.type):
        raise TypeError(
            f"{owner} must be {wanted.text}, got {describe_value(value)}. Write {line}."
        )


def takes(prefix: str = "te.", **wanted: Wanted) -> Callable[..., Any]:
    """Checks the types of arguments of a function, before its `jax.jit` sees them.

    Args:
      prefix: goes before the name of the function in errors.
      **wanted: name of an argument to its type.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        name = f"{prefix}{function.__name__}"
        needed = [x.name for x in signature.parameters.values() if x.default is x.empty]
        line = f"{name}({', '.join(needed)})"

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{name}: {error}. Write {line}.") from None
            for argument, kind in wanted.items():
                if argument in given:
                    check_type(f"{name}: {argument}", kind, given[argument], line)
            return function(*args, **kwargs)

        for method in ("lower", "trace", "eval_shape"):  # of `jax.jit`
            if hasattr(function, method):
                setattr(call, method, getattr(function, method))
        return call

    return decorate


def by_name(cls: C) -> C:
    """Lets a class whose arguments have names refuse positional and unknown ones.

    Python's own error does not say what the names are.

    Args:
      cls: class without positional arguments, such as a dataclass with `kw_only`.
    """
    init: Any = cls.__init__
    names = list(inspect.signature(init).parameters)[1:]
    owner = f"te.{cls.__name__}"

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in names]
        if unknown:
            raise TypeError(
                f"{owner} has no argument {unknown[0]!r}; it takes {', '.join(names)}."
            )
        if args:
            free = [name for name in names if name not in kwargs]
            given = dict(zip(free, args, strict=False)) | kwargs
            line = ", ".join(f"{name}={describe_value(x)}" for name, x in given.items())
            raise TypeError(
                f"{owner} takes no positional arguments, got {len(args)}. Name them: "
                f"{owner}({line})."
            )
        init(self, **kwargs)

    setattr(cls, "__init__", checked)  # noqa: B010
    return cls


def check_mapping(owner: str, value: Any, line: str) -> None:
    """Raises TypeError unless a value is a mapping.

    Args:
      owner: function and argument, as `"te.functional.lookup: tables"`.
      value: the value that the user gives.
      line: the line to write.
    """
    check_type(owner, Wanted(Mapping, "a dict"), value, line)


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


class NoArray:
    """Base of classes whose values JAX must not trace.

    JAX asks each argument of a function under `jax.jit` for `__jax_array__`, and only
    asking for it can show an error of its own: JAX never calls it. `dir` hides it from
    those who read all attributes, as `inspect.getmembers` does.
    """

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != "__jax_array__"]

    @property
    def __jax_array__(self) -> Any:
        # JAX hides a TypeError, and hasattr an AttributeError.
        raise ValueError(
            f"{type(self).__name__} is no array, so it cannot be an argument of a "
            "function under jax.jit or nnx.jit. Make it outside, and let the function "
            "use it without an argument: jax.jit(lambda batch: f(batch, config))."
        )
