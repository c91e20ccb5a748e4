"""Losses by name, and the metrics that a run reports for each loss.

Metrics of several batches are merged on the devices. The host reads the result after
the last evaluation batch.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Final, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from tpu_embedding import metrics as m
from tpu_embedding.tools.train.models.click import Outputs

LossName = Literal["log_loss", "squared_error", "softmax", "in_batch_softmax"]

TOP_K: Final = 10
"""`k` in recall@k and NDCG@k. A sample's own item should be among the top `k` items."""

MAX_AUC_ERROR: Final = 1e-3
"""If a binned AUC's maximum error is above this number, the error is also reported."""

Metrics = collections.OrderedDict[str, m.Metric]
"""Metrics by name, with the main metric first.

JAX keeps the order of an `OrderedDict`, but sorts a dict.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss and its metrics.

    Attributes:
      metrics: metrics that can be a target, where lower is better. The main metric is
        first.
      rising_metrics: metrics that can be a target, where higher is better.
      label_range: minimum and maximum label. `None` allows every finite number.
      per_sample: `(outputs, labels) -> losses [batch]`.
      evaluate: `(outputs, labels, weights) -> Metrics`, for one batch.
    """

    metrics: tuple[str, ...]
    rising_metrics: tuple[str, ...] = ()
    label_range: tuple[float, float] | None = None
    per_sample: Callable[[Outputs, Array], Array]
    evaluate: Callable[[Outputs, Array, Array], Metrics]


def values_of(batches: Iterable[Metrics]) -> dict[str, float]:
    """Merges batches into metric values, leaving out undefined metrics."""
    merged: Metrics = collections.OrderedDict()
    for metrics in batches:
        # `metrics` is already dispatched, so devices stay busy during the wait. Without
        # the wait, the host could put all batches into device memory.
        jax.block_until_ready(merged)
        merged = _merge(merged, metrics) if merged else metrics
    result = {}
    for name, metric in jax.device_get(merged).items():
        # An AUC, for example, needs both classes. Every metric needs a positive weight.
        if metric.is_defined():
            result[name] = float(metric.compute())
            if isinstance(metric, m.AUC) and metric.max_error() > MAX_AUC_ERROR:
                result[f"{name}_max_error"] = float(metric.max_error())
    return result


# Jitted, to dispatch one program per batch instead of one program per sum.
_merge = jax.jit(m.merge)


def _evaluate_clicks(outputs: Outputs, labels: Array, weights: Array) -> Metrics:
    scores = (outputs.scores, labels, weights)
    # The metrics take logits, but predictions are probabilities.
    predicted = jax.scipy.special.logit(jnp.clip(outputs.predictions, 0, 1))
    return collections.OrderedDict(
        log_loss=m.LogLoss.from_batch(*scores),
        auc=m.AUC.from_batch(predicted, labels, weights),
        normalized_entropy=m.NormalizedEntropy.from_batch(*scores),
        calibration=m.Calibration.from_batch(predicted, labels, weights),
    )


def _evaluate_ratings(outputs: Outputs, labels: Array, weights: Array) -> Metrics:
    return collections.OrderedDict(
        rmse=m.RMSE.from_batch(outputs.predictions, labels, weights),
        mae=m.MAE.from_batch(outputs.predictions, labels, weights),
    )


def _class_loss(outputs: Outputs, labels: Array) -> Array:
    # `prepare_batch` converts all labels to float32, including class numbers.
    return optax.softmax_cross_entropy_with_integer_labels(
        outputs.scores, labels.astype(jnp.int32)
    )


def _evaluate_classes(outputs: Outputs, labels: Array, weights: Array) -> Metrics:
    is_right = jnp.argmax(outputs.scores, axis=1) == labels
    return collections.OrderedDict(
        log_loss=m.Mean.from_batch(_class_loss(outputs, labels), weights),
        accuracy=m.Mean.from_batch(is_right.astype(jnp.float32), weights),
    )


def _softmax_loss(outputs: Outputs, labels: Array) -> Array:
    # Scores are log-softmax values of each sample's own item, so labels don't matter.
    del labels
    return -outputs.scores


def _evaluate_retrieval(outputs: Outputs, labels: Array, weights: Array) -> Metrics:
    # `Outputs.scores` has only one score per sample, for the sample's own item. Ranks
    # need the scores of all items in the batch, so the model computes the ranks.
    ranks = outputs.predictions
    loss = m.Mean.from_batch(_softmax_loss(outputs, labels), weights)
    recall = m.RecallAtK.from_ranks(ranks, weights, k=TOP_K)
    ndcg = m.NDCGAtK.from_ranks(ranks, weights, k=TOP_K)
    names = ("softmax_loss", f"recall_at_{TOP_K}", f"ndcg_at_{TOP_K}")
    return collections.OrderedDict(zip(names, (loss, recall, ndcg), strict=True))


LOSSES: Final[dict[LossName, Loss]] = {
    "log_loss": Loss(
        metrics=("log_loss",),
        rising_metrics=("auc",),
        label_range=(0.0, 1.0),
        per_sample=lambda outputs, labels: optax.sigmoid_binary_cross_entropy(
            outputs.scores, labels
        ),
        evaluate=_evaluate_clicks,
    ),
    "squared_error": Loss(
        metrics=("rmse", "mae"),
        per_sample=lambda outputs, labels: jnp.square(outputs.scores - labels),
        evaluate=_evaluate_ratings,
    ),
    "softmax": Loss(
        metrics=("log_loss",),
        rising_metrics=("accuracy",),
        per_sample=_class_loss,
        evaluate=_evaluate_classes,
    ),
    "in_batch_softmax": Loss(
        metrics=("softmax_loss",),
        per_sample=_softmax_loss,
        evaluate=_evaluate_retrieval,
    ),
}
"""Losses by name, as in `RunConfig.loss`."""
