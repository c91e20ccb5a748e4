"""The synthetic log is the recorded one, bit by bit."""

import numpy as np
import pytest

from tests.benchmarks.dlrm_v4 import SMALL
from tests.tools.data.test_synthetic_sources import checksum
from tpu_embedding.tools.train import load_config


def test_the_synthetic_log_of_events_is_the_recorded_one():
    data = load_config(SMALL).data.open(None, batch_size=64, seed=3)
    assert checksum(data.train_batch(0)) == "3d2dc83a"
    assert checksum(data.train_batch(1000)) == "68223989"
    batches = list(data.evaluation_batches())
    assert checksum(batches[0]) == "32df5e2f"
    weights = np.concatenate([batch.weights for batch in batches])
    assert weights.sum() == data.num_evaluation_samples
    assert data.teacher_log_loss() == pytest.approx(0.3358500758414532, rel=1e-12)
    assert data.teacher_auc() == pytest.approx(0.9238655601084081, rel=1e-12)
