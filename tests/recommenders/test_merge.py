"""Tests that metrics merge: over batches, in any order, over devices, under `jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests.conftest import mesh_of
from tests.rejections import rejects
from tpu_embedding import metrics as m

NUM_SAMPLES = 24
GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=NUM_SAMPLES).astype(np.float32)
LABELS = (GENERATOR.random(NUM_SAMPLES) < 0.4).astype(np.float32)
SCORES = GENERATOR.integers(0, 6, (NUM_SAMPLES, 8)).astype(np.float32)
GAINS = GENERATOR.integers(0, 2, (NUM_SAMPLES, 8)).astype(np.float32)

METRICS = {
    # Positive, because the rounding of a sum near 0 is not small relative to the sum.
    "mean": lambda weights: m.Mean.from_batch(np.exp(LOGITS), weights),
    "auc": lambda weights: m.AUC.from_batch(LOGITS, LABELS, weights, num_bins=16),
    "log_loss": lambda weights: m.LogLoss.from_batch(LOGITS, LABELS, weights),
    "entropy": lambda weights: m.NormalizedEntropy.from_batch(LOGITS, LABELS, weights),
    "calibration": lambda weights: m.Calibration.from_batch(LOGITS, LABELS, weights),
    "accuracy": lambda weights: m.Mean.from_batch((LOGITS > 0) == LABELS, weights),
    "mae": lambda weights: m.MAE.from_batch(LOGITS, LABELS, weights),
    "rmse": lambda weights: m.RMSE.from_batch(LOGITS, LABELS, weights),
    "recall": lambda weights: m.RecallAtK.from_batch(SCORES, GAINS, weights, k=3),
    "ndcg": lambda weights: m.NDCGAtK.from_batch(SCORES, GAINS, weights, k=3),
}

# Tolerance of float32: batches sum their own samples in another order.
RTOL = 1e-6


def of_weights(weights):
    return {name: make(weights) for name, make in METRICS.items()}


@jax.jit
def merged_values(weights):
    """Merges metrics of several batches in both orders.

    Args:
      weights: `[batches, samples]`, of all samples in each batch.
    """
    parts = [of_weights(row) for row in weights]
    forwards = functools.reduce(m.merge, parts)
    backwards = functools.reduce(m.merge, parts[::-1])
    return m.compute(forwards), m.compute(backwards)


@jax.jit
def whole_values(weights):
    return m.compute(of_weights(weights))


@given(
    batch_of=st.lists(st.integers(0, 2), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES),
    weights=st.lists(
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        min_size=NUM_SAMPLES,
        max_size=NUM_SAMPLES,
    ),
)
@settings(max_examples=20)
def test_any_split_merges_to_the_whole(batch_of, weights):
    """Also if a batch is empty, or all weights are 0."""
    weights = np.array(weights, np.float32)
    split = np.stack([weights * (np.array(batch_of) == i) for i in range(3)])
    forwards, backwards = jax.device_get(merged_values(split))
    whole = jax.device_get(whole_values(weights))
    for name, value in whole.items():
        assert (value.shape, value.dtype) == ((), jnp.float32)
        np.testing.assert_allclose(forwards[name], value, rtol=RTOL, err_msg=name)
        np.testing.assert_allclose(backwards[name], value, rtol=RTOL, err_msg=name)
    # Weights in halves add exactly.
    for name in ("auc", "accuracy"):
        np.testing.assert_array_equal(forwards[name], backwards[name])


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [3, 8])
def test_psum_merges_the_metrics_of_devices(num_devices):
    mesh = mesh_of(num_devices)
    weights = np.ones(NUM_SAMPLES, np.float32)

    def of_shard(logits, labels, scores, gains):
        metrics = {
            "auc": m.AUC.from_batch(logits, labels, num_bins=16),
            "entropy": m.NormalizedEntropy.from_batch(logits, labels),
            "ndcg": m.NDCGAtK.from_batch(scores, gains, k=3),
        }
        return jax.lax.psum(metrics, "shard")

    spec = PartitionSpec("shard")
    merged = jax.jit(
        jax.shard_map(of_shard, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    )(LOGITS, LABELS, SCORES, GAINS)
    wanted = whole_values(weights)
    for name, value in m.compute(merged).items():
        assert float(value) == pytest.approx(float(wanted[name]), rel=RTOL)
    counts = METRICS["auc"](weights).positives
    np.testing.assert_array_equal(merged["auc"].positives.value(), counts.value())


def test_settings():
    for metric in (m.AUC, m.Mean, m.LogLoss, m.NormalizedEntropy):
        jax.tree.map(np.testing.assert_array_equal, metric(), metric.empty())
    assert m.AUC(num_bins=8).positives.high.shape == (8,)
    auc = m.AUC.empty(num_bins=5).update([0.1], [1.0])
    assert auc.num_bins == 5 and auc.positives.high.shape == (5,)
    for other in (m.AUC.empty(num_bins=8), m.MAE.empty()):
        with rejects(fix="AUC"):
            m.AUC.empty(num_bins=4).merge(other)
