"""Defines losses, and evaluation metrics that are computed from sums over batches.

The devices compute the sums of each batch. The loop totals them on the host in float64,
and computes the metrics from the totals.
"""

import dataclasses
from collections.abc import Callable
from typing import Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from tpu_embedding.training.models.model import Outputs

LossName = Literal["log_loss", "squared_error", "in_batch_softmax"]

NUM_SCORE_BINS: Final = 4096
"""Number of bins of predicted probabilities, for the area under the ROC curve.

A pair of samples in one bin counts half. The error is therefore below half the share of
such pairs."""

RECALL_TOP_K: Final = 10
"""The `k` of recall@k: a hit ranks the sample's own item among the top k candidates."""

Sums = dict[str, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss and the metrics that belong to it.

    Attributes:
      metrics: names of the metrics for which a run may have a target; lower is better.
        The first one is the main metric, which a teacher can have, too.
      label_range: minimum and maximum of a label; None if every finite number is one.
      per_sample: `(outputs, labels) -> losses [batch]`, without the penalty.
      sums: `(outputs, labels, weights) -> Sums` of one batch.
      summarize: `totals -> metrics`, from float64 totals by name to metrics by name.
    """

    metrics: tuple[str, ...]
    label_range: tuple[float, float] | None = None
    per_sample: Callable[[Outputs, Array], Array]
    sums: Callable[[Outputs, Array, Array], Sums]
    summarize: Callable[[dict[str, np.ndarray]], dict[str, float]]

    @property
    def metric(self) -> str:
        """Name of the main metric."""
        return self.metrics[0]


def mean_loss(
    loss: Loss,
    outputs: Outputs,
    labels: Float[Array, " batch"],
    weights: Float[Array, " batch"],
) -> jax.Array:
    """Returns the weighted mean of loss plus penalty over the batch. Global."""
    per_sample = loss.per_sample(outputs, labels) + outputs.penalty
    return jnp.sum(weights * per_sample) / jnp.sum(weights)


def _log_loss(outputs: Outputs, labels: Array) -> Array:
    return optax.sigmoid_binary_cross_entropy(outputs.scores, labels)


def _click_sums(outputs: Outputs, labels: Array, weights: Array) -> Sums:
    bins = jnp.int32(outputs.predictions * NUM_SCORE_BINS)
    bins = jnp.clip(bins, 0, NUM_SCORE_BINS - 1)
    empty = jnp.zeros(NUM_SCORE_BINS)
    return {
        "weight": jnp.sum(weights),
        "log_loss": jnp.sum(weights * _log_loss(outputs, labels)),
        "positives": empty.at[bins].add(weights * labels),
        "negatives": empty.at[bins].add(weights * (1 - labels)),
    }


def _summarize_clicks(totals: dict[str, np.ndarray]) -> dict[str, float]:
    metrics = {"log_loss": float(totals["log_loss"] / totals["weight"])}
    auc = area_under_curve(totals["positives"], totals["negatives"])
    return metrics if auc is None else metrics | {"auc": auc}


def area_under_curve(positives: np.ndarray, negatives: np.ndarray) -> float | None:
    """Returns the area under the ROC curve, from histograms of the scores.

    The area is the probability that a positive sample scores above a negative one. Two
    samples in one bin count half.

    Args:
      positives: total weight of the positive samples in each bin, by rising score.
      negatives: total weight of the negative samples in each bin.

    Returns:
      The area, in [0, 1]; None if there are no positive or no negative samples.

    Example:
      >>> area_under_curve(np.array([0, 1, 1]), np.array([1, 1, 0]))
      0.875
    """
    pairs = positives.sum() * negatives.sum()
    if pairs == 0:
        return None
    below = np.cumsum(negatives) - negatives
    return float(np.sum(positives * (below + 0.5 * negatives)) / pairs)


def _squared_error(outputs: Outputs, labels: Array) -> Array:
    return jnp.square(outputs.scores - labels)


def _rating_sums(outputs: Outputs, labels: Array, weights: Array) -> Sums:
    errors = outputs.predictions - labels
    return {
        "weight": jnp.sum(weights),
        "squared_error": jnp.sum(weights * jnp.square(errors)),
        "absolute_error": jnp.sum(weights * jnp.abs(errors)),
    }


def _summarize_ratings(totals: dict[str, np.ndarray]) -> dict[str, float]:
    return {
        "rmse": float(np.sqrt(totals["squared_error"] / totals["weight"])),
        "mae": float(totals["absolute_error"] / totals["weight"]),
    }


def _softmax_loss(outputs: Outputs, labels: Array) -> Array:
    """Returns the negative of the log-softmax that `TwoTower` returns as scores."""
    del labels
    return -outputs.scores


def _retrieval_sums(outputs: Outputs, labels: Array, weights: Array) -> Sums:
    return {
        "weight": jnp.sum(weights),
        "softmax_loss": jnp.sum(weights * _softmax_loss(outputs, labels)),
        "hits": jnp.sum(weights * (outputs.predictions < RECALL_TOP_K)),
    }


def _summarize_retrieval(totals: dict[str, np.ndarray]) -> dict[str, float]:
    return {
        "softmax_loss": float(totals["softmax_loss"] / totals["weight"]),
        f"recall_at_{RECALL_TOP_K}": float(totals["hits"] / totals["weight"]),
    }


LOSSES: Final[dict[LossName, Loss]] = {
    "log_loss": Loss(
        metrics=("log_loss",),
        label_range=(0.0, 1.0),
        per_sample=_log_loss,
        sums=_click_sums,
        summarize=_summarize_clicks,
    ),
    "squared_error": Loss(
        metrics=("rmse", "mae"),
        per_sample=_squared_error,
        sums=_rating_sums,
        summarize=_summarize_ratings,
    ),
    "in_batch_softmax": Loss(
        metrics=("softmax_loss",),
        per_sample=_softmax_loss,
        sums=_retrieval_sums,
        summarize=_summarize_retrieval,
    ),
}
"""Losses by their name in `RunConfig.loss`."""
