"""Initial table values, and the random bits they are made from.

An initializer is a function `(key, shape, dtype)`, as in JAX. The initializers here are
also *row initializers*: each device computes only its own rows, block by block, and
needs no memory for the whole table. Any other function runs once for the whole table,
unless `rowwise` makes it a row initializer.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from tpu_embedding.argument_checks import (
    Rule,
    broken_rules,
    convert_ints,
    invalid,
    is_finite,
    is_int,
    raise_all,
)

_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY: Final = 0x1BD11BDA
"""Constant of the key schedule. Source: Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011."""


def key_words(key: jax.Array) -> UInt32[Array, " 2"]:
    """Makes the two words of a Threefry key from any typed or raw key."""
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if is_typed else key
    words = jnp.pad(data.reshape(-1), (0, data.size % 2)).reshape(-1, 2)
    first, second = words[0]
    # Longer keys, such as the four words of `rbg`, are hashed, so every word counts.
    for low, high in words[1:]:
        first, second = threefry(first, second, low, high)
    return jnp.stack([first, second])


@functools.partial(jax.jit, static_argnames="dim")
def row_bits(
    key: jax.Array, row_ids: Int[Array, " rows"], dim: int
) -> UInt32[Array, "rows dim"]:
    """Draws 32 random bits for each element of the given rows.

    Args:
      key: random key for the table.
      row_ids: table rows, at least 0.
      dim: column count. Tables with different `dim` have different bits.

    Example:
      >>> key = jax.random.key(0)
      >>> two_rows = row_bits(key, jnp.array([7, 3]), 4)
      >>> bool(jnp.all(two_rows[0] == row_bits(key, jnp.array([7]), 4)[0]))
      True
    """
    # The bits depend only on key, row, column and `dim`. `jax.random` numbers the
    # elements of the whole array, so a device that owns every eighth row would have to
    # compute the bits of all rows.
    first, second = key_words(key)
    half = -(-dim // 2)
    rows = jax.lax.broadcast_in_dim(
        row_ids.astype(jnp.uint32), (row_ids.shape[0], half), (0,)
    )
    columns = jax.lax.broadcasted_iota(jnp.uint32, rows.shape, 1)
    # A block of the generator has two words: one for the left half of the columns,
    # and one for the right half.
    return jnp.concatenate(threefry(first, second, rows, columns), axis=1)[:, :dim]


def threefry(
    first_key: UInt32[Array, ""],
    second_key: UInt32[Array, ""],
    first: UInt32[Array, "*shape"],
    second: UInt32[Array, "*shape"],
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """Encrypts word pairs with Threefry-2x32 in 20 rounds, as `jax.random` does."""
    # All operations are on integers, so the bits are the same on every platform.
    keys = (first_key, second_key, first_key ^ second_key ^ jnp.uint32(_PARITY))
    first, second = first + keys[0], second + keys[1]
    # This Python loop is unrolled, so that XLA fuses the rounds. On CPUs, `jax.random`
    # uses an XLA loop, which writes the result of each round to memory.
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            first = first + second
            left = second << jnp.uint32(rotation)
            second = first ^ (left | (second >> jnp.uint32(32 - rotation)))
        first = first + keys[(i + 1) % 3]
        second = second + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return first, second


__all__ = [
    "RowIdInitializer",
    "RowInitializer",
    "constant",
    "normal",
    "row_bits",
    "rowwise",
    "truncated_normal",
    "uniform",
]

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

RowFunction = Callable[..., jax.Array]
"""Function `(key, row_ids, dim, *parameters) -> float32 [rows, dim]`."""


def _is_parameter(value: Any) -> bool:
    return is_finite(value) and (not is_int(value) or -(2**31) <= value < 2**31)


_ROW_INITIALIZER_RULES: Final = {
    "function": Rule(callable, "a function (key, row_ids, dim, *parameters)"),
    "parameters": Rule(
        lambda x: isinstance(x, tuple) and all(map(_is_parameter, x)),
        "a tuple of finite floats and 32-bit ints",
        "write large numbers as floats",
    ),
}


@dataclasses.dataclass(frozen=True)
class RowInitializer:
    """An initializer whose rows can be computed independently.

    Tables in a stack share one compiled program if their functions are equal. The
    program takes the parameters as data.

    Attributes:
      function: takes `(key, row_ids, dim, *parameters)` and returns float32
        `[rows, dim]`. `key` is the table's own Threefry key. `row_ids` is int32
        `[rows]`, with any rows in any order. Row `i` of the result may depend only on
        the key, `row_ids[i]` and the parameters. Call `row_bits` for random bits.
      parameters: 32-bit ints and floats, passed as int32 and float32 scalars.

    Example:
      >>> def ramp_rows(key, row_ids, dim, slope):
      ...     return jnp.tile(slope * row_ids[:, None].astype(jnp.float32), (1, dim))
      >>> ramp = RowInitializer(ramp_rows, (0.5,))
      >>> ramp(jax.random.key(0), (3, 2), jnp.float32).tolist()
      [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    """

    function: RowFunction
    parameters: tuple[int | float, ...] = ()

    def __post_init__(self):
        convert_ints(self, "parameters")
        raise_all(broken_rules(self, _ROW_INITIALIZER_RULES))

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"RowInitializer({name}, {self.parameters!r})"

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Computes a whole table, shaped `(vocabulary_size, dim)`."""
        row_ids = jnp.arange(shape[0], dtype=jnp.int32)
        rows = self.function(threefry_key(key), row_ids, shape[1], *self.scalars)
        return rows.astype(dtype)

    @property
    def scalars(self) -> tuple[np.generic, ...]:
        """The parameters as 32-bit scalars."""
        return tuple(
            np.int32(p) if is_int(p) else np.float32(p) for p in self.parameters
        )


def threefry_key(key: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(key_words(key), impl="threefry2x32")


def constant(value: float) -> RowInitializer:
    """Initializes every element to one value.

    Example:
      >>> constant(2)(jax.random.key(0), (1, 3), jnp.float32).tolist()
      [[2.0, 2.0, 2.0]]
    """
    _check_numbers("constant", value=value)
    return RowInitializer(_constant_rows, (float(value),))


def uniform(low: float = -0.05, high: float = 0.05) -> RowInitializer:
    """Draws uniform values from `low` to `high`.

    Args:
      low: smallest value. Both defaults come from `RandomUniform` in Keras.
      high: largest value, at least `low`.

    Example:
      >>> values = uniform(-1.0, 1.0)(jax.random.key(0), (100, 8), jnp.float32)
      >>> bool(jnp.all(jnp.abs(values) <= 1))
      True
    """
    _check_numbers("uniform", low=low, high=high)
    if low > high:
        raise invalid("uniform: low", f"be at most high, {high}", low)
    return RowInitializer(_uniform_rows, (float(low), float(high)))


def normal(stddev: float = 0.05, mean: float = 0.0) -> RowInitializer:
    """Draws normally distributed values.

    Args:
      stddev: standard deviation, at least 0. The default comes from `RandomNormal` in
        Keras; `jax.nn.initializers.normal` defaults to 0.01.
      mean: the mean.

    Example:
      >>> normal(0.1)(jax.random.key(0), (100, 8), jnp.float32).shape
      (100, 8)
    """
    _check_deviation("normal", stddev, mean)
    return RowInitializer(_normal_rows, (float(stddev), float(mean)))


def truncated_normal(stddev: float = 0.05, mean: float = 0.0) -> RowInitializer:
    """Draws normal values within two standard deviations.

    Args:
      stddev: standard deviation before truncation, at least 0, as in TensorFlow and
        JAX. Truncation reduces it to 0.88 times this value.
      mean: the mean.

    Example:
      >>> values = truncated_normal(0.5)(jax.random.key(0), (100, 8), jnp.float32)
      >>> bool(jnp.all(jnp.abs(values) <= 1))
      True
    """
    _check_deviation("truncated_normal", stddev, mean)
    return RowInitializer(_truncated_normal_rows, (float(stddev), float(mean)))


def rowwise(initializer: Initializer) -> RowInitializer:
    """Calls another library's initializer for each row.

    Use it if your initializer's rows are independent: then no device needs memory for
    the whole table. However, each row gets its own key, so the values differ from a
    single call for the whole table.

    Args:
      initializer: `(key, shape, dtype)`, called with the shape `(1, dim)`. Its values
        must not depend on the row count. For example, only the mode `"fan_out"` of
        `jax.nn.initializers.variance_scaling` is suitable.

    Example:
      >>> spread = rowwise(jax.nn.initializers.uniform(0.1))
      >>> spread(jax.random.key(0), (5, 4), jnp.float32).shape
      (5, 4)
    """
    if not callable(initializer) or not takes_key(initializer):
        rule = "be a function (key, shape, dtype)"
        raise invalid("rowwise: initializer", rule, initializer, kind=TypeError)
    return RowInitializer(_EachRow(initializer))


@dataclasses.dataclass(frozen=True)
class _EachRow:
    # A dataclass instead of a closure: equal functions share a compiled program.
    initializer: Initializer

    def __call__(
        self, key: jax.Array, row_ids: Int[Array, " rows"], dim: int
    ) -> jax.Array:
        def row(row_id):
            key_of_row = jax.random.fold_in(key, row_id)
            values = self.initializer(key_of_row, (1, dim), jnp.float32)
            return jnp.asarray(values)

        return jax.vmap(row)(row_ids).reshape(-1, dim)


def RowIdInitializer(offset: int = 0) -> RowInitializer:  # noqa: N802
    """Sets row `i` to `offset + i`, as in TensorFlow.

    Use it to check your lookups and checkpoints. float32 holds row ids up to 2**24
    exactly.

    Args:
      offset: value of row 0, a 32-bit int.

    Example:
      >>> key = jax.random.key(0)
      >>> RowIdInitializer(10)(key, (3, 2), jnp.float32).tolist()
      [[10.0, 10.0], [11.0, 11.0], [12.0, 12.0]]
    """
    if not is_int(offset) or not _is_parameter(offset):
        fix = "Pass the value of row 0."
        raise invalid("RowIdInitializer.offset", "be a 32-bit int", offset, fix)
    return RowInitializer(_row_id_rows, (int(offset),))


_CONSTANTS: Final = {jax.nn.initializers.zeros: 0.0, jax.nn.initializers.ones: 1.0}
"""JAX initializers that are recognized by identity, with the value that they set."""


def row_initializer(initializer: Initializer | None, dim: int) -> RowInitializer | None:
    """Finds the row initializer, or None if `initializer` needs the whole table."""
    if initializer is None:
        # TensorFlow's default. Its `stddev` is also the deviation before truncation.
        return truncated_normal(1.0 / math.sqrt(dim))
    if isinstance(initializer, RowInitializer):
        return initializer
    for known, value in _CONSTANTS.items():
        if initializer is known:
            return constant(value)
    return None


def starts_any_row(initializer: Initializer) -> bool:
    """Checks that the initial values suit any row, whatever its number."""
    of_rows = row_initializer(initializer, 1)
    return of_rows is not None and of_rows.function is not _row_id_rows


def takes_key(initializer: Callable[..., Any]) -> bool:
    """Checks that an initializer takes a key, unlike TensorFlow's initializers."""
    try:
        signature = inspect.signature(initializer)
    except (TypeError, ValueError):
        return True  # Some compiled functions have no signature.
    try:
        signature.bind("key", "shape", "dtype")
    except TypeError:
        return False
    # An initializer `(shape, dtype, ...)` with a third argument also binds.
    return next(iter(signature.parameters)) != "shape"


def _constant_rows(
    key: jax.Array, row_ids: Int[Array, " rows"], dim: int, value: jax.Array
) -> Float[Array, "rows dim"]:
    del key
    return jnp.full((row_ids.shape[0], dim), value, jnp.float32)


def _uniform_rows(
    key: jax.Array, row_ids: Int[Array, " rows"], dim: int, low: Array, high: Array
) -> Float[Array, "rows dim"]:
    # Halve each bound first, because `high - low` may overflow float32.
    middle, half_width = 0.5 * low + 0.5 * high, 0.5 * high - 0.5 * low
    numbers = _random_numbers(key, row_ids, dim)
    # Rounding could produce a value outside of the range.
    return jnp.clip(middle + half_width * numbers, low, high)


def _normal_rows(
    key: jax.Array, row_ids: Int[Array, " rows"], dim: int, stddev: Array, mean: Array
) -> Float[Array, "rows dim"]:
    values = jax.lax.erf_inv(_random_numbers(key, row_ids, dim))
    return mean + stddev * (math.sqrt(2) * values)


def _truncated_normal_rows(
    key: jax.Array, row_ids: Int[Array, " rows"], dim: int, stddev: Array, mean: Array
) -> Float[Array, "rows dim"]:
    # A normal value is within two deviations with this probability.
    probability = math.erf(2 / math.sqrt(2))
    values = jax.lax.erf_inv(probability * _random_numbers(key, row_ids, dim))
    return mean + stddev * jnp.clip(math.sqrt(2) * values, -2.0, 2.0)


def _row_id_rows(
    key: jax.Array, row_ids: Int[Array, " rows"], dim: int, offset: jax.Array
) -> Float[Array, "rows dim"]:
    del key
    sums = row_ids + offset
    # The int32 sum is exact, but sums from 2**31 wrap around.
    wraps = (offset > 0) & (sums < row_ids)
    rounded = row_ids.astype(jnp.float32) + offset.astype(jnp.float32)
    rows = jnp.where(wraps, rounded, sums.astype(jnp.float32))
    return jax.lax.broadcast_in_dim(rows, (row_ids.shape[0], dim), (0,))


def _random_numbers(
    key: jax.Array, row_ids: Int[Array, " rows"], dim: int
) -> Float[Array, "rows dim"]:
    """Draws odd multiples of 2**-24 between -1 and 1."""
    # The values -1 and 1, where `erf_inv` is infinite, can't occur. Every operation is
    # exact, so the numbers are the same on every platform. The bits become int32 first,
    # because TPUs can't convert unsigned integers to floats.
    odd = 2 * (row_bits(key, row_ids, dim) >> 8).astype(jnp.int32) - (2**24 - 1)
    return odd.astype(jnp.float32) * 2.0**-24


def _check_deviation(name: str, stddev: float, mean: float) -> None:
    _check_numbers(name, stddev=stddev, mean=mean)
    if stddev < 0:
        raise invalid(f"{name}: stddev", "be at least 0", stddev)


def _check_numbers(name: str, **values: Any) -> None:
    for field, value in values.items():
        if not is_finite(value):
            raise invalid(f"{name}: {field}", "be a finite number", value)
