"""Metrics for samples with one label: means, log loss, calibration and AUC."""

import dataclasses
from typing import Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from tpu_embedding.recommenders.metric import (
    Metric,
    Sum,
    as_float32,
    check_batch,
    check_clicks,
    is_on_device,
    total_of,
    weighted,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(Metric):
    """The weighted mean of values.

    It is defined if the total weight is not 0.

    Attributes:
      weighted_values: sum of weight times value.
      weights: summed weights.

    Example:
      >>> mean = Mean.from_batch([1.0, 2.0, 9.0], weights=[True, True, False])
      >>> float(mean.update([3.0]).compute())
      2.0
    """

    weighted_values: Sum = dataclasses.field(default_factory=Sum.zeros)
    weights: Sum = dataclasses.field(default_factory=Sum.zeros)

    @classmethod
    def from_batch(cls, values: ArrayLike, weights: ArrayLike | None = None) -> Self:
        """Makes the metric from one batch.

        Args:
          values: any shape.
          weights: at least 0, or bool; shaped like `values`. Defaults to 1.
        """
        values, weights = check_batch(cls.__name__, values=values, weights=weights)
        return cls._of(values, weights)

    @classmethod
    def _of(cls, values: Array, weights: Array, **settings: Any) -> Self:
        return cls(
            weighted_values=total_of(values, weights),
            weights=Sum.of(jnp.sum(weights)),
            **settings,
        )

    def is_defined(self) -> Bool[Array, ""]:
        """Tells if the total weight is not 0."""
        return self.weights.value() != 0

    def _compute(self) -> Float[Array, ""]:
        return self.weighted_values.value() / self.weights.value()


class _MeanOfErrors(Mean):
    @classmethod
    def from_batch(
        cls,
        predictions: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
    ) -> Self:
        """Makes the metric from one batch.

        Args:
          predictions: any shape.
          labels: shaped like `predictions`.
          weights: sample weights; see `Mean.from_batch`.
        """
        batch = {"predictions": predictions, "labels": labels, "weights": weights}
        rounded, rounded_labels, weights = check_batch(cls.__name__, **batch)
        errors = rounded - rounded_labels
        if not is_on_device((predictions, labels)):
            # In float32, the difference of large numbers would have few correct digits.
            errors = as_float32(np.subtract(predictions, labels, dtype=np.float64))
        return cls._of(cls._values(errors), weights)

    @classmethod
    def _values(cls, errors: Array) -> Array:
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MAE(_MeanOfErrors):
    """The mean absolute error.

    Example:
      >>> float(MAE.from_batch([1.0, 2.0], [1.0, 4.0]).compute())
      1.0
    """

    @classmethod
    def _values(cls, errors: Array) -> Array:
        return jnp.abs(errors)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSE(_MeanOfErrors):
    """The root of the mean squared error.

    Example:
      >>> float(RMSE.from_batch([1.0, 2.0], [4.0, 6.0], weights=[0.0, 1.0]).compute())
      4.0
    """

    @classmethod
    def _values(cls, errors: Array) -> Array:
        return jnp.square(errors)

    def _compute(self) -> Float[Array, ""]:
        return jnp.sqrt(super()._compute())


class ClickMetric(Metric):
    """Base class for metrics of click models, which predict logits."""

    @classmethod
    def from_batch(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        **settings: Any,
    ) -> Self:
        """Makes the metric from one batch.

        Args:
          logits: any shape. Convert probabilities with `jax.scipy.special.logit`.
            Infinite logits mean certainty: their log loss is 0 or infinite.
          labels: in `[0, 1]`, shaped like `logits`.
          weights: sample weights; see `Mean.from_batch`.
          **settings: class settings, if any.

        Raises:
          ValueError: if shapes differ, or a label on the host is outside `[0, 1]`.
        """
        batch = check_clicks(cls.__name__, logits, labels, weights)
        return cls._of_clicks(*batch, **settings)

    @classmethod
    def _of_clicks(
        cls, logits: Array, labels: Array, weights: Array, **settings: Any
    ) -> Self:
        """Makes the metric from a batch that `check_clicks` returned."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogLoss(ClickMetric, Mean):
    """The mean log loss of a click model, in nats.

    Example:
      >>> LogLoss.from_batch([0.0, 0.0], [1.0, 0.0]).compute()  # log(2)
      Array(0.6931472, dtype=float32)
    """

    @classmethod
    def _of_clicks(cls, logits: Array, labels: Array, weights: Array) -> Self:
        return cls._of(log_loss(logits, labels), weights)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalizedEntropy(ClickMetric):
    """The mean log loss, relative to a model that always predicts the base rate.

    The base rate is the share of positive samples. A value below 1 means that your
    model is better. See He et al., "Practical Lessons from Predicting Clicks on Ads at
    Facebook" (ADKDD 2014), equation 1. The metric is defined if there are positive and
    negative samples.

    Attributes:
      losses: sum of weight times log loss.
      positives: summed weights of positive samples.
      negatives: summed weights of negative samples.

    Example:
      >>> float(NormalizedEntropy.from_batch([0.0, 0.0], [1.0, 0.0]).compute())
      1.0
    """

    losses: Sum = dataclasses.field(default_factory=Sum.zeros)
    positives: Sum = dataclasses.field(default_factory=Sum.zeros)
    negatives: Sum = dataclasses.field(default_factory=Sum.zeros)

    @classmethod
    def _of_clicks(cls, logits: Array, labels: Array, weights: Array) -> Self:
        return cls(
            losses=total_of(log_loss(logits, labels), weights),
            positives=total_of(labels, weights),
            negatives=total_of(1 - labels, weights),
        )

    def is_defined(self) -> Bool[Array, ""]:
        """Tells if there are positive and negative samples."""
        return (self.positives.value() != 0) & (self.negatives.value() != 0)

    def _compute(self) -> Float[Array, ""]:
        positives, negatives = self.positives.value(), self.negatives.value()
        weight = self.positives.add(self.negatives).value()
        # Use the rarer class, because 1 minus a small share would be inexact in
        # float32.
        share = jnp.minimum(positives, negatives) / weight
        entropy = -share * jnp.log(share) - (1 - share) * jnp.log1p(-share)
        return self.losses.value() / weight / entropy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration(ClickMetric, Mean):
    """The mean predicted probability, divided by the mean label.

    At 1, the model is calibrated. Above 1, its probabilities are too high. The metric
    is defined if at least one label is not 0.

    Attributes:
      weighted_values: sum of weight times predicted probability.
      weights: sum of weight times label.

    Example:
      >>> logits = jax.scipy.special.logit(jnp.array([0.5, 0.25]))
      >>> float(Calibration.from_batch(logits, [1.0, 0.0]).compute())
      0.75
    """

    @classmethod
    def _of_clicks(cls, logits: Array, labels: Array, weights: Array) -> Self:
        return cls(
            # `Mean` divides the first sum by the second. The total weight is left out,
            # because it would cancel.
            weighted_values=total_of(jax.nn.sigmoid(logits), weights),
            weights=total_of(labels, weights),
        )


def log_loss(
    logits: Float[Array, "*shape"], labels: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Computes log losses, also for infinite logits."""
    # For an infinite logit, one class has an infinite loss. `weighted` keeps this loss
    # out of the sum if the label excludes the class.
    positive_losses = weighted(jax.nn.softplus(-logits), labels)
    return positive_losses + weighted(jax.nn.softplus(logits), 1 - labels)


NUM_BINS: Final = 4096
"""Default number of bins. Their sums take 64 KiB."""


_NONE: Final[Any] = object()
"""Marks sums that are not created yet, because their shape depends on `num_bins`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AUC(ClickMetric):
    """The area under the ROC curve.

    It is the probability that a positive sample scores above a negative one. Pairs with
    equal scores count half, and so do pairs in the same bin. The error is therefore at
    most `max_error()`, which is half the share of pairs in the same bin.

    Bins have equal width in `score / (1 + |score|)`. If scores are logits and you use
    4096 bins, the resolution is 0.0001 for predictions near 0.5, and 0.00015 for
    predictions near 0.01. However, far from 0, similar logits such as 11.97 and 12.04
    share a bin, so check `max_error()`. The metric is defined if there are positive and
    negative samples.

    Attributes:
      positives: `[num_bins]`, weights of positive samples, by ascending score.
      negatives: `[num_bins]`, weights of negative samples.
      num_bins: bin count, at least 2; an option of `from_batch`.

    Example:
      >>> auc = AUC.from_batch([0.3, 1.5], [1, 0])
      >>> float(auc.update([-4.0, 2.0], [0, 1]).compute())
      0.75
    """

    positives: Sum = _NONE
    negatives: Sum = _NONE
    num_bins: int = dataclasses.field(default=NUM_BINS, metadata={"static": True})

    def __post_init__(self):
        # A default factory wouldn't know `num_bins`.
        for name in ("positives", "negatives"):
            if getattr(self, name) is _NONE:
                object.__setattr__(self, name, Sum.zeros((self.num_bins,)))

    @classmethod
    def _of_clicks(
        cls, logits: Array, labels: Array, weights: Array, num_bins: int = NUM_BINS
    ) -> "AUC":
        bins = _bins(logits, num_bins)
        # NaN scores have no bin, so their labels become NaN, which makes the result
        # NaN.
        labels = jnp.where(jnp.isnan(logits), jnp.nan, labels)
        return cls(
            positives=_histogram(bins, weighted(labels, weights), num_bins),
            negatives=_histogram(bins, weighted(1 - labels, weights), num_bins),
            num_bins=num_bins,
        )

    def is_defined(self) -> Bool[Array, ""]:
        """Tells if there are positive and negative samples."""
        positives, negatives = self.positives.total(), self.negatives.total()
        return (positives.value() != 0) & (negatives.value() != 0)

    def max_error(self) -> Float[Array, ""]:
        """Bounds the error of `compute`, apart from float32 rounding."""
        return _max_error(self)

    def _compute(self) -> Float[Array, ""]:
        # A positive sample beats all negatives in lower bins, and half of the negatives
        # in its own bin. So the count is the running total minus half the bin.
        negatives = self.negatives
        half = Sum(high=-0.5 * negatives.high, low=-0.5 * negatives.low)
        return self._share(negatives.running().add(half).value())

    def _share(self, counts: Float[Array, " bins"]) -> Float[Array, ""]:
        """Sums `positives * counts`, as a share of all pairs."""
        shares = self.positives.value() / self.positives.total().value()
        shares *= counts / self.negatives.total().value()
        return Sum.of(shares).total().value()


@jax.jit
def _max_error(auc: AUC) -> Float[Array, ""]:
    share = auc._share(0.5 * auc.negatives.value())
    return jnp.where(auc.is_defined(), share, jnp.nan)


def _bins(scores: Float[Array, "*shape"], num_bins: int) -> Int[Array, "*shape"]:
    # The result is in [-1, 1]. The formula alone would turn infinite scores into NaN.
    squashed = jnp.where(
        jnp.isinf(scores), jnp.sign(scores), scores / (1 + jnp.abs(scores))
    )
    bins = jnp.floor((squashed + 1) * (0.5 * num_bins)).astype(jnp.int32)
    # A squashed score of 1 would be past the last bin. NaN scores have NaN labels, so
    # any bin will do.
    return jnp.where(jnp.isnan(scores), 0, jnp.clip(bins, 0, num_bins - 1))


def _histogram(
    bins: Int[Array, "*shape"], weights: Float[Array, "*shape"], num_bins: int
) -> Sum:
    # A float32 total of many weights is inexact. So each chunk is summed separately,
    # and the chunk totals are added as a `Sum`. With `num_bins` samples in each chunk,
    # the totals take as much memory as the samples.
    num_chunks = -(-bins.size // num_bins)
    room = (0, num_chunks * num_bins - bins.size)
    bins, weights = (
        jnp.pad(x.ravel(), room).reshape(num_chunks, num_bins) for x in (bins, weights)
    )
    chunks = jnp.arange(num_chunks, dtype=bins.dtype)[:, None]
    totals = jnp.zeros((num_chunks, num_bins), jnp.float32)
    return Sum.of(totals.at[chunks, bins].add(weights)).total()
