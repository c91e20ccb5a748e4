"""Tells XLA what plain JAX can't express, and replaces JAX's slow operations.

The comments say what XLA would do otherwise.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

T = TypeVar("T")

_VECTOR_STEPS: Final = ((52, 1), (40, 2), (32, 3), (24, 5))
"""Pairs: a minimum row length, and the operations per element that vectorize a copy."""

_LONGEST_UNROLLED_ROW: Final = 64
"""Length of the longest row whose copy XLA:CPU unrolls."""

_BLOCK: Final = 128
"""Numbers per block: the lanes of a TPU vector register."""

_UNROLL: Final = 8
"""Elements of each block that one iteration of the loop in `_scan` handles."""

_MAX_COMPARED: Final = 1024
"""Maximum array size for comparing all pairs of elements, instead of using blocks."""


def read_before_write(values: T) -> T:
    """Computes all values before any is used.

    Pass a table and the rows read from it, and write to the returned table.
    """
    # Otherwise XLA may write first, and copy the whole table to keep the old rows. In
    # loops, XLA:CPU would copy whole slot variables.
    return jax.lax.optimization_barrier(values)


def run_if(condition: Any, function: Callable[[T], T], carry: T) -> T:
    """Updates the carry in place if a condition holds.

    `function` must keep shapes and dtypes.
    """

    # XLA copies the operands of a conditional, so `jax.lax.cond` would copy whole
    # tables. A loop with at most one iteration doesn't copy them.
    def run_once(state: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.zeros((), bool), function(state[1])

    condition = jnp.asarray(condition, bool)
    return jax.lax.while_loop(lambda state: state[0], run_once, (condition, carry))[1]


def as_variables(values: T) -> T:
    """Hides constant values from XLA."""
    # XLA would fold them into the arithmetic, which then rounds differently, or remove
    # operations that have no effect with these values.
    return jax.lax.optimization_barrier(values)


def computed_apart(values: T) -> T:
    """Keeps values from being fused into their consumers."""
    # XLA:CPU fuses arithmetic with the copy, slice or scatter around it. The fused loop
    # runs on one core or without vector instructions. XLA:TPU aborts on some fusions of
    # gathers.
    return jax.lax.optimization_barrier(values)


def copied_in_vectors(rows: Shaped[Array, "rows *row"]) -> Shaped[Array, "rows *row"]:
    """Copies gathered rows in a loop that XLA:CPU vectorizes; no bit changes."""
    # XLA:CPU (jax 0.12) unrolls the copy of a row with up to 64 elements into scalar
    # loads and stores, so few row reads overlap. A loop with enough operations per
    # element is not unrolled. It takes a fifth of the time for 64 columns, and a third
    # for 32. Below 24 columns, it would be slower (`benchmarks/gather_speed.py`).
    is_word = rows.dtype in (jnp.float32, jnp.int32)
    length = rows.shape[1] if rows.ndim == 2 else 0
    if not is_word or length > _LONGEST_UNROLLED_ROW:
        return rows
    steps = next((steps for least, steps in _VECTOR_STEPS if length >= least), 0)
    int32 = jnp.iinfo(jnp.int32)

    def clamped(rows: Array) -> Array:
        # Clamping bits to the int32 range changes nothing. XLA keeps the clamps because
        # the bounds are hidden.
        low, high = as_variables((jnp.int32(int32.min), jnp.int32(int32.max)))
        words = jax.lax.bitcast_convert_type(rows, jnp.int32)
        for step in range(steps):
            words = jnp.minimum(words, high) if step % 2 else jnp.maximum(words, low)
        return jax.lax.bitcast_convert_type(words, rows.dtype)

    if steps == 0:
        return rows
    return jax.lax.platform_dependent(rows, cpu=clamped, default=lambda rows: rows)


def zeros_unless(
    is_row: Bool[Array, " rows"], rows: Float[Array, "rows dim"]
) -> Float[Array, "rows dim"]:
    """Replaces float32 rows with zeros where `is_row` is False."""

    def select(is_row: Array, rows: Array) -> Array:
        return jnp.where(is_row[:, None], rows, 0.0)

    def clear(is_row: Array, rows: Array) -> Array:
        # XLA:CPU selects element by element. One mask per row takes a tenth less time
        # in a sum of 20 rows.
        words = jax.lax.bitcast_convert_type(rows, jnp.int32)
        words &= jnp.where(is_row, jnp.int32(-1), jnp.int32(0))[:, None]
        return jax.lax.bitcast_convert_type(words, jnp.float32)

    return jax.lax.platform_dependent(is_row, rows, cpu=clear, default=select)


def running_sum(values: Array) -> Int[Array, " n"]:
    """Sums integers or bools to int32 like `jnp.cumsum`; compiles fast on TPUs."""
    # XLA:TPU takes 3 s to compile `jnp.cumsum` of 106,496 numbers, and 45 s for
    # 900,000. Working in blocks compiles faster, but a symbolic size has an unknown
    # number of blocks.
    if jax.export.is_symbolic_dim(values.shape[0]):
        return jnp.cumsum(values, dtype=jnp.int32)

    def scan(values: Array) -> Array:
        return _scan(values.astype(jnp.int32), jnp.add, 0)

    return jax.lax.platform_dependent(values, tpu=sum_in_blocks, default=scan)


def sum_in_blocks(values: Array) -> Int[Array, " n"]:
    """Does the work of `running_sum` on TPUs, with matrix products, not a scan."""
    num_values = values.shape[0]
    if num_values <= _MAX_COMPARED:
        values, positions = values.astype(jnp.int32), jnp.arange(num_values)
        terms = jnp.where(positions[None, :] < positions[:, None], values[None, :], 0)
        # The value is added last, because the recursive call below subtracts it again.
        return jnp.sum(terms, axis=1, dtype=jnp.int32) + values
    # Multiplying by a triangle of ones gives running sums within blocks. The products
    # compile in a second, and take as many cycles as `jnp.cumsum`.
    blocks = _in_blocks(values, 0)
    triangle = jnp.triu(jnp.ones((_BLOCK, _BLOCK), jnp.float32))

    def sums(terms: Array, dtype: Any) -> Array:
        # The default precision may be lower, which would round the terms.
        return jnp.dot(
            *(terms.astype(dtype), triangle.astype(dtype)),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ).astype(jnp.int32)

    if values.dtype == bool:  # 0 and 1 are exact in bfloat16; the sums are float32.
        within = sums(blocks, jnp.bfloat16)
    else:
        # A sum of 128 16-bit numbers is below 2**24, so it is exact in float32.
        blocks = blocks.astype(jnp.int32)
        low, high = blocks & 0xFFFF, jax.lax.shift_right_logical(blocks, 16)
        within = sums(low, jnp.float32) + (sums(high, jnp.float32) << 16)
    # A slice of the last lane of `within` would cost more than another sum.
    totals = jnp.sum(blocks, axis=1, dtype=jnp.int32)
    before = sum_in_blocks(totals) - totals
    return (before[:, None] + within).reshape(-1)[:num_values]


def value_of_range(
    numbers: Int[Array, " n"], starts: Sequence[int], values: Sequence[int]
) -> Int[Array, " n"]:
    """Finds the range that contains each number, and takes the range's value.

    Ranges are in ascending order, and each ends where the next one starts. Numbers
    before the first range get 0. The numbers are int32 or uint32, and the values must
    fit in the same type.

    Example:
      >>> value_of_range(jnp.arange(6), [0, 2, 5], [10, 7, 8]).tolist()
      [10, 10, 7, 7, 7, 8]
    """
    # Steps between values need int64: they can exceed the type of the numbers.
    first, value = (
        np.asarray(x, numbers.dtype).astype(np.int64) for x in (starts, values)
    )
    lengths, steps = np.diff(first), np.diff(value)
    is_regular = len({*lengths}) == len({*steps}) == 1
    # With repeated starts, the division would be by 0.
    if is_regular and lengths[0] > 0 and first[0] >= 0:
        # Equal ranges with equal steps need one division, not a sum over all ranges.
        begin, length, base, step = (
            x.astype(numbers.dtype) for x in (first[0], lengths[0], value[0], steps[0])
        )
        number = jnp.minimum((numbers - begin) // length, first.size - 1)
        return jnp.where(numbers < begin, 0, base + number * step)
    # Sum the steps up to each range, because TPUs gather single integers slowly.
    steps = np.diff(value, prepend=0).astype(numbers.dtype)
    is_reached = numbers[:, None] >= first.astype(numbers.dtype)[None, :]
    of_numbers = jnp.where(is_reached, steps[None, :], 0)
    return jnp.sum(of_numbers, axis=1, dtype=numbers.dtype)


def forward_fill(values: Int[Array, " n"]) -> Int[Array, " n"]:
    """Fills each negative number with the last non-negative one before it, or -1."""

    def scan(values: Array) -> Array:
        def last(before: Array, value: Array) -> Array:
            return _where_negative(value, before)

        return _scan(values, last, -1)

    values = jnp.maximum(values.astype(jnp.int32), -1)
    return jax.lax.platform_dependent(values, tpu=fill_by_shifts, default=scan)


def fill_by_shifts(values: Int[Array, " n"]) -> Int[Array, " n"]:
    """Does the work of `forward_fill` on TPUs, with shifts instead of a scan."""
    # A loop over the numbers in a block would take 10 times as many cycles.
    num_values = values.shape[0]
    if num_values <= _MAX_COMPARED:
        positions = jnp.arange(num_values)
        may_fill = (values >= 0)[None, :] & (positions[None, :] <= positions[:, None])
        source = jnp.max(
            jnp.where(may_fill, positions[None, :], -1), axis=1, initial=-1
        )
        # A TPU gathers single integers slowly, so masks pick the values.
        is_source = positions[None, :] == source[:, None]
        return jnp.max(jnp.where(is_source, values[None, :], -1), axis=1, initial=-1)
    within, distance = _in_blocks(values, -1), 1
    while distance < _BLOCK:
        pad = ((0, 0), (distance, 0))
        shifted = jnp.pad(within[:, :-distance], pad, constant_values=-1)
        # Each number is now filled from up to twice as far away.
        within, distance = _where_negative(within, shifted), 2 * distance
    # Numbers before a block's first value take the last value of earlier blocks.
    before = jnp.pad(fill_by_shifts(within[:, -1])[:-1], (1, 0), constant_values=-1)
    return _where_negative(within, before[:, None]).reshape(-1)[:num_values]


def _scan(
    values: Int[Array, " n"], combine: Callable[[Array, Array], Array], neutral: int
) -> Int[Array, " n"]:
    """Combines each number with all numbers before it."""
    num_values = values.shape[0]
    if num_values <= _BLOCK:
        return jax.lax.associative_scan(combine, values)

    def add(so_far: Array, terms: Array) -> tuple[Array, Array]:
        so_far = combine(so_far, terms)
        return so_far, so_far

    # One loop scans all blocks at once: blocks are columns, and each step takes a row.
    blocks = _in_blocks(values, neutral).T
    none = jnp.full_like(blocks[0], neutral)
    totals, within = jax.lax.scan(add, none, blocks, unroll=_UNROLL)
    before = _scan(totals, combine, neutral)[:-1]
    before = jnp.pad(before, (1, 0), constant_values=neutral)
    return combine(before[:, None], within.T).reshape(-1)[:num_values]


def _where_negative(values: Array, replacements: Array) -> Array:
    return jnp.where(values < 0, replacements, values)


def _in_blocks(values: Array, padding: int) -> Shaped[Array, "blocks 128"]:
    spare = -values.shape[0] % _BLOCK
    padded = jnp.pad(values, (0, spare), constant_values=padding)
    return padded.reshape(-1, _BLOCK)
