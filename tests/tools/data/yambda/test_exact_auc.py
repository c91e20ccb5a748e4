"""Tests the exact AUC against scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tpu_embedding.tools.data.yambda.exact_auc import exact_auc


@pytest.mark.parametrize("num_scores", [1, 2, 30, 10**9])
def test_the_area_is_that_of_scikit_learn(num_scores):
    generator = np.random.default_rng(num_scores)
    labels = generator.integers(2, size=1_000)
    scores = generator.integers(num_scores, size=1_000) / num_scores + 0.2 * labels
    for values in (scores, scores.astype(np.float32)):
        # Tolerance: float64 sums of 1,000 numbers in another order.
        assert exact_auc(labels, values) == pytest.approx(
            roc_auc_score(labels, values), rel=1e-12
        )
    assert exact_auc(labels, -scores) == pytest.approx(1 - exact_auc(labels, scores))


def test_samples_without_an_area_are_refused():
    for label in (0, 1):
        with pytest.raises(ValueError, match="needs a positive and a negative label"):
            exact_auc(np.full(3, label), np.arange(3))
    with pytest.raises(ValueError, match="must be numbers, got NaN"):
        exact_auc(np.array([0, 1]), np.array([0.5, np.nan]))
