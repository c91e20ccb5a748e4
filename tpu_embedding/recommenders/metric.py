"""The base of all metrics: exact sums that you can update with batches, and merge.

A metric is a pytree of sums, so it passes through `jit`, `scan` and `psum`. A float32
total would ignore every sample after the first 17 million, because 2^24 + 1 rounds to
2^24. A `Sum` therefore keeps each rounding error in a second float32.
"""

import dataclasses
from typing import Any, Final, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from tpu_embedding.argument_checks import describe_value, invalid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum:
    """An array of totals, each kept as the sum `high + low` of two float32 values.

    Integer sums are exact up to 2^46, in any order. If all values have the same sign,
    other sums have a relative error of at most 2^-44. Note that `jax.lax.psum` over
    devices rounds `high` once, to float32. Additions before and after `psum` stay
    exact.

    Attributes:
      high: float32, the total rounded to float32.
      low: float32, the remainder.

    Example:
      >>> total = Sum.zeros().add(Sum.of(jnp.float32(3)))
      >>> float(total.value())
      3.0
    """

    high: Array
    low: Array

    @classmethod
    def of(cls, values: Float[Array, "*shape"]) -> "Sum":
        """Wraps float32 values as totals."""
        return cls(high=values, low=jnp.zeros_like(values))

    @classmethod
    def zeros(cls, shape: tuple[int, ...] = ()) -> "Sum":
        """Makes totals of zero."""
        return cls.of(jnp.zeros(shape, jnp.float32))

    def add(self, other: "Sum") -> "Sum":
        """Adds two arrays of totals with the same shape.

        The rounding error of `high + high` is itself a float32. The formula is from
        Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B.

        Example:
          >>> big, one = Sum.of(jnp.float32(2**24)), Sum.of(jnp.float32(1))
          >>> float(big.high + one.high), float(big.add(one).add(one).value())
          (16777216.0, 16777218.0)
        """
        total = self.high + other.high
        added = total - self.high
        error = (self.high - (total - added)) + (other.high - added)
        low = error + (self.low + other.low)
        # The formula would turn an infinite total into NaN.
        low = jnp.where(jnp.isfinite(total), low, 0.0)
        high = total + low
        rest = jnp.where(jnp.isfinite(high), low - (high - total), 0.0)
        return Sum(high=high, low=rest)

    def value(self) -> Float[Array, "*shape"]:
        """Rounds the totals to float32."""
        return self.high + self.low

    def running(self) -> "Sum":
        """Makes a vector's running total, in which each entry includes itself."""
        size = self.high.size

        def add_earlier(level: Any, totals: "Sum") -> "Sum":
            # To shift the vector by `2**level`, slice a padded copy. JAX can't pad by a
            # traced amount.
            start = size - (1 << level)
            earlier = [
                jax.lax.dynamic_slice_in_dim(jnp.pad(x, (size, 0)), start, size)
                for x in (totals.high, totals.low)
            ]
            return totals.add(Sum(high=earlier[0], low=earlier[1]))

        # jax.lax.associative_scan takes seconds to compile.
        return jax.lax.fori_loop(0, (size - 1).bit_length(), add_earlier, self)

    def total(self) -> "Sum":
        """Sums over the first axis."""

        def add(total: Any, other: Any) -> tuple[Array, Array]:
            (high, low), (other_high, other_low) = total, other
            both = Sum(high=high, low=low).add(Sum(high=other_high, low=other_low))
            return both.high, both.low

        zero = jnp.float32(0)
        high, low = jax.lax.reduce((self.high, self.low), (zero, zero), add, (0,))
        return Sum(high=high, low=low)


Nest = TypeVar("Nest")


