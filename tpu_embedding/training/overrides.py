"""`--set KEY=VALUE`: changes to a run config from the command line.

Keys are the fields of the config, those of its sections with a dot: `num_steps`,
`model.dim`. Values are read as the type that the field declares.
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
    """Returns a config with some fields replaced.

    Args:
      config: a frozen dataclass, with dataclasses as sections.
      assignments: `"KEY=VALUE"` each; of two for a key the last one counts. Several
        numbers are separated by commas; `none` is None where the field may be None.

    Raises:
      ConfigError: if a key is not known or a value cannot be read; lists the known
        keys. Also if the new config breaks a rule of its class.

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
                f"--set {assignment}: {key} must be {_name(settable[key])}, got "
                f"{text!r}."
            ) from None
    try:
        return _replace(config, values)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _settable_fields(config: Any, prefix: str = ""):
    """Yields key and type of each field that text can set, sections included."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if dataclasses.is_dataclass(value):
            yield from _settable_fields(value, f"{prefix}{field.name}.")
        elif _is_readable(hint):
            yield prefix + field.name, hint


def _replace(config: Any, values: dict[str, Any]) -> Any:
    own = {key: value for key, value in values.items() if "." not in key}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, dot, rest = key.partition(".")
        if dot:
            sections.setdefault(section, {})[rest] = value
    for section, section_values in sections.items():
        own[section] = _replace(getattr(config, section), section_values)
    return dataclasses.replace(config, **own)


def _is_readable(hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0] in _SIMPLE_TYPES
    return _not_none(hint) in _SIMPLE_TYPES


def _not_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        choices = [choice for choice in hint.__args__ if choice is not type(None)]
        return choices[0] if len(choices) == 1 else hint
    return hint


def _parse(text: str, hint: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        item_type = typing.get_args(hint)[0]
        return tuple(item_type(item) for item in text.split(",") if item)
    if _not_none(hint) is not hint and text.lower() == "none":
        return None
    return _not_none(hint)(text)


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"{typing.get_args(hint)[0].__name__}s with commas between them"
    name = {int: "an int", float: "a number", str: "text"}[_not_none(hint)]
    return name if _not_none(hint) is hint else f"{name} or none"
