"""Defines what all metrics share: values that grow by batches, and merge.

A metric is a pytree of sums. So it passes through `jit` and `scan`, and `jax.lax.psum`
merges the metrics of all devices.
"""

import dataclasses
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from tpu_embedding.recommenders.sums import Sum

Nest = TypeVar("Nest")


class Metric:
    """Base of all metrics: frozen dataclasses of sums and static settings.

    `from_batch` makes a metric of a batch, `merge` adds two, `compute` returns the
    value. Order and grouping of the samples do not matter, beyond rounding.
    """

    @classmethod
    def empty(cls, **settings: Any) -> Self:
        """Returns the metric of no samples; takes the settings, as a bare call does."""
        fields = dataclasses.fields(cls)  # pyright: ignore
        sums = {x.name: Sum.zeros() for x in fields if not x.metadata.get("static")}
        return cls(**sums, **settings)

    @classmethod
    def from_batch(cls, *batch: Any, **settings: Any) -> Self:
        """Returns the metric of one batch; each class says what a batch is."""
        raise NotImplementedError(f"{cls.__name__} has no from_batch")

    def update(self, *batch: Any, **inputs: Any) -> Self:
        """Returns the metric of its own samples and those of a batch.

        Args:
          *batch: arguments of `from_batch`.
          **inputs: further ones, except the settings, which stay as they are.
        """
        return self.merge(self.from_batch(*batch, **inputs, **self._settings()))

    def merge(self, other: Self) -> Self:
        """Returns the metric of the samples of both.

        Raises:
          ValueError: if the other one is of another class, or has other settings.
        """
        return merge(self, other)

    def is_defined(self) -> Bool[Array, ""]:
        """Returns True if the samples determine a value; see each class."""
        raise NotImplementedError(f"{type(self).__name__} has no is_defined")

    def compute(self) -> Float[Array, ""]:
        """Returns the value, a float32 scalar; NaN if it is not defined."""
        return _value_of(self)

    def _compute(self) -> Float[Array, ""]:
        """Returns the value, or anything if it is not defined."""
        raise NotImplementedError(f"{type(self).__name__} has no _compute")

    def _settings(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # pyright: ignore
            if field.metadata.get("static")
        }


@jax.jit
def _value_of(metric: Metric) -> Float[Array, ""]:
    return jnp.where(metric.is_defined(), metric._compute(), jnp.nan)


def merge(metrics: Nest, others: Nest) -> Nest:
    """Merges two nests of metrics, such as dicts, entry by entry.

    Args:
      metrics: nest of metrics.
      others: nest of the same structure.
    """
    return jax.tree.map(Sum.add, metrics, others, is_leaf=_is_sum)


def compute(metrics: Any) -> Any:
    """Returns the values of a nest of metrics, as the same nest of float32 scalars.

    Example:
      >>> from tpu_embedding.metrics import MAE
      >>> compute({"mae": MAE.from_batch([1.0, 2.0], [1.0, 4.0])})
      {'mae': Array(1., dtype=float32)}
    """
    return jax.tree.map(lambda metric: metric.compute(), metrics, is_leaf=_is_metric)


def check_batch(owner: str, **arrays: ArrayLike | None) -> list[Float[Array, "*shape"]]:
    """Returns the arrays of a batch as float32; ones for `None`.

    Args:
      owner: class of the metric, for the error.
      **arrays: by name. The first one has the shape that all must have: JAX would
        silently broadcast `[batch]` with `[batch, 1]`.

    Raises:
      ValueError: if a shape differs.
    """
    converted = {
        name: as_float32(array) for name, array in arrays.items() if array is not None
    }
    (first, values), *others = converted.items()
    for name, array in others:
        if array.shape != values.shape:
            raise ValueError(
                f"{owner}: {name} must have the shape of {first}, "
                f"{list(values.shape)}, got {list(array.shape)}."
            )
    return [converted.get(name, jnp.ones(values.shape, jnp.float32)) for name in arrays]


def as_float32(values: ArrayLike) -> Float[Array, "*shape"]:
    """Returns values as float32; JAX alone would truncate 64-bit integers first."""
    if is_on_device(values):
        return jnp.asarray(values).astype(jnp.float32)
    return jnp.asarray(np.asarray(values).astype(np.float32))


def is_on_device(values: Any) -> bool:
    """Returns True if values, such as a list, contain a JAX array."""
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(values))


def check_clicks(
    owner: str, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None
) -> list[Float[Array, "*shape"]]:
    """Returns logits, labels and weights of a batch as float32, checked.

    Values of arrays on devices are not checked, because the host would wait for them.

    Raises:
      ValueError: if a shape differs, or a label of nonzero weight is outside
        `[0, 1]`, such as a logit that is passed as a label.
    """
    batch = check_batch(owner, logits=logits, labels=labels, weights=weights)
    if is_on_device((labels, weights)):
        return batch
    used = np.asarray(labels, np.float32)
    used = used if weights is None else used[np.asarray(weights) != 0]
    is_wrong = (used < 0) | (used > 1)
    if is_wrong.any():
        raise ValueError(
            f"{owner}: labels must lie in [0, 1], got {used[is_wrong][0]}, and "
            f"{int(is_wrong.sum())} such labels in all; the order of arguments is "
            "from_batch(logits, labels, weights)."
        )
    return batch


def weighted(
    values: Float[Array, "*shape"], weights: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns `weights * values`; 0 where the weight is 0, even if the value is NaN."""
    return jnp.where(weights == 0, 0.0, weights * values)


def total_of(values: Float[Array, "*shape"], weights: Float[Array, "*shape"]) -> Sum:
    """Returns the total of weight times value over all samples."""
    return Sum.of(jnp.sum(weighted(values, weights)))


def _is_sum(value: Any) -> bool:
    return isinstance(value, Sum)


def _is_metric(value: Any) -> bool:
    return isinstance(value, Metric)
