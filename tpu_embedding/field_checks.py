"""Checks of the fields of configuration classes.

A class has a table of rules, one per field. All broken rules of an object are reported
in one error, which names the field, the rule, the value, the owner and the way out.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """A rule for the value of a field.

    Attributes:
      is_met: returns True for a right value.
      text: completes "must be ..." in the error.
      way_out: says what to write instead; empty if the rule says it.
    """

    is_met: Callable[[Any], bool]
    text: str
    way_out: str = ""


def int_rule(low: int, high: int | None = None, way_out: str = "") -> Rule:
    """Returns the rule for an int from `low` to `high`."""
    text = f"of at least {low}" if high is None else f"from {low} to {high}"
    return Rule(
        lambda x: is_int(x) and low <= x and (high is None or x <= high),
        f"an int {text}",
        way_out,
    )


def choice_rule(choices: tuple[str, ...], way_out: str = "") -> Rule:
    """Returns the rule for one of some words."""
    return Rule(lambda x: x in choices, f"one of {list(choices)}", way_out)


def optional(rule: Rule) -> Rule:
    """Returns the rule for None, or else a value that meets a rule."""
    return rule._replace(
        is_met=lambda x: x is None or rule.is_met(x), text=f"{rule.text} or None"
    )


BOOL_RULE = Rule(lambda x: isinstance(x, bool), "a bool")


def broken_rules(
    config: Any, rules: Mapping[str, Rule], owner: str = ""
) -> Iterator[str]:
    """Yields the problem of each field whose rule its value breaks.

    Args:
      config: object of a configuration class.
      rules: rule of each field.
      owner: text that names the object, as `" for table 'movie'"`.
    """
    for field, (is_met, text, way_out) in rules.items():
        value = getattr(config, field)
        if not is_met(value):
            ending = f"; {way_out}" if way_out else ""
            yield (
                f"{type(config).__name__}.{field} must be {text}, got {value!r}"
                f"{owner}{ending}"
            )


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

    The arithmetic of NumPy's integers of few bits would wrap.
    """
    for field in fields:
        value = getattr(config, field)
        if isinstance(value, tuple):
            converted: Any = tuple(int(v) if is_int(v) else v for v in value)
        else:
            converted = int(value) if is_int(value) else value
        object.__setattr__(config, field, converted)


def raise_all(problems: Iterable[str]) -> None:
    """Raises one ValueError with all problems, if there are any."""
    problems = list(problems)
    if problems:
        raise ValueError("; ".join(problems) + ".")
