"""Applies `--set KEY=VALUE` of the command line to a run config.

A key is a field of the config, such as `num_steps`, or of one of its sections, such as
`model.dim`. A value is parsed as the declared type of its field.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from tpu_embedding.training.config_files import ConfigError

T = TypeVar("T")

_SIMPLE_TYPES = (int, float, str)


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
      >>> from tpu_embedding.training.run_config import Target
      >>> target = Target(metric="rmse", at_most=0.94)
      >>> apply_overrides(target, ["at_most=0.9"]).at_most
      0.9
    """
    values = {}
    settable = dict(_settable_fields(config))
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--set takes KEY=VALUE, got {assignment!r}.")
        if key not in settable:
            raise ConfigError(
                f"--set {assignment}: {key!r} is no key of this config; its keys are "
                f"{', '.join(sorted(settable))}."
            )
        try:
            values[key] = _parse(text, settable[key])
        except ValueError:
            raise ConfigError(
                f"--set {assignment}: {key} must be {_type_name(settable[key])}, got "
                f"{text!r}."
            ) from None
    try:
        return _replace(config, values)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _settable_fields(config: Any, prefix: str = ""):
    """Yields (key, type) of each field that `--set` can change, sections included."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if dataclasses.is_dataclass(value):
            yield from _settable_fields(value, f"{prefix}{field.name}.")
        elif _is_settable(hint):
            yield prefix + field.name, hint


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
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0] in _SIMPLE_TYPES
    return _without_none(hint) in _SIMPLE_TYPES


def _without_none(hint: Any) -> Any:
    """Returns `T` for the type `T | None`, and any other type as it is."""
    if isinstance(hint, types.UnionType):
        choices = [choice for choice in hint.__args__ if choice is not type(None)]
        return choices[0] if len(choices) == 1 else hint
    return hint


def _parse(text: str, hint: Any) -> Any:
    """Returns the value of a field with the given type; raises ValueError."""
    if typing.get_origin(hint) is tuple:
        item_type = typing.get_args(hint)[0]
        return tuple(item_type(item) for item in text.split(",") if item)
    if _without_none(hint) is not hint and text.lower() == "none":
        return None
    return _without_none(hint)(text)


def _type_name(hint: Any) -> str:
    """Returns the type of a field in words, for an error."""
    if typing.get_origin(hint) is tuple:
        return f"{typing.get_args(hint)[0].__name__}s separated by commas"
    name = {int: "an int", float: "a number", str: "a string"}[_without_none(hint)]
    return name if _without_none(hint) is hint else f"{name} or none"
