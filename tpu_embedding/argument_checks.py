"""Checks arguments of public functions and fields of configurations.

Without these checks, a wrong type fails deep inside JAX or Flax, with an error that
doesn't name the argument. Errors from these checks name the field, the rule, the value
and the fix. A configuration reports all its broken rules in one error.
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
    """A required type, and the text that completes "must be ..." in the error."""

    type: Any
    text: str


def describe_value(value: Any) -> str:
    """Describes a value briefly, for an error.

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
    if isinstance(value, np.generic):  # NumPy 2 would print `np.float64(0.1)`.
        value = value.item()
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    # A long repr, such as a plan's or a model's, would bury the rest of the error.
    return _REPR.repr(value) if isinstance(value, _SHOWN) else type(value).__name__


def about(error: E, field: str, value: Any = None) -> E:
    """Attaches `field` and `value` to an error, for code that handles it.

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
    """Builds an error that names a field, the rule it breaks, its value and a fix.

    Example:
      >>> invalid("te.make: size", "be an int", 0.5, "Write te.make(size=1).")
      ValueError('te.make: size must be an int, got 0.5. Write te.make(size=1).')
    """
    text = f"{field} must {rule}, got {describe_value(value)}."
    return about(kind(f"{text} {fix}".rstrip()), field, value)


def type_name(value: Any) -> str:
    """Names the type of a value, after "a" or "an".

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
    """Raises a TypeError that shows the correct call, `line`, unless the type fits.

    `owner` is the function and its argument, such as `"te.functional.lookup: plan"`.
    """
    if not isinstance(value, expected.type):
        raise invalid(owner, f"be {expected.text}", value, f"Write {line}.", TypeError)


def check_mapping(owner: str, value: Any, line: str) -> None:
    check_type(owner, ArgumentType(Mapping, "a dict"), value, line)


def check_scalar(owner: str, value: Any, line: str) -> None:
    """Accepts numbers and scalar arrays."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) != ():
        raise invalid(owner, "be a number", value, f"Write {line}.", TypeError)


def right_names(
    aliases: Mapping[str, str] | None = None, module: str = "te", /, **right: str
) -> Callable[[T], T]:
    """Makes errors about unknown arguments suggest what to write.

    `aliases` maps each alias to an argument. `right` maps each name from other
    libraries to an argument, or to the code to write instead.

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
            # Python's own error would count these arguments, but not name them.
            if unnamed := by_name[: max(0, len(args) - num_by_place)]:
                line = ", ".join(f"{name}=..." for name in unnamed)
                raise TypeError(f"{owner} takes these by name: write {line}")
            for alias in aliases.keys() & kwargs.keys():
                name = aliases[alias]
                # `dataclasses.replace(x, alias=...)` also passes the field itself.
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
        # Replacing the class with a function would break `isinstance`.
        target.__init__ = checked
        return target

    return decorate


def _right_name(name: str, known: list[str], right: Mapping[str, str]) -> str:
    similar = difflib.get_close_matches(name, known, n=1)
    better = right.get(name, similar[0] if similar else "")
    if not better:
        return f"it takes {', '.join(known)}."
    return f"write {better}=..." if better in known else f"write {better}."


class Rule(NamedTuple):
    """A rule for field values. `text` completes "must be ..." in the error."""

    is_met: Callable[[Any], bool]
    text: str
    fix: str = ""


def int_rule(low: int, high: int | None = None, fix: str = "") -> Rule:
    text = f"of at least {low}" if high is None else f"from {low} to {high}"
    return Rule(
        lambda x: is_int(x) and low <= x and (high is None or x <= high),
        f"an int {text}",
        fix,
    )


def choice_rule(choices: tuple[str, ...], fix: str = "") -> Rule:
    return Rule(lambda x: x in choices, f"one of {list(choices)}", fix)


def optional(rule: Rule) -> Rule:
    return rule._replace(
        is_met=lambda x: x is None or rule.is_met(x), text=f"{rule.text} or None"
    )


BOOL_RULE = Rule(lambda x: isinstance(x, bool), "a bool")


class Problem(NamedTuple):
    """A broken rule for `field`, such as `"TableConfig.dim"`.

    In the error, `text` follows the field's name. The text ends without a period.
    """

    field: str
    value: Any
    text: str


def broken_rules(
    config: Any, rules: Mapping[str, Rule], owner: str = ""
) -> Iterator[Problem]:
    """Finds broken rules. `owner` names the object, such as `" for table 'movie'"`."""
    for field, (is_met, text, fix) in rules.items():
        value = getattr(config, field)
        if not is_met(value):
            ending = f"; {fix}" if fix else ""
            # Array elements would hide the rest of the error. Classes such as
            # `np.float32` also have an attribute `ndim`.
            is_array = getattr(value, "ndim", 0) and not isinstance(value, type)
            got = describe_value(value) if is_array else repr(value)
            text = f"must be {text}, got {got}{owner}{ending}"
            yield Problem(f"{type(config).__name__}.{field}", value, text)


def is_int(value: Any) -> bool:
    """Accepts Python and NumPy ints, but not bools."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite(*values: Any) -> bool:
    """Accepts finite numbers, but not bools."""
    return all(
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and math.isfinite(value)
        for value in values
    )


def convert_ints(config: Any, *fields: str) -> None:
    """Converts NumPy integers to int, also inside tuples."""
    # Arithmetic on narrow NumPy integers could wrap around.
    for field in fields:
        value = getattr(config, field)
        if isinstance(value, tuple):
            converted: Any = tuple(int(v) if is_int(v) else v for v in value)
        else:
            converted = int(value) if is_int(value) else value
        object.__setattr__(config, field, converted)


def raise_all(problems: Iterable[Problem]) -> None:
    """Raises one ValueError for all problems, with the `field` of the first one."""
    problems = list(problems)
    if problems:
        text = "; ".join(f"{problem.field} {problem.text}" for problem in problems)
        raise about(ValueError(f"{text}."), *problems[0][:2])