class Metric:
    """Base class for metrics: frozen dataclasses with sums and static settings.

    `from_batch` makes a metric from a batch, `merge` adds two metrics, and `compute`
    returns the value. You may order and group samples as you like, which changes only
    the rounding.

    Example:
      >>> from tpu_embedding.metrics import MAE
      >>> metric = MAE.empty().update([1.0, 2.0], [1.0, 4.0]).update([3.0], [3.5])
      >>> isinstance(metric, Metric), round(float(metric.compute()), 4)
      (True, 0.8333)
    """

    @classmethod
    def empty(cls, **settings: Any) -> Self:
        """Makes a metric with these settings, but without samples."""
        return cls(**settings)

    @classmethod
    def from_batch(cls, *batch: Any, **settings: Any) -> Self:
        """Makes the metric from one batch. Each class defines what a batch is."""
        raise NotImplementedError(f"{cls.__name__} has no from_batch")

    def update(self, *batch: Any, **inputs: Any) -> Self:
        """Adds a batch, and returns the new metric.

        Args:
          *batch: arguments for `from_batch`.
          **inputs: keyword arguments for `from_batch`, except settings, which stay the
            same.
        """
        return self.merge(self.from_batch(*batch, **inputs, **self._settings()))

    def merge(self, other: Self) -> Self:
        """Combines the samples in both metrics.

        Raises:
          ValueError: if the two metrics differ in their class or settings.
        """
        return merge(self, other)

    def is_defined(self) -> Bool[Array, ""]:
        """Tells if the samples determine a value; see each class."""
        raise NotImplementedError(f"{type(self).__name__} has no is_defined")

    def compute(self) -> Float[Array, ""]:
        """Computes the value, a float32 scalar, or NaN if it is not defined."""
        return _value_of(self)

    def _compute(self) -> Float[Array, ""]:
        """Computes the value, or any number if the metric is not defined."""
        raise NotImplementedError(f"{type(self).__name__} has no _compute")

    def _settings(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # pyright: ignore
            if field.metadata.get("static")
        }


# Compiles once for each class and its settings, even if `compute` is called eagerly.
@jax.jit
def _value_of(metric: Metric) -> Float[Array, ""]:
    return jnp.where(metric.is_defined(), metric._compute(), jnp.nan)


def merge(metrics: Nest, others: Nest) -> Nest:
    """Merges two nests of metrics with equal structure, such as dicts.

    Example:
      >>> from tpu_embedding.metrics import MAE
      >>> first, second = MAE.from_batch([1.0], [2.0]), MAE.from_batch([4.0], [4.0])
      >>> float(merge({"mae": first}, {"mae": second})["mae"].compute())
      0.5
    """
    # Settings are part of a metric's pytree structure, so unequal settings raise below.
    is_sum = lambda value: isinstance(value, Sum)  # noqa: E731
    try:
        return jax.tree.map(Sum.add, metrics, others, is_leaf=is_sum)
    except ValueError as error:
        raise ValueError(
            "merge needs two nests of the same metrics with equal settings, got "
            f"{describe_value(metrics)} and {describe_value(others)}."
        ) from error


def compute(metrics: Any) -> Any:
    """Computes all metrics in a nest, as float32 scalars.

    Example:
      >>> from tpu_embedding.metrics import MAE
      >>> compute({"mae": MAE.from_batch([1.0, 2.0], [1.0, 4.0])})
      {'mae': Array(1., dtype=float32)}
    """
    is_metric = lambda value: isinstance(value, Metric)  # noqa: E731
    return jax.tree.map(lambda metric: metric.compute(), metrics, is_leaf=is_metric)


def check_batch(owner: str, **arrays: ArrayLike | None) -> list[Float[Array, "*shape"]]:
    """Converts a batch to float32, and replaces None with ones."""
    converted = {
        name: as_float32(array) for name, array in arrays.items() if array is not None
    }
    (first, values), *others = converted.items()
    for name, array in others:
        # JAX would silently broadcast `[batch]` with `[batch, 1]`.
        if array.shape != values.shape:
            rule = f"have the shape of {first}, {list(values.shape)}"
            raise invalid(f"{owner}: {name}", rule, list(array.shape))
    return [converted.get(name, jnp.ones(values.shape, jnp.float32)) for name in arrays]


def as_float32(values: ArrayLike) -> Float[Array, "*shape"]:
    if is_on_device(values):
        return jnp.asarray(values).astype(jnp.float32)
    # `jnp.asarray` alone would truncate 64-bit integers before the cast.
    return jnp.asarray(np.asarray(values).astype(np.float32))


def is_on_device(values: Any) -> bool:
    """Tells if a value is or contains a JAX array."""
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(values))


