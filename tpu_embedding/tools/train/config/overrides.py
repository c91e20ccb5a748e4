"""Applies `--set KEY=VALUE` of the command line to a run config.

A key is a field of the config, such as `num_steps`, or of one of its sections, such as
`model.dim`. A value is parsed as the declared type of its field.
"""

import dataclasses
import math
import pathlib
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

from tpu_embedding.tools.train.errors import ConfigError

T = TypeVar("T")

_TYPE_NAMES: Final = {
    int: "an int",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    pathlib.Path: "a path",
}
"""Types that a field must have, or have as items, for `--set` to change it."""


def apply_overrides(config: T, assignments: Iterable[str]) -> T:
    """Returns a copy of a config with some fields replaced.

    Args:
      config: a frozen dataclass, whose sections are dataclasses.
      assignments: strings `"KEY=VALUE"`. The last assignment to a key counts. Items of
        a tuple are separated by commas. `none` means None if the field may be None.

    Raises:
      ConfigError: if a key is unknown, a value cannot be parsed, or the new config
        breaks a rule of its class. The error of an unknown key lists the known keys.

    Example:
      >>> from tpu_embedding.tools.train.config.run_config import Target
      >>> target = Target(metric="rmse", at_most=0.94)
      >>> apply_overrides(target, ["at_most=0.9"]).at_most
      0.9
    """
    values: dict[str, Any] = {}
    settable = dict(_settable_fields(config))
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--set takes KEY=VALUE, got {assignment!r}.")
        if key not in settable:
            raise ConfigError(_unknown_key(assignment, key, config, settable))
        try:
            values[key] = _parse(text, settable[key])
        except ValueError:
            raise ConfigError(
                f"--set {assignment}: {key} must be {_type_name(settable[key])}, got "
                f"{text!r}."
            ) from None
    try:
        return _replace(config, values)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _settable_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key, type) of each field that `--set` can change, sections included."""
    try:
        hints = typing.get_type_hints(type(config))
    except (NameError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The annotations of {type(config).__name__}, a section of the config, "
            f"cannot be read: {error}"
        ) from error
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if dataclasses.is_dataclass(value):
            yield from _settable_fields(value, f"{prefix}{field.name}.")
        elif field.init and _is_settable(hint):
            yield prefix + field.name, hint


def _unknown_key(
    assignment: str, key: str, config: Any, settable: dict[str, Any]
) -> str:
    """Returns the message for a key that `--set` cannot change."""
    value, reason = config, "is no key of this config"
    for part in key.split("."):
        if not dataclasses.is_dataclass(value) or not hasattr(value, part):
            break
        value = getattr(value, part)
    else:
        is_section = dataclasses.is_dataclass(value)
        found = "section" if is_section else type(value).__name__
        reason = f"is a {found}, which only the config file can change"
    return (
        f"--set {assignment}: {key!r} {reason}; its keys are "
        f"{', '.join(sorted(settable))}."
    )


def _replace(config: Any, values: dict[str, Any]) -> Any:
    """Returns the config with new values; a key with a dot belongs to a section."""
    own = {key: value for key, value in values.items() if "." not in key}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, dot, rest = key.partition(".")
        if dot:
            sections.setdefault(section, {})[rest] = value
    for section, section_values in sections.items():
        own[section] = _replace(getattr(config, section), section_values)
    return dataclasses.replace(config, **own)


def _is_settable(hint: Any) -> bool:
    if _item_type(hint) is not None:
        return _item_type(hint) in _TYPE_NAMES
    plain = _without_none(hint)
    return plain in _TYPE_NAMES or _choices(plain) != ()


def _item_type(hint: Any) -> Any:
    """Returns `T` for the type `tuple[T, ...]`, and None for any other type."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments[1:] == (...,):
        return arguments[0]
    return None


def _choices(hint: Any) -> tuple[str, ...]:
    """Returns the strings of a `Literal`; nothing for any other type."""
    if typing.get_origin(hint) is not typing.Literal:
        return ()
    choices = typing.get_args(hint)
    return choices if all(isinstance(choice, str) for choice in choices) else ()


def _without_none(hint: Any) -> Any:
    """Returns `T` for the type `T | None`, and any other type as it is."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arguments = typing.get_args(hint)
        choices = [choice for choice in arguments if choice is not type(None)]
        return choices[0] if len(choices) == 1 else hint
    return hint


def _parse(text: str, hint: Any) -> Any:
    """Returns the value of a field with the given type; raises ValueError."""
    item_type = _item_type(hint)
    if item_type is not None:
        items = text.split(",") if text else []
        return tuple(_parse_plain(item, item_type) for item in items)
    plain = _without_none(hint)
    if plain is not hint and text.lower() == "none":
        return None
    return _parse_plain(text, plain)


def _parse_plain(text: str, plain: Any) -> Any:
    if plain is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if _choices(plain):
        if text not in _choices(plain):
            raise ValueError(text)
        return text
    value = plain(text)
    if plain is float and not math.isfinite(value):
        raise ValueError(text)
    return value


def _type_name(hint: Any) -> str:
    """Returns the type of a field in words, for an error."""
    item_type = _item_type(hint)
    if item_type is not None:
        return f"{item_type.__name__}s separated by commas"
    plain = _without_none(hint)
    name = _TYPE_NAMES.get(plain) or f"one of {', '.join(_choices(plain))}"
    return name if plain is hint else f"{name} or none"
