"""Tests the metrics against their definitions on whole data sets."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.training.metrics import LOSSES, area_under_curve, mean_loss
from tpu_embedding.training.models.model import Outputs, click_outputs
from tpu_embedding.training.pipeline import sum_over_batches

GENERATOR = np.random.default_rng(0)
SCORES = GENERATOR.normal(size=(3, 50)).astype(np.float32)
CLICKS = (GENERATOR.random((3, 50)) < 0.3).astype(np.float32)
WEIGHTS = (GENERATOR.random((3, 50)) < 0.8).astype(np.float32)


def rating_outputs(scores):
    return Outputs(
        scores=scores, predictions=jnp.clip(scores, -1, 1), penalty=0.1 * scores
    )


def summarize(loss, outputs_of):
    return LOSSES[loss].summarize(
        sum_over_batches(
            LOSSES[loss].sums(outputs_of(jnp.array(s)), jnp.array(y), jnp.array(w))
            for s, y, w in zip(SCORES, CLICKS, WEIGHTS, strict=True)
        )
    )


def test_log_loss_and_auc_over_batches():
    used = WEIGHTS > 0
    scores, labels = SCORES[used].astype(np.float64), CLICKS[used]
    p = 1 / (1 + np.exp(-scores))
    log_loss = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    above = scores[labels == 1][:, None] > scores[labels == 0][None, :]
    metrics = summarize("log_loss", click_outputs)
    # Tolerance: float32 rounding of sums over 50 samples.
    assert metrics["log_loss"] == pytest.approx(log_loss, rel=1e-6)
    # Tolerance: pairs of samples in one of the 4096 bins count half.
    assert metrics["auc"] == pytest.approx(above.mean(), abs=1e-3)


def test_rmse_and_mae_use_predictions():
    used = WEIGHTS > 0
    errors = np.clip(SCORES, -1, 1)[used] - CLICKS[used]
    metrics = summarize("squared_error", rating_outputs)
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-6)
    assert metrics["mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-6)


def retrieval_outputs(scores):
    return Outputs(
        scores=-jnp.abs(scores),
        predictions=jnp.floor(10 * jnp.abs(scores)),
        penalty=jnp.zeros_like(scores),
    )


def test_softmax_loss_and_recall_over_batches():
    used = WEIGHTS > 0
    sizes = np.abs(SCORES[used])
    metrics = summarize("in_batch_softmax", retrieval_outputs)
    assert list(metrics) == ["softmax_loss", "recall_at_10"]
    # Tolerance: float32 rounding of sums over 50 samples.
    assert metrics["softmax_loss"] == pytest.approx(sizes.mean(), rel=1e-6)
    recall = (np.floor(10 * sizes) < 10).mean()
    assert 0 < recall < 1
    assert metrics["recall_at_10"] == pytest.approx(recall, rel=1e-6)
    loss = LOSSES["in_batch_softmax"].per_sample(
        retrieval_outputs(jnp.array(SCORES[0])), jnp.array(CLICKS[0])
    )
    np.testing.assert_array_equal(loss, np.abs(SCORES[0]))


def test_loss_uses_scores_and_penalty():
    s, y, w = (jnp.array(a[0]) for a in (SCORES, CLICKS, WEIGHTS))
    used = WEIGHTS[0] > 0
    wanted = np.mean((SCORES[0] - CLICKS[0])[used] ** 2 + 0.1 * SCORES[0][used])
    got = mean_loss(LOSSES["squared_error"], rating_outputs(s), y, w)
    assert float(got) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("positives", "negatives", "wanted"),
    [
        ([0, 2], [3, 0], 1.0),
        ([2, 0], [0, 3], 0.0),
        ([2, 0], [3, 0], 0.5),
        ([1, 1], [0, 0], None),
        ([0, 0], [1, 1], None),
    ],
)
def test_area_under_curve(positives, negatives, wanted):
    assert area_under_curve(np.array(positives), np.array(negatives)) == wanted


def test_scores_at_the_ends_have_a_bin():
    outputs = click_outputs(jnp.array([-100.0, 100.0]))
    sums = LOSSES["log_loss"].sums(outputs, jnp.array([0.0, 1.0]), jnp.ones(2))
    assert float(jnp.sum(sums["positives"])) == 1
    assert float(sums["positives"][-1]) == 1
    assert float(sums["negatives"][0]) == 1
