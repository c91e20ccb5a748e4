"""Describes an optimizer rule as JSON values, to compare it with another run's.

An optax transformation is a pair of functions. Its hyper-parameters are the values that
these functions close over. The description names each function and its values:

    {"chain": {"update_fns": ["scale_by_adam", "scale"], ...},
     "scale_by_adam": {"b1": 0.9, "b2": 0.999, "eps": 1e-08, ...}}

Rules whose slot variables have equal shapes differ in it, and so do two values of
`epsilon`. The code of a function is no part of it: a user's function is known by name.
"""

import dataclasses
import functools
import hashlib
import math
import types
from collections.abc import Mapping
from typing import Any, Final

import jax
import numpy as np
import optax

_LEFT_OUT: Final = {"learning_rate", "step_size", "step_size_fn", "rate", "others"}
"""Variables that hold a learning rate or its schedule, which a run may change; and the
names of other tables, in the part of an optimizer of several tables."""

_BY_NAME: Final = {"inner_factory"}
"""Variables that hold the function which makes a rule, beside its arguments."""

_WRAPPERS: Final = {
    "with_extra_args_support": ("tx",),
    "for_each_array": ("init", "update"),
}
"""Functions that only pass on to another one, and the variables that hold it."""

_MAX_ELEMENTS: Final = 16
"""Larger arrays are described by a digest."""


def describe_rule(rule: optax.GradientTransformation) -> dict[str, Any]:
    """Returns the functions of a rule and their hyper-parameters.

    Learning rates and their schedules are left out: a run may go on with others.

    Args:
      rule: an optax transformation.

    Returns:
      Name of a function, or of an object that it holds, to values by name, as JSON
      has them.

    Example:
      >>> describe_rule(optax.adam(0.1)) == describe_rule(optax.adam(0.2))
      True
      >>> describe_rule(optax.adam(0.1, eps=1e-6))["scale_by_adam"]["eps"]
      1e-06
    """
    walk = _Walk()
    walk.visit(rule)
    return walk.entries


class _Walk:
    """Visits a function and all that it holds.

    Attributes:
      entries: name of each function or object to its values. The second one of a name
        is `name/2`.
    """

    def __init__(self):
        self.entries: dict[str, dict[str, Any]] = {}
        # The objects are kept alive, so that no other one gets an id of theirs.
        self._names: dict[int, tuple[str, Any]] = {}
        self._counts: dict[str, int] = {}

    def visit(self, value: Any) -> Any:
        """Returns a value as JSON; a function or object as its name."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else repr(value)
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._array(np.asarray(value))
        if isinstance(value, Mapping):
            items = {str(key): item for key, item in value.items()}
            return {k: self.visit(x) for k, x in items.items() if k not in _LEFT_OUT}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return [self.visit(item) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(map(str, value))
        if isinstance(value, optax.GradientTransformation):
            self.visit(value.init)
            return self.visit(value.update)
        return self._object(value)

    def _object(self, value: Any) -> str:
        if id(value) in self._names:
            return self._names[id(value)][0]
        name, parts = _parts_of(value)
        wrapped = [parts[part] for part in _WRAPPERS.get(name, ()) if part in parts]
        if wrapped:
            return [self.visit(function) for function in wrapped][-1]
        # The `init` and the `update` of a rule share an entry.
        inner_name = getattr(value, "__qualname__", name)
        self._counts[inner_name] = number = self._counts.get(inner_name, 0) + 1
        key = name if number == 1 else f"{name}/{number}"
        self._names[id(value)] = key, value
        entry = self.entries.setdefault(key, {})
        for part, item in parts.items():
            if part in _BY_NAME:
                entry[part] = getattr(item, "__name__", repr(item))
            elif part not in _LEFT_OUT:
                entry[part] = self.visit(item)
        return key

    def _array(self, array: np.ndarray) -> Any:
        if array.size <= _MAX_ELEMENTS:
            return self.visit(array.tolist())
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        return f"{array.dtype}{list(array.shape)} {digest[:16]}"


def _parts_of(value: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name of a function or object, and the values that it holds."""
    if isinstance(value, functools.partial):
        arguments = {str(i): argument for i, argument in enumerate(value.args)}
        return "partial", {"function": value.func, **arguments, **value.keywords}
    if isinstance(value, types.MethodType):
        return value.__name__, {"object": value.__self__}
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        # The public function that made it: `scale_by_adam.<locals>.update_fn`.
        name = value.__qualname__.partition(".<locals>")[0]
        return name, {name: _contents(cell) for name, cell in cells}
    if isinstance(value, type | np.dtype):
        return getattr(value, "__name__", str(value)), {}
    if hasattr(value, "__wrapped__"):  # Under jit.
        return _parts_of(value.__wrapped__)
    if hasattr(value, "_fields"):
        return type(value).__name__, value._asdict()
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value).__name__, {f.name: getattr(value, f.name) for f in fields}
    name = getattr(value, "__name__", type(value).__name__)
    return name, dict(getattr(value, "__dict__", {}))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Not assigned yet.
        return None
