"""Keras optimizers that users pass as they are; Keras itself is not imported."""

import inspect
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeGuard

_PACKAGES: Final = ("keras", "tf_keras", "tensorflow")


class KerasOptimizer(Protocol):
    """An optimizer of Keras 3 or `tf_keras`, as `keras.optimizers.Adagrad(0.1)`."""

    def get_config(self) -> dict[str, Any]:
        """Returns the fields of the optimizer."""
        ...


def is_keras_optimizer(value: Any) -> TypeGuard[KerasOptimizer]:
    """Returns True for an optimizer of Keras, or of a class that inherits from one."""
    has_config = callable(getattr(value, "get_config", None))
    is_instance = has_config and not isinstance(value, type)
    return is_instance and any(map(_is_of_keras, inspect.getmro(type(value))))


def serialized_form(optimizer: KerasOptimizer) -> Mapping[str, Any]:
    """Returns class, module and fields of an optimizer, as Keras serializes them."""
    cls = type(optimizer)
    # A class of the user may have the name of Keras', and other formulas.
    name = cls.__name__ if _is_of_keras(cls) else f"{cls.__module__}.{cls.__qualname__}"
    return {
        "class_name": name,
        "module": cls.__module__,
        "config": optimizer.get_config(),
    }


def _is_of_keras(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _PACKAGES
