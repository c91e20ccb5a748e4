"""Optimizers by name, with their default hyper-parameters."""

import functools
from typing import Any

import optax

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.optimizers.checks import TABLE_EXAMPLE, way_to_rule
from tpu_embedding.optimizers.rules.adafactor import adafactor
from tpu_embedding.optimizers.rules.adagrad import (
    adagrad,
    adagrad_momentum,
    rowwise_adagrad,
)
from tpu_embedding.optimizers.rules.adam import adam
from tpu_embedding.optimizers.rules.bounded_adagrad import bounded_adagrad
from tpu_embedding.optimizers.rules.clippy import clippy_adagrad
from tpu_embedding.optimizers.rules.frequency import frequency_aware_adagrad
from tpu_embedding.optimizers.rules.ftrl import ftrl
from tpu_embedding.optimizers.rules.lion import lion
from tpu_embedding.optimizers.rules.momentum import momentum
from tpu_embedding.optimizers.rules.proximal import proximal_adagrad
from tpu_embedding.optimizers.rules.rmsprop import adadelta, rmsprop
from tpu_embedding.optimizers.rules.rowwise import (
    lamb,
    partial_rowwise_adam,
    partial_rowwise_lamb,
    rowwise_rmsprop,
)
from tpu_embedding.optimizers.rules.sgd import sgd
from tpu_embedding.optimizers.rules.yogi import online_yogi, proximal_yogi

_RECIPES = (
    sgd,
    momentum,
    adagrad,
    rowwise_adagrad,
    adagrad_momentum,
    proximal_adagrad,
    adam,
    ftrl,
    rmsprop,
    adadelta,
    lion,
    adafactor,
    clippy_adagrad,
    bounded_adagrad,
    frequency_aware_adagrad,
    proximal_yogi,
    online_yogi,
    lamb,
    partial_rowwise_adam,
    partial_rowwise_lamb,
    rowwise_rmsprop,
)
_BY_NAME = {recipe.__name__: recipe for recipe in _RECIPES}


def optimizer_by_name(name: str) -> optax.GradientTransformation:
    """Returns a rule of this package with its default hyper-parameters.

    Args:
      name: the name of its function, as `"sgd"` or `"adagrad"`, in any letter case.

    Returns:
      The rule. Calls with one name return the same value, so tables that name the same
      optimizer are stacked.

    Raises:
      ValueError: if no rule has that name.

    Example:
      >>> optimizer_by_name("adagrad") is optimizer_by_name("adagrad")
      True
    """
    if name.lower() not in _BY_NAME:
        raise ValueError(
            f"optimizer must be one of {sorted(_BY_NAME)}, got {name!r}; or give an "
            "optax transformation."
        )
    return _default(name.lower())


@functools.cache
def _default(name: str) -> optax.GradientTransformation:
    return _BY_NAME[name]()


def optimizer_problem(field: str, optimizer: Any, owner: str = "") -> str | None:
    """Says why a table or layer cannot take an optimizer; returns None if it can.

    Args:
      field: the argument that holds it.
      optimizer: the value that the user gives.
      owner: text that names the table, to follow the value, as `" for table 'movie'"`.
    """
    if optimizer is None or isinstance(optimizer, optax.GradientTransformation):
        return None
    if isinstance(optimizer, str) and optimizer.lower() in _BY_NAME:
        return None
    wanted = f"an optax GradientTransformation such as {TABLE_EXAMPLE}, None"
    if isinstance(optimizer, str):
        return (
            f"{field} must be {wanted}, or one of the names {sorted(_BY_NAME)}, got "
            f"{optimizer!r}{owner}"
        )
    return (
        f"{field} must be {wanted}, or a name such as 'adagrad', got "
        f"{describe_value(optimizer)}{owner}; {way_to_rule(optimizer)}"
    )
