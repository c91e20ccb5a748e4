"""Idioms that say to XLA what JAX alone cannot, each with its reason.

The last functions compute what JAX also has, in forms that suit a TPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

T = TypeVar("T")

_BLOCK: Final = 128
"""Numbers of a block: the lanes of a TPU's vector register."""

_UNROLL: Final = 8
"""Numbers of each block that one iteration of the loop adds."""


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


def running_sum(values: Array) -> Int[Array, " n"]:
    """Returns `jnp.cumsum(values)` of integers or bools `[n]`, as int32.

    XLA:TPU takes 10 to 40 s to compile `jnp.cumsum` of 900,000 numbers. This one takes
    1 s. It sums within blocks first, all blocks at once, and then over the blocks. A
    symbolic size, which a program for serving has, cannot be cut into blocks.
    """
    if jax.export.is_symbolic_dim(values.shape[0]):
        return jnp.cumsum(values, dtype=jnp.int32)
    return _scan(values.astype(jnp.int32), jnp.add, 0)


def value_of_range(
    numbers: Int[Array, " n"], starts: Sequence[int], values: Sequence[int]
) -> Int[Array, " n"]:
    """Returns the value of the range that each number is in.

    A range ends where the next one starts. The result is a sum of the steps from value
    to value: a TPU gathers single integers slowly.

    Args:
      numbers: int32 or uint32.
      starts: first number of each range, rising. A number before the first gets 0.
      values: value of each range, in the type of the numbers.

    Example:
      >>> value_of_range(jnp.arange(6), [0, 2, 5], [10, 7, 8]).tolist()
      [10, 10, 7, 7, 7, 8]
    """
    dtype = numbers.dtype
    steps = np.diff(np.asarray(values, dtype), prepend=dtype.type(0))
    is_reached = numbers[:, None] >= np.asarray(starts, dtype)[None, :]
    return jnp.sum(jnp.where(is_reached, steps[None, :], 0), axis=1, dtype=dtype)


def forward_fill(values: Int[Array, " n"]) -> Int[Array, " n"]:
    """Replaces each negative number by the last number before it that is not negative.

    Negative numbers at the beginning become -1. The result is int32.
    """
    return _scan(
        values.astype(jnp.int32),
        lambda before, value: jnp.where(value < 0, before, value),
        -1,
    )


def _scan(
    values: Int[Array, " n"], combine: Callable[[Array, Array], Array], neutral: int
) -> Int[Array, " n"]:
    """Combines each number with all numbers before it.

    Args:
      values: the numbers.
      combine: an associative function.
      neutral: neutral element of the operation.
    """
    num_values = values.shape[0]
    if num_values <= _BLOCK:
        return jax.lax.associative_scan(combine, combine(jnp.int32(neutral), values))
    num_blocks = -(-num_values // _BLOCK)
    padded = jnp.pad(
        values, (0, num_blocks * _BLOCK - num_values), constant_values=neutral
    )

    def add(so_far, terms):
        so_far = combine(so_far, terms)
        return so_far, so_far

    totals, within = jax.lax.scan(
        add,
        jnp.full((num_blocks,), neutral, jnp.int32),
        padded.reshape(num_blocks, _BLOCK).T,
        unroll=_UNROLL,
    )
    block_results = _scan(totals, combine, neutral)
    before = jnp.pad(block_results[:-1], (1, 0), constant_values=neutral)
    return combine(before[:, None], within.T).reshape(-1)[:num_values]
