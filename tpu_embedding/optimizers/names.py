"""Optimizers by name, with their default hyper-parameters."""

from collections.abc import Callable
from typing import Any, cast

import optax

from tpu_embedding.optimizers.checks import check_rule
from tpu_embedding.optimizers.keras import from_keras_config
from tpu_embedding.optimizers.keras_instances import is_keras_optimizer
from tpu_embedding.optimizers.options import OPTIMIZERS
from tpu_embedding.optimizers.row_optimizer import TableOptimizer
from tpu_embedding.optimizers.rules.adafactor import adafactor


def optimizer_by_name(name: str) -> optax.GradientTransformation:
    """Returns a rule of this package with its default hyper-parameters.

    Args:
      name: the name of its function, as `"sgd"` or `"adagrad"`, in any letter case.

    Returns:
      The rule. Calls with one name return the same value.

    Raises:
      ValueError: if no rule has that name.

    Example:
      >>> optimizer_by_name("adagrad") is optimizer_by_name("adagrad")
      True
    """
    if name.lower() not in known_optimizers():
        raise ValueError(
            f"optimizer must be one of {sorted(known_optimizers())}, got {name!r}; or "
            "give an optax transformation."
        )
    return known_optimizers()[name.lower()]()


def known_optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Returns the functions that have a default for each argument, by name."""
    # The package has imported all rules before anybody asks.
    return {**OPTIMIZERS, "adafactor": adafactor}


def transformation_of(optimizer: TableOptimizer) -> optax.GradientTransformation:
    """Returns the rule of a table's optimizer: a name or a Keras optimizer has one.

    Raises:
      ValueError: if no rule has the name, or the Keras optimizer has no equivalent.
    """
    if isinstance(optimizer, str):
        return optimizer_by_name(optimizer)
    if is_keras_optimizer(optimizer):
        return from_keras_config(optimizer)
    return cast(optax.GradientTransformation, optimizer)


def optimizer_problem(field: str, optimizer: Any, owner: str = "") -> str | None:
    """Says why a table or layer cannot take an optimizer; returns None if it can.

    Args:
      field: the argument that holds it.
      optimizer: the value that the user gives.
      owner: text that names the table, as `" for table 'movie'"`.
    """
    try:
        if optimizer is not None:
            check_rule(None, transformation_of(optimizer), "optimizer")
    except (TypeError, ValueError) as error:
        return f"{field}{owner}: {str(error).rstrip('.')}"
    return None
