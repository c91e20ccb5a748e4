"""Defines the area under the ROC curve, from histograms of the scores."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.recommenders.means import ClickMetric
from tpu_embedding.recommenders.metric import weighted
from tpu_embedding.recommenders.sums import Sum

NUM_BINS: Final = 4096
"""Default number of bins: 64 KiB of sums."""


_NONE: Final[Any] = object()
"""Stands for sums of no samples, whose shape depends on the number of bins."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AUC(ClickMetric):
    """The area under the ROC curve.

    It is the probability that a positive sample scores above a negative one; equal
    scores count half. The scores are counted in bins, and two samples in one bin count
    half, too. So the error is at most `max_error()`, half the share of pairs of
    different scores in one bin.

    A bin has equal width in `score / (1 + |score|)`. With logits as scores and 4096
    bins, predictions near 0.5 are distinguished at 0.0001, and those near 0.01 at
    0.00015. Logits that differ by little far from 0 share a bin, such as those from
    11.9 to 12.1; `max_error()` tells. It is defined if there are positive and negative
    samples.

    Attributes:
      positives: `[num_bins]`, weight of the positive samples, by rising score.
      negatives: `[num_bins]`, weight of the negative samples.
      num_bins: number of bins, at least 2; an option of `from_batch`.

    Example:
      >>> auc = AUC.from_batch([0.3, 1.5], [1, 0])
      >>> float(auc.update([-4.0, 2.0], [0, 1]).compute())
      0.75
    """

    positives: Sum = _NONE
    negatives: Sum = _NONE
    num_bins: int = dataclasses.field(default=NUM_BINS, metadata={"static": True})

    def __post_init__(self):
        for name in ("positives", "negatives"):
            if getattr(self, name) is _NONE:
                object.__setattr__(self, name, Sum.zeros((self.num_bins,)))

    @classmethod
    def empty(cls, num_bins: int = NUM_BINS) -> "AUC":
        """Returns the metric of no samples."""
        return cls(num_bins=num_bins)

    @classmethod
    def _of_clicks(
        cls, logits: Array, labels: Array, weights: Array, num_bins: int = NUM_BINS
    ) -> "AUC":
        bins = _bins(logits, num_bins)
        # NaN scores have no place, and make the result NaN.
        labels = jnp.where(jnp.isnan(logits), jnp.nan, labels)
        return cls(
            positives=_histogram(bins, weighted(labels, weights), num_bins),
            negatives=_histogram(bins, weighted(1 - labels, weights), num_bins),
            num_bins=num_bins,
        )

    def is_defined(self) -> Bool[Array, ""]:
        """Returns True if there are positive and negative samples."""
        positives, negatives = self.positives.total(), self.negatives.total()
        return (positives.value() != 0) & (negatives.value() != 0)

    def max_error(self) -> Float[Array, ""]:
        """Returns a bound on the error of `compute`, beyond rounding of float32."""
        return _max_error(self)

    def _compute(self) -> Float[Array, ""]:
        negatives = self.negatives
        half = Sum(high=-0.5 * negatives.high, low=-0.5 * negatives.low)
        return self._share(negatives.running().add(half).value())

    def _share(self, counts: Float[Array, " bins"]) -> Float[Array, ""]:
        """Returns the total of `positives * counts`, as a share of all pairs."""
        shares = self.positives.value() / self.positives.total().value()
        shares *= counts / self.negatives.total().value()
        return Sum.of(shares).total().value()


@jax.jit
def _max_error(auc: AUC) -> Float[Array, ""]:
    share = auc._share(0.5 * auc.negatives.value())
    return jnp.where(auc.is_defined(), share, jnp.nan)


def _bins(scores: Float[Array, "*shape"], num_bins: int) -> Int[Array, "*shape"]:
    """Returns the bin of each score; that of NaN is 0."""
    sizes = jnp.abs(scores)
    places = jnp.where(
        jnp.isinf(scores), jnp.sign(scores), scores / (1 + sizes)
    )  # in [-1, 1]
    bins = jnp.floor((places + 1) * (0.5 * num_bins)).astype(jnp.int32)
    return jnp.where(jnp.isnan(scores), 0, jnp.clip(bins, 0, num_bins - 1))


def _histogram(
    bins: Int[Array, "*shape"], weights: Float[Array, "*shape"], num_bins: int
) -> Sum:
    """Returns the total weight in each bin.

    A float32 total of many weights is inexact, so each chunk of samples has its own.
    """
    num_chunks = -(-bins.size // num_bins)
    room = (0, num_chunks * num_bins - bins.size)
    bins, weights = (
        jnp.pad(x.ravel(), room).reshape(num_chunks, num_bins) for x in (bins, weights)
    )
    chunks = jnp.arange(num_chunks, dtype=bins.dtype)[:, None]
    of_chunks = jnp.zeros((num_chunks, num_bins), jnp.float32)
    return Sum.of(of_chunks.at[chunks, bins].add(weights)).total()