def check_clicks(
    owner: str, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None
) -> list[Float[Array, "*shape"]]:
    """Checks a click batch, and converts it to float32."""
    batch = check_batch(owner, logits=logits, labels=labels, weights=weights)
    # Device arrays are not checked, because the host would have to wait for them.
    if is_on_device((labels, weights)):
        return batch
    # Labels with weight 0 may be padding, which may have any value.
    used = np.asarray(labels, np.float32)
    used = used if weights is None else used[np.asarray(weights) != 0]
    is_wrong = (used < 0) | (used > 1)
    if is_wrong.any():
        rule = f"be in [0, 1], but {int(is_wrong.sum())} labels are not"
        fix = "The order of arguments is from_batch(logits, labels, weights)."
        raise invalid(f"{owner}: labels", rule, float(used[is_wrong][0]), fix)
    return batch


def weighted(
    values: Float[Array, "*shape"], weights: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    # Samples with weight 0, such as padding, may have infinite or NaN values.
    return jnp.where(weights == 0, 0.0, weights * values)


def total_of(values: Float[Array, "*shape"], weights: Float[Array, "*shape"]) -> Sum:
    # Only totals across batches are exact. Within a batch, XLA sums in float32.
    return Sum.of(jnp.sum(weighted(values, weights)))


_MOST_BITS: Final = {"i": 16, "u": 16, "f": 32}
"""For each NumPy kind, bits in the widest dtype that float32 represents exactly.

Other kinds, such as bool and bfloat16 (kind "V"), always fit."""


def float32_in_order(values: ArrayLike) -> Float[Array, "*shape"]:
    """Converts values to float32, in the same order along the last axis.

    Equal values stay equal, and NaN stays NaN. If float32 could round values of this
    dtype, each value becomes its rank among the distinct values, counted from 0.

    Example:
      >>> float32_in_order(np.array([1_700_000_001, 5, 1_700_000_003])).tolist()
      [1.0, 0.0, 2.0]
    """
    # On the host, NumPy keeps all bits of 64-bit values, which JAX would truncate.
    xp: Any = jnp if is_on_device(values) else np
    values = xp.asarray(values)
    dtype = values.dtype
    if values.ndim == 0 or 8 * dtype.itemsize <= _MOST_BITS.get(dtype.kind, 64):
        return as_float32(values)
    order = xp.argsort(values, axis=-1)
    ordered = xp.take_along_axis(values, order, axis=-1)
    is_new = ordered[..., 1:] != ordered[..., :-1]
    is_new = xp.concatenate([xp.zeros_like(ordered[..., :1], bool), is_new], axis=-1)
    ranks = xp.cumsum(is_new, axis=-1, dtype=xp.int32)
    ranks = xp.take_along_axis(ranks, xp.argsort(order, axis=-1), axis=-1)
    ranks = xp.where(values == values, ranks.astype(xp.float32), xp.float32(np.nan))
    return jnp.asarray(ranks)


def as_integers(owner: str, ids: ArrayLike) -> Array | np.ndarray:
    """Converts ids to an array. Host ids stay on the host."""
    ids = jnp.asarray(ids) if is_on_device(ids) else np.asarray(ids)
    # NumPy makes empty lists float64.
    if ids.size == 0:
        return ids.astype(np.int32)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise invalid(owner, "be integers", ids, "Floats can round ids.")
    return ids


def equal_ids(
    ids: Array | np.ndarray, others: Array | np.ndarray
) -> Bool[Array, "*shape"]:
    """Compares integers of any dtypes exactly, on the host or on devices.

    Example:
      >>> equal_ids(np.array([5, 2**40 + 5]), jnp.array([5, 5])).tolist()
      [True, False]
    """
    # Without casts, JAX would truncate 64-bit integers from the host, and 4294967295
    # would equal -1.
    on_device = [x.dtype for x in (ids, others) if isinstance(x, jax.Array)]
    dtype = on_device[0] if on_device else ids.dtype
    (ids, fits), (others, others_fit) = (cast_ids(x, dtype) for x in (ids, others))
    return jnp.asarray((ids == others) & fits & others_fit)


def cast_ids(ids: Any, dtype: Any) -> tuple[Any, Any]:
    """Casts integers, and marks the integers that keep their value."""
    cast = ids.astype(dtype)
    # 4294967295 survives the round trip through int32, but its sign changes.
    return cast, (cast.astype(ids.dtype) == ids) & ((cast < 0) == (ids < 0))
