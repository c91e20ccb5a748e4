"""Tests the metrics against their definitions on whole data sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.tools.train.losses import LOSSES, values_of
from tpu_embedding.tools.train.models.click import Outputs, click_outputs

GENERATOR = np.random.default_rng(0)
SCORES = GENERATOR.normal(size=(3, 50)).astype(np.float32)
CLICKS = (GENERATOR.random((3, 50)) < 0.3).astype(np.float32)
WEIGHTS = (GENERATOR.random((3, 50)) < 0.8).astype(np.float32)


def summarize(loss, outputs_of, scores=SCORES, clicks=CLICKS, weights=WEIGHTS):
    evaluate = jax.jit(lambda s, y, w: LOSSES[loss].evaluate(outputs_of(s), y, w))
    return values_of(map(evaluate, scores, clicks, weights))


def test_click_metrics_over_batches():
    used = WEIGHTS > 0
    scores, labels = SCORES[used].astype(np.float64), CLICKS[used]
    p = 1 / (1 + np.exp(-scores))
    log_loss = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    above = scores[labels == 1][:, None] > scores[labels == 0][None, :]
    metrics = summarize("log_loss", click_outputs)
    assert list(metrics) == ["log_loss", "auc", "normalized_entropy", "calibration"]
    # Tolerance: float32 rounding of sums over 50 samples.
    assert metrics["log_loss"] == pytest.approx(log_loss, rel=1e-6)
    # Tolerance: pairs of samples in one of the 4096 bins count half.
    assert metrics["auc"] == pytest.approx(above.mean(), abs=1e-3)
    rate = labels.mean()
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    wanted = log_loss / entropy
    assert metrics["normalized_entropy"] == pytest.approx(wanted, rel=1e-6)
    assert metrics["calibration"] == pytest.approx(p.mean() / rate, rel=1e-6)


def coarse_outputs(scores):
    return click_outputs(0.01 * scores + 12)


def test_metrics_that_the_samples_do_not_determine():
    def names(outputs_of=click_outputs, **changes):
        return list(summarize("log_loss", outputs_of, **changes))

    assert names(clicks=np.zeros_like(CLICKS)) == ["log_loss"]
    assert names(clicks=np.ones_like(CLICKS)) == ["log_loss", "calibration"]
    assert names(weights=np.zeros_like(WEIGHTS)) == names(scores=SCORES[:0]) == []
    assert names(coarse_outputs)[1:3] == ["auc", "auc_max_error"]
    # A diverged model must not look like data of one class.
    scores = np.where(SCORES > 1, np.nan, SCORES).astype(np.float32)
    metrics = summarize("log_loss", click_outputs, scores)
    assert len(metrics) == 4 and np.isnan(list(metrics.values())).all()


def test_ratings_use_predictions_and_their_loss_uses_scores():
    def outputs_of(scores):
        return Outputs(scores=scores, predictions=jnp.clip(scores, -1, 1))

    used = WEIGHTS > 0
    errors = np.clip(SCORES, -1, 1)[used] - CLICKS[used]
    metrics = summarize("squared_error", outputs_of)
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-6)
    assert metrics["mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-6)
    scores, labels = jnp.array(SCORES[0]), jnp.array(CLICKS[0])
    got = LOSSES["squared_error"].per_sample(outputs_of(scores), labels)
    np.testing.assert_allclose(got, (SCORES[0] - CLICKS[0]) ** 2, rtol=1e-6)


def retrieval_outputs(scores):
    return Outputs(
        scores=-jnp.abs(scores),
        predictions=jnp.floor(10 * jnp.abs(scores)),
    )


def test_softmax_loss_and_recall_over_batches():
    used = WEIGHTS > 0
    sizes = np.abs(SCORES[used])
    metrics = summarize("in_batch_softmax", retrieval_outputs)
    assert list(metrics) == ["softmax_loss", "recall_at_10", "ndcg_at_10"]
    # Tolerance: float32 rounding of sums over 50 samples.
    assert metrics["softmax_loss"] == pytest.approx(sizes.mean(), rel=1e-6)
    ranks = np.floor(10 * sizes)
    recall = (ranks < 10).mean()
    assert 0 < recall < 1
    assert metrics["recall_at_10"] == pytest.approx(recall, rel=1e-6)
    ndcg = np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean()
    assert metrics["ndcg_at_10"] == pytest.approx(ndcg, rel=1e-6)
    loss = LOSSES["in_batch_softmax"].per_sample(
        retrieval_outputs(jnp.array(SCORES[0])), jnp.array(CLICKS[0])
    )
    np.testing.assert_array_equal(loss, np.abs(SCORES[0]))
