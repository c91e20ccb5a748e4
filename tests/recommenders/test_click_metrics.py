"""Tests the metrics of samples with one label against scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding import metrics as m

reference = pytest.importorskip("sklearn.metrics")

# Tolerance of float32: sums of a few dozen values, and their quotient.
RTOL = 1e-6
NUM_SAMPLES = 40


def sample(seed, rate=0.3, scale=2.0):
    generator = np.random.default_rng(seed)
    logits = scale * generator.normal(size=NUM_SAMPLES).astype(np.float32)
    labels = (generator.random(NUM_SAMPLES) < rate).astype(np.float32)
    weights = generator.integers(0, 5, NUM_SAMPLES).astype(np.float32)
    return logits, labels, weights


ROUNDED, LABELS, WEIGHTS = sample(6)
CASES = {
    "random": sample(0),
    "rare": sample(2, rate=0.05),
    "common": sample(3, rate=0.95),
    "wide": sample(4, scale=8.0),
    "narrow": sample(5, scale=0.01),
    "ties": (np.round(ROUNDED), LABELS, WEIGHTS),
    "all tied": (np.zeros_like(ROUNDED), LABELS, WEIGHTS),
    # Probabilities that are 0 or 1 in float32.
    "certain": (np.float32(np.where(ROUNDED > 0, 30, -30)), LABELS, WEIGHTS),
    "fractional weights": (*sample(9)[:2], np.float32(sample(9)[2] / 3)),
}


def probabilities(logits):
    """Returns the probability of both classes; 1 - p would be inexact."""
    logits = logits.astype(np.float64)
    return np.stack([1 / (1 + np.exp(logits)), 1 / (1 + np.exp(-logits))], axis=1)


def in_two_batches(metric, *batch):
    """Computes a metric of two unequal batches, under `jit`."""

    @jax.jit
    def update(metric, *batch):
        return metric.update(*batch)

    for part in (slice(0, 10), slice(10, None)):
        metric = update(metric, *(x[part] for x in batch))
    return metric


@pytest.mark.parametrize("name", quick_cases(CASES, "fractional weights", "ties"))
def test_auc(name):
    logits, labels, weights = case = CASES[name]
    auc = in_two_batches(m.AUC.empty(), *case)
    wanted = reference.roc_auc_score(labels, logits, sample_weight=weights)
    # Beyond the bound of the bins, which equal scores share: float32 rounding.
    bound = 0 if name in ("ties", "all tied", "certain") else float(auc.max_error())
    assert abs(float(auc.compute()) - wanted) <= bound + RTOL


@given(
    scores=st.lists(
        st.floats(-40, 40, width=32), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
@pytest.mark.full
@pytest.mark.parametrize("num_bins", [2, 64])
def test_error_of_auc_is_bounded(num_bins, scores, seed):
    _, labels, weights = sample(seed)
    labels[:2], weights[:2] = (0, 1), 1
    scores = np.array(scores, np.float32)
    auc = jax.jit(m.AUC.from_batch, static_argnames="num_bins")(
        scores, labels, weights, num_bins=num_bins
    )
    wanted = reference.roc_auc_score(labels, scores, sample_weight=weights)
    assert abs(float(auc.compute()) - wanted) <= float(auc.max_error()) + RTOL


@pytest.mark.full
def test_auc_of_soft_labels_counts_both_classes():
    scores = np.array([0.0, 1.0, 2.0], np.float32)
    labels = np.array([0.25, 0.5, 0.75], np.float32)
    hard = np.repeat([1.0, 0.0], 3)
    wanted = reference.roc_auc_score(
        hard, np.tile(scores, 2), sample_weight=np.concatenate([labels, 1 - labels])
    )
    assert float(m.AUC.from_batch(scores, labels).compute()) == pytest.approx(wanted)


@pytest.mark.full
def test_auc_of_infinite_scores():
    auc = m.AUC.from_batch([-np.inf, np.inf, 3e38, -3e38], [0, 1, 1, 0])
    assert float(auc.compute()) == 1


@pytest.mark.parametrize("name", quick_cases(CASES, "certain"))
def test_log_loss_and_normalized_entropy(name):
    logits, labels, weights = case = CASES[name]
    loss = in_two_batches(m.LogLoss.empty(), *case).compute()
    p = probabilities(logits)
    wanted = reference.log_loss(labels, p, sample_weight=weights, labels=[0, 1])
    # The reference clips probabilities at 2.2e-16; the cases have larger ones.
    assert float(loss) == pytest.approx(wanted, rel=RTOL)
    base = np.full(NUM_SAMPLES, np.average(labels, weights=weights))
    base = reference.log_loss(labels, base, sample_weight=weights, labels=[0, 1])
    entropy = in_two_batches(m.NormalizedEntropy.empty(), *case).compute()
    assert float(entropy) == pytest.approx(wanted / base, rel=RTOL)


@pytest.mark.full
def test_base_rate_has_normalized_entropy_one():
    """Also at one positive sample in ten million."""
    for rate in (0.5, 1e-3, 1e-7):
        logit = np.log(rate) - np.log1p(-rate)
        metric = m.NormalizedEntropy.from_batch(
            np.full(2, logit, np.float32), [1, 0], np.float32([rate, 1 - rate])
        )
        # Tolerance: the rounded logit changes the loss of the positives by 1e-6.
        assert float(metric.compute()) == pytest.approx(1, rel=3e-6)


def test_infinite_logits_are_certain():
    logits = np.array([np.inf, -np.inf], np.float32)
    assert float(m.LogLoss.from_batch(logits, [1, 0]).compute()) == 0
    assert float(m.LogLoss.from_batch(logits, [0, 0]).compute()) == np.inf
    assert float(m.LogLoss.from_batch(logits, [1, 0.5]).compute()) == np.inf


@pytest.mark.parametrize("name", quick_cases(CASES, "common"))
def test_calibration(name):
    logits, labels, weights = CASES[name]
    p = probabilities(logits)[:, 1]
    got = in_two_batches(m.Calibration.empty(), logits, labels, weights).compute()
    wanted = np.average(p, weights=weights) / np.average(labels, weights=weights)
    assert float(got) == pytest.approx(wanted, rel=RTOL)


@pytest.mark.parametrize("name", quick_cases(CASES, "random"))
def test_errors(name):
    predictions, labels, weights = case = CASES[name]
    mae = in_two_batches(m.MAE.empty(), *case).compute()
    rmse = in_two_batches(m.RMSE.empty(), *case).compute()
    wanted = reference.mean_absolute_error(labels, predictions, sample_weight=weights)
    assert float(mae) == pytest.approx(wanted, rel=RTOL)
    wanted = reference.root_mean_squared_error(
        labels, predictions, sample_weight=weights
    )
    assert float(rmse) == pytest.approx(wanted, rel=RTOL)


CLICKS = (m.AUC, m.LogLoss, m.NormalizedEntropy, m.Calibration)


@pytest.mark.parametrize("metric", quick_cases(CLICKS, "AUC"))
def test_metrics_of_clicks_take_logits_and_then_labels(metric):
    logits, labels, _ = CASES["random"]
    of_names = metric.from_batch(logits=logits, labels=labels)
    in_order = metric.from_batch(logits, labels)
    assert float(of_names.compute()) == float(in_order.compute())
    with rejects(field="labels", fix="from_batch(logits, labels, weights)"):
        metric.from_batch(labels, logits)
    with rejects(field="labels", value=3):
        metric.from_batch([0.5, 3.0, 2.0], [1, 3, 3], [True, False, True])


def test_values_on_devices_are_not_waited_for():
    """So wrong labels raise no error there."""
    scores = np.linspace(0, 1, 40, dtype=np.float32)
    for labels, weights in (
        (jnp.asarray(scores + 2), None),
        (scores + 2, jnp.ones(40)),
        ([*jnp.asarray(scores + 2)], None),
    ):
        m.LogLoss.from_batch(scores, labels, weights)
    jax.jit(m.LogLoss.from_batch)(scores, scores + 2)


LABELLED = (m.AUC, m.LogLoss, m.NormalizedEntropy, m.Calibration, m.MAE, m.RMSE)


@pytest.mark.parametrize("metric", quick_cases(LABELLED, "NormalizedEntropy"))
def test_samples_of_weight_zero_count_for_nothing(metric):
    scores, labels = np.float32([0.2, 0.5, 0.7]), np.float32([0, 1, 1])
    wanted = metric.from_batch(scores, labels).compute()
    garbage = np.append(scores, np.float32([np.nan, np.inf]))
    labels = np.append(labels, np.float32([1, np.nan]))
    mask = np.array([True, True, True, False, False])
    assert float(metric.from_batch(garbage, labels, mask).compute()) == float(wanted)
    # A score that is NaN is defined, so it can be told from a missing class.
    of_batch = metric.from_batch([0.2, np.nan, 0.7], [0.0, 1.0, 1.0])
    assert np.isnan(of_batch.compute()) and of_batch.is_defined()
    for empty in (metric.empty(), metric.from_batch([1], [1.0], [0.0])):
        assert not empty.is_defined() and np.isnan(empty.compute())
    assert not metric.from_batch([], []).is_defined()


@pytest.mark.parametrize("labels", [[1, 1], [0, 0], [0, 1]], ids=str)
def test_one_class(labels):
    defined_by = {m.AUC: {0, 1}, m.NormalizedEntropy: {0, 1}, m.Calibration: {1}}
    for metric in CLICKS:
        got = metric.from_batch([0.25, 0.5], labels)
        is_defined = defined_by.get(metric, set()) <= set(labels)
        assert bool(got.is_defined()) == is_defined
        assert bool(jnp.isnan(got.compute())) != is_defined


@pytest.mark.parametrize("metric", quick_cases(LABELLED, "AUC"))
def test_shapes_that_jax_would_broadcast_are_rejected(metric):
    with rejects(field="labels", value=[4, 1]):
        metric.from_batch(np.zeros(4), np.zeros((4, 1)))
    with rejects(field="weights", value=[1]):
        metric.from_batch(np.zeros(4), np.zeros(4), np.ones(1))


@pytest.mark.parametrize("weight", [pytest.param(1.0, marks=pytest.mark.full), 0.1])
def test_auc_counts_many_samples_of_one_score(weight):
    """A float32 total of ones stops at 2^24, and one of tenths is off by 1 %."""
    num_samples = 2**24 + 2**20 if weight == 1 else 2**19
    labels = (np.arange(num_samples) % 4 == 0).astype(np.float32)
    weights = np.full(num_samples, weight, np.float32)
    auc = m.AUC.from_batch(np.zeros_like(labels), labels, weights)
    for total, share in ((auc.positives, 0.25), (auc.negatives, 0.75)):
        wanted = share * num_samples * np.float64(np.float32(weight))
        # Tolerance: float32 totals of 4096 tenths. Ones add exactly.
        rel = 0 if weight == 1 else 1e-4
        assert float(total.total().value()) == pytest.approx(wanted, rel=rel)


@pytest.mark.parametrize("enable_x64", [False, True])
@pytest.mark.parametrize("as_batch", quick_cases([np.asarray, list], "list"))
def test_numbers_of_64_bits_keep_their_value(as_batch, enable_x64):
    large = as_batch(np.array([2**40, 2**40 + 6]))
    with jax.enable_x64(enable_x64):
        assert float(m.Mean.from_batch(large).compute()) == np.float32(2**40 + 3)
        assert float(m.Mean.from_batch([1.0, 5.0], large).compute()) == 3
        other = as_batch(np.array([2**40 + 1, 2**40 + 9]))
        assert float(m.MAE.from_batch(large, other).compute()) == 2
        assert float(m.RMSE.from_batch(large, other).compute()) == np.float32(5**0.5)
