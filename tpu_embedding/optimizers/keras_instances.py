"""Keras optimizers that users pass as they are; Keras itself is not imported."""

import inspect
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
    classes = inspect.getmro(type(value))
    return is_instance and any(is_of_keras(cls.__module__) for cls in classes)


def keras_class_name(optimizer: KerasOptimizer) -> str:
    """Returns the class of an optimizer; with its module, if it is not Keras' own.

    A class of the user may have the name of Keras', and other formulas.
    """
    cls = type(optimizer)
    if is_of_keras(cls.__module__):
        return cls.__name__
    return f"{cls.__module__}.{cls.__qualname__}"


def is_of_keras(module: str) -> bool:
    """Returns True for the path of a module of Keras, `tf_keras` or TensorFlow."""
    return module.partition(".")[0] in _PACKAGES
