"""Checks arguments of public functions and fields of configurations.

Without these checks, an argument of the wrong type fails deep inside JAX or Flax, with
an error that doesn't name the argument. They run when the user calls the function, and
their errors show the correct call.

A configuration class has one rule per field. One error reports all broken rules of an
object, each with the field, rule, value, owner and fix.
"""

import difflib
import functools
import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T", bound=Callable[..., Any])
E = TypeVar("E", bound=Exception)


class ArgumentType(NamedTuple):
    """The type of an argument.

    Attributes:
      type: class or union of classes.
      text: completes "must be ..." in the error, such as `"a Mesh of jax.make_mesh"`.
    """

    type: Any
    text: str


def describe_value(value: Any) -> str:
    """Returns a short description of a value for an error.

    Example:
      >>> describe_value(0.1), describe_value((0, 1)), describe_value(describe_value)
      ('0.1', '(0, 1)', 'the function describe_value')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {reprlib.repr(list(value))}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    # A long repr, such as a plan's or a model's, would bury the rest of the error.
    return _REPR.repr(value) if isinstance(value, _SHOWN) else type(value).__name__


def about(error: E, field: str, value: Any = None) -> E:
    """Returns an error with the attributes `field` and `value`, for code that reads it.

    Args:
      error: error whose text names the field, rule, value, owner and fix.
      field: field or argument, after its owner if it has one: `"TableConfig.dim"`.
      value: the user's value.

    Example:
      >>> error = about(ValueError("TableConfig.dim must be at least 1, got 0."),
      ...               "TableConfig.dim", 0)
      >>> error.field, error.value
      ('TableConfig.dim', 0)
    """
    vars(error).update(field=field, value=value)
    return error


def invalid(
    field: str,
    rule: str,
    value: Any,
    fix: str = "",
    kind: Callable[[str], E] = ValueError,
) -> E:
    """Returns an error that names a field, the rule it breaks, its value and a fix.

    Example:
      >>> invalid("te.make: size", "be an int", 0.5, "Write te.make(size=1).")
      ValueError('te.make: size must be an int, got 0.5. Write te.make(size=1).')
    """
    text = f"{field} must {rule}, got {describe_value(value)}."
    return about(kind(f"{text} {fix}".rstrip()), field, value)


def type_name(value: Any) -> str:
    """Returns the name of a value's type with its article.

    Example:
      >>> type_name(3), type_name([])
      ('an int', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


_SHOWN = bool | int | float | complex | str | bytes | list | tuple | None
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = 12
_REPR.maxstring, _REPR.maxother = 200, 80


def check_type(owner: str, expected: ArgumentType, value: Any, line: str) -> None:
    """Raises TypeError unless a value has the expected type.

    Args:
      owner: function and argument, such as `"te.functional.lookup: plan"`.
      expected: required type.
      value: the user's value.
      line: correct call, for the error.
    """
    if not isinstance(value, expected.type):
        raise invalid(owner, f"be {expected.text}", value, f"Write {line}.", TypeError)


def check_mapping(owner: str, value: Any, line: str) -> None:
    """Raises TypeError unless a value is a mapping; see `check_type`."""
    check_type(owner, ArgumentType(Mapping, "a dict"), value, line)


def check_scalar(owner: str, value: Any, line: str) -> None:
    """Raises TypeError unless a value is a number or an array of shape `()`."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) != ():
        raise invalid(owner, "be a number", value, f"Write {line}.", TypeError)


def right_names(
    aliases: Mapping[str, str] | None = None, module: str = "te", /, **right: str
) -> Callable[[T], T]:
    """Decorates a function or class so that its errors suggest the right arguments.

    Args:
      aliases: mapping from an alias to the name of the argument.
      module: public module of the function or class, for the errors.
      **right: mapping from a name in another library to the argument's name, or to
        other code to write instead.

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
            owner = f"{module}.{target.__name__}"
            if unnamed := by_name[: max(0, len(args) - num_by_place)]:
                line = ", ".join(f"{name}=..." for name in unnamed)
                raise TypeError(f"{owner} takes these by name: write {line}")
            for alias in aliases.keys() & kwargs.keys():
                name = aliases[alias]
                if name in kwargs or name in known[: len(args)]:
                    text = f"{owner} got {alias} and {name}, which are the same. Pass "
                    text += f"only {name}, also in dataclasses.replace."
                    raise about(TypeError(text), f"{owner}: {alias}")
                kwargs[name] = kwargs.pop(alias)
            for name in kwargs:
                if name not in known:
                    line = _right_name(name, known, right)
                    error = TypeError(f"{owner} has no argument {name!r}: {line}")
                    raise about(error, f"{owner}: {name}", kwargs[name])
            return function(*args, **kwargs)

        if not is_class:
            return checked
        target.__init__ = checked
        return target

    return decorate


def _right_name(name: str, known: list[str], right: Mapping[str, str]) -> str:
    """Returns what to write instead of an unknown argument."""
    similar = difflib.get_close_matches(name, known, n=1)
    better = right.get(name, similar[0] if similar else "")
    if not better:
        return f"it takes {', '.join(known)}."
    return f"write {better}=..." if better in known else f"write {better}."


class Rule(NamedTuple):
    """A rule for the value of a field.

    Attributes:
      is_met: returns True for a valid value.
      text: completes "must be ..." in the error.
      fix: what to write instead; empty if `text` already says so.
    """

    is_met: Callable[[Any], bool]
    text: str
    fix: str = ""


def int_rule(low: int, high: int | None = None, fix: str = "") -> Rule:
    """Returns a rule for an int from `low` to `high`."""
    text = f"of at least {low}" if high is None else f"from {low} to {high}"
    return Rule(
        lambda x: is_int(x) and low <= x and (high is None or x <= high),
        f"an int {text}",
        fix,
    )


def choice_rule(choices: tuple[str, ...], fix: str = "") -> Rule:
    """Returns a rule for one of several strings."""
    return Rule(lambda x: x in choices, f"one of {list(choices)}", fix)


def optional(rule: Rule) -> Rule:
    """Returns a rule that also accepts None."""
    return rule._replace(
        is_met=lambda x: x is None or rule.is_met(x), text=f"{rule.text} or None"
    )


BOOL_RULE = Rule(lambda x: isinstance(x, bool), "a bool")


class Problem(NamedTuple):
    """A problem of a configuration.

    Attributes:
      field: field with its class, `"TableConfig.dim"`.
      value: value of the field.
      text: what follows the field in the error, without a period.
    """

    field: str
    value: Any
    text: str


def broken_rules(
    config: Any, rules: Mapping[str, Rule], owner: str = ""
) -> Iterator[Problem]:
    """Yields a problem for each field that breaks its rule.

    Args:
      config: object of a configuration class.
      rules: mapping from field to rule.
      owner: text that names the object, such as `" for table 'movie'"`.
    """
    for field, (is_met, text, fix) in rules.items():
        value = getattr(config, field)
        if not is_met(value):
            ending = f"; {fix}" if fix else ""
            # The elements of an array would hide the rest of the error.
            is_array = getattr(value, "ndim", 0) and not isinstance(value, type)
            got = describe_value(value) if is_array else repr(value)
            text = f"must be {text}, got {got}{owner}{ending}"
            yield Problem(f"{type(config).__name__}.{field}", value, text)


def is_int(value: Any) -> bool:
    """Returns True for Python and NumPy ints, but not for bools."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite(*values: Any) -> bool:
    """Returns True if all values are finite numbers and not bools."""
    return all(
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and math.isfinite(value)
        for value in values
    )


def convert_ints(config: Any, *fields: str) -> None:
    """Converts NumPy integers in fields, or in tuples in fields, to int.

    Otherwise arithmetic on narrow NumPy integers could wrap around.
    """
    for field in fields:
        value = getattr(config, field)
        if isinstance(value, tuple):
            converted: Any = tuple(int(v) if is_int(v) else v for v in value)
        else:
            converted = int(value) if is_int(value) else value
        object.__setattr__(config, field, converted)


def raise_all(problems: Iterable[Problem]) -> None:
    """Raises one ValueError with all problems, if any.

    Its attributes `field` and `value` name the first one.
    """
    problems = list(problems)
    if problems:
        text = "; ".join(f"{problem.field} {problem.text}" for problem in problems)
        raise about(ValueError(f"{text}."), *problems[0][:2])
