"""Idioms that say to XLA what JAX alone cannot, each with its reason."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

T = TypeVar("T")


def read_before_write(values: T) -> T:
    """Returns the values, all of which are computed before one is used.

    Give it a table and the rows that were read of it, and write to the table that it
    returns. Otherwise XLA may write first, and keep the old rows in a copy of the whole
    table. Under an update in a loop, XLA:CPU copies whole slot variables.

    Args:
      values: pytree of arrays.
    """
    return jax.lax.optimization_barrier(values)


def run_if(condition: Any, function: Callable[[T], T], carry: T) -> T:
    """Returns `function(carry)` if a condition holds, else the carry as it is.

    It is a loop of at most one turn, which updates the carry in place. XLA copies the
    operands of a conditional, so `jax.lax.cond` would copy whole tables.

    Args:
      condition: bool scalar.
      function: takes and returns pytrees of the same shapes and dtypes.
      carry: pytree of arrays.
    """

    def run_once(state: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.zeros((), bool), function(state[1])

    condition = jnp.asarray(condition, bool)
    return jax.lax.while_loop(lambda state: state[0], run_once, (condition, carry))[1]


def as_variables(values: T) -> T:
    """Returns constants whose values XLA does not know.

    Otherwise XLA folds them into the arithmetic: it rounds differently than with
    variables, or removes operations that it finds to do nothing.

    Args:
      values: pytree of arrays.
    """
    return jax.lax.optimization_barrier(values)


def computed_apart(values: T) -> T:
    """Returns the values, computed by operations of their own.

    XLA:CPU fuses arithmetic with the copy, slice or scatter around it. The fused loop
    runs on one core, or without vectors. XLA:TPU aborts on some fusions of gathers.

    Args:
      values: pytree of arrays.
    """
    return jax.lax.optimization_barrier(values)
