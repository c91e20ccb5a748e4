"""Optimizers by name, with their default hyper-parameters."""

from typing import Any, cast

import optax

from tpu_embedding.optimizers.checks import check_rule
from tpu_embedding.optimizers.keras import from_keras_config
from tpu_embedding.optimizers.options import OPTIMIZERS
from tpu_embedding.optimizers.row_optimizer import TableOptimizer, is_keras_optimizer


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
    # The package has imported all rules before anybody asks.
    if name.lower() not in OPTIMIZERS:
        raise ValueError(
            f"optimizer must be one of {sorted(OPTIMIZERS)}, got {name!r}; or give an "
            "optax transformation."
        )
    return OPTIMIZERS[name.lower()]()


def text_of_name(optimizer: TableOptimizer) -> str:
    """Returns the name of an optimizer and its learning rate; "" for any other one.

    Example:
      >>> text_of_name("Adagrad")
      "'adagrad', at its default learning rate of 0.001"
    """
    if not isinstance(optimizer, str):
        return ""
    (rate,) = OPTIMIZERS[optimizer.lower()].args
    return f"{optimizer.lower()!r}, at its default learning rate of {rate}"


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
