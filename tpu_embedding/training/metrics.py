"""Losses, and the metrics of an evaluation as sums that add up over batches.

Sums of a batch are computed on the devices; the loop adds them up on the host in
float64, and makes metrics of the totals at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from tpu_embedding.training.models.model import Outputs
from tpu_embedding.training.run_config import LossName

NUM_SCORE_BINS: Final = 4096
"""Bins of predicted probabilities that the area under the curve is read from. Pairs in
one bin count half, so its error is below half the share of such pairs."""

RECALL_RANKS: Final = 10
"""Recall is the share of samples whose item is among so many of the batch's items."""

Sums = dict[str, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss and the metrics that belong to it.

    Attributes:
      metric: the first of its metrics, which targets are set for; lower is better.
      per_sample: `(outputs, labels) -> [batch]`, without the penalty.
      sums: `(outputs, labels, weights) -> Sums` of a batch.
      summarize: totals in float64 to metrics by name.
    """

    metric: str
    per_sample: Callable[[Outputs, Array], Array]
    sums: Callable[[Outputs, Array, Array], Sums]
    summarize: Callable[[dict[str, np.ndarray]], dict[str, float]]


def mean_loss(
    loss: Loss,
    outputs: Outputs,
    labels: Float[Array, " batch"],
    weights: Float[Array, " batch"],
) -> jax.Array:
    """Returns the weighted mean of loss and penalty over the batch. Global."""
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
    """Returns the probability that a positive sample is scored above a negative one.

    Args:
      positives: weight of the positive samples by bin of the score, rising.
      negatives: the same of the negative samples.

    Returns:
      In [0, 1], pairs of one bin counting half; None where a class is missing.

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
    """What `in_batch_softmax` of `models/two_tower.py` made; nothing is negative."""
    del labels
    return -outputs.scores


def _retrieval_sums(outputs: Outputs, labels: Array, weights: Array) -> Sums:
    return {
        "weight": jnp.sum(weights),
        "softmax_loss": jnp.sum(weights * _softmax_loss(outputs, labels)),
        "hits": jnp.sum(weights * (outputs.predictions < RECALL_RANKS)),
    }


def _summarize_retrieval(totals: dict[str, np.ndarray]) -> dict[str, float]:
    return {
        "softmax_loss": float(totals["softmax_loss"] / totals["weight"]),
        f"recall_at_{RECALL_RANKS}": float(totals["hits"] / totals["weight"]),
    }


LOSSES: Final[dict[LossName, Loss]] = {
    "log_loss": Loss(
        metric="log_loss",
        per_sample=_log_loss,
        sums=_click_sums,
        summarize=_summarize_clicks,
    ),
    "squared_error": Loss(
        metric="rmse",
        per_sample=_squared_error,
        sums=_rating_sums,
        summarize=_summarize_ratings,
    ),
    "in_batch_softmax": Loss(
        metric="softmax_loss",
        per_sample=_softmax_loss,
        sums=_retrieval_sums,
        summarize=_summarize_retrieval,
    ),
}
"""By the name that `RunConfig.loss` gives."""
