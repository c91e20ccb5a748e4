"""Tests the metrics of retrieval against scikit-learn and their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rejections import rejects
from tests.tiers import each_once, full_cases, matrix, quick_cases
from tpu_embedding.inputs import PADDING_ROW_ID
from tpu_embedding.metrics import NDCGAtK, RecallAtK

reference = pytest.importorskip("sklearn.metrics")

# Tolerance of float32: sums of a dozen gains, and their quotient.
RTOL = 1e-6
BATCH, CANDIDATES = 30, 12
METRICS = (NDCGAtK, RecallAtK)


def retrieval(seed, levels=None):
    """Returns scores, graded labels and weights; few `levels` make ties."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(BATCH, CANDIDATES)).astype(np.float32)
    if levels is not None:
        scores = generator.integers(0, levels, scores.shape).astype(np.float32)
    labels = generator.integers(0, 4, scores.shape) * (
        generator.random(scores.shape) < 0.3
    )
    labels[:, 0] = np.where(labels.any(axis=1), labels[:, 0], 1)
    weights = generator.integers(0, 3, BATCH).astype(np.float32)
    return scores, labels.astype(np.float32), weights


CASES = {
    "no ties": retrieval(0),
    "ties": retrieval(1, levels=3),
    "all tied": retrieval(2, levels=1),
}


@functools.partial(jax.jit, static_argnums=0, static_argnames="k")
def value_of(metric, *batch, k, **inputs):
    return metric.from_batch(*batch, k=k, **inputs).compute()


@pytest.mark.parametrize(
    ("name", "k"),
    quick_cases(matrix(CASES, [1, 5, CANDIDATES, CANDIDATES + 3]), "ties-5"),
)
def test_ndcg(name, k):
    scores, labels, weights = case = CASES[name]
    wanted = reference.ndcg_score(labels, scores, k=k, sample_weight=weights)
    assert float(value_of(NDCGAtK, *case, k=k)) == pytest.approx(wanted, rel=RTOL)


def test_ndcg_of_exponential_gains():
    scores, labels, weights = CASES["ties"]
    wanted = reference.ndcg_score(2**labels - 1, scores, k=5, sample_weight=weights)
    metric = NDCGAtK.from_batch(*CASES["ties"], k=5, gains="exponential")
    # An update keeps the setting.
    for found in (metric, metric.update(*CASES["ties"])):
        assert float(found.compute()) == pytest.approx(wanted, rel=RTOL)


@pytest.mark.parametrize(
    ("name", "k"),
    quick_cases(matrix(["no ties", "ties"], [1, 4, CANDIDATES + 3]), "ties-4"),
)
def test_recall_is_the_mean_over_orders_of_ties(name, k):
    generator = np.random.default_rng(0)
    scores, labels = (array[:3] for array in CASES[name][:2])
    for row, (s, is_relevant) in enumerate(zip(scores, labels > 0, strict=True)):
        got = value_of(RecallAtK, scores[[row]], labels[[row]], k=k)
        orders = [np.lexsort((generator.random(CANDIDATES), -s)) for _ in range(2000)]
        wanted = np.mean(is_relevant[orders][:, :k].sum(1)) / is_relevant.sum()
        # Five standard deviations of the mean of 2000 draws in [0, 1].
        tolerance = RTOL if name == "no ties" else 5 * 0.5 / 2000**0.5
        assert float(got) == pytest.approx(wanted, abs=tolerance)


def test_retrieved_ids():
    """An id that was not found counts, unlike a list without a relevant candidate."""
    ids, labels = np.array([[3, 5], [1, 4], [2, 0]]), np.array([5, 1, 9])
    for k, recall, ndcg in ((1, 1 / 3, 1 / 3), (2, 2 / 3, (1 / np.log2(3) + 1) / 3)):
        for metric, wanted in ((RecallAtK, recall), (NDCGAtK, ndcg)):
            got = metric.from_top_k(ids, labels, k=k).compute()
            assert float(got) == pytest.approx(wanted, rel=RTOL)
    weighted = RecallAtK.from_top_k(ids, labels, [1, 0, 1], k=2)
    assert float(weighted.compute()) == pytest.approx(0.5, rel=RTOL)
    for wrong, k in ((labels[:2], 2), (labels[:, None], 2), (labels, 3), (labels, 0)):
        with rejects(field="RecallAtK.k" if k == 0 else "RecallAtK: ids"):
            RecallAtK.from_top_k(ids, wrong, k=k)


@pytest.mark.parametrize("enable_x64", full_cases([False, True], "True"))
def test_retrieved_ids_keep_64_bits(enable_x64):
    """A label that doesn't fit in the ids' dtype, or is padding, is never found."""
    ids = np.array([[5, 7], [5, 7], [5, 7], [5, PADDING_ROW_ID]])
    labels = np.array([2**40 + 5, 7 - 2**32, 7, PADDING_ROW_ID])
    with jax.enable_x64(enable_x64):
        for found in (ids, ids.tolist(), jnp.asarray(ids, jnp.int32)):
            for wanted in (labels, labels.tolist()):
                recall = RecallAtK.from_top_k(found, wanted, k=2)
                assert float(recall.compute()) == 1 / 4
        recall = RecallAtK.from_top_k(labels[:, None], jnp.array([5, 7, 7, 0]), k=1)
        assert float(recall.compute()) == 1 / 4
        large = np.array([2**63 + 1, 2**40], np.uint64)
        both = RecallAtK.from_top_k(large[:, None], large + np.uint64([0, 1]), k=1)
        assert float(both.compute()) == 1 / 2
        signed = jnp.array([[-1], [5]], jnp.int32)
        for first in (2**32 - 1, -1):
            dtype = jnp.uint32 if first > 0 else jnp.int8
            recall = RecallAtK.from_top_k(signed, jnp.array([first, 5], dtype), k=1)
            assert float(recall.compute()) == (1 / 2 if first > 0 else 1)
    for wrong in ({"ids": ids.astype(float)}, {"labels": labels.astype(float)}):
        (name,) = wrong
        with rejects(field=name):
            RecallAtK.from_top_k(**{"ids": ids, "labels": labels, **wrong}, k=1)


@pytest.mark.parametrize(
    ("dtype", "first", "enable_x64"),
    each_once(
        [(np.int32, 2**30), (np.int64, 2**40), (np.uint64, 2**63), (float, 2**52)],
        [False, True],
    ),
)
def test_scores_are_compared_with_all_their_bits(dtype, first, enable_x64):
    scores, labels, _ = CASES["ties"]
    wanted = RecallAtK.from_batch(scores, labels, k=4).compute()
    large = np.array(first, dtype) + scores.astype(dtype)
    with jax.enable_x64(enable_x64):
        for given in (large, jnp.asarray(large)) if dtype is np.int32 else (large,):
            found = RecallAtK.from_batch(given, labels, k=4).compute()
            assert float(found) == wanted


@pytest.mark.parametrize(
    ("num_items", "case"),
    quick_cases(matrix([100_000, 1_000_000], ["last", "half", "ties"])),
)
def test_ndcg_of_many_items(num_items, case):
    generator = np.random.default_rng(0)
    scores = -np.arange(num_items, dtype=np.float32)[None]
    labels = np.zeros_like(scores)
    labels[0, -1] = 1
    if case == "half":
        labels = (generator.random(labels.shape) < 0.5).astype(np.float32)
    if case == "ties":
        scores = generator.integers(0, 3, scores.shape).astype(np.float32)
    wanted = reference.ndcg_score(labels, scores)
    got = NDCGAtK.from_batch(scores, labels, k=num_items).compute()
    # Tolerance: a float32 sum of up to a million gains.
    assert float(got) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("k", "metric"), matrix([1, 4, 20], METRICS))
def test_ranks_are_scores_with_one_relevant_candidate(metric, k):
    scores, _, weights = CASES["no ties"]
    own = np.arange(BATCH) % CANDIDATES
    labels = np.eye(CANDIDATES, dtype=np.float32)[own]
    score_of_own = np.take_along_axis(scores, own[:, None], axis=1)
    ranks = (scores > score_of_own).sum(axis=1)
    wanted = metric.from_batch(scores, labels, weights, k=k).compute()
    got = metric.from_ranks(ranks, weights, k=k).compute()
    assert float(got) == pytest.approx(float(wanted), rel=RTOL)
    # scikit-learn's name for recall with one relevant candidate.
    if metric is RecallAtK and k < CANDIDATES:
        hits = reference.top_k_accuracy_score(own, scores, k=k, sample_weight=weights)
        assert float(got) == pytest.approx(hits, rel=RTOL)


@pytest.mark.full
@pytest.mark.parametrize("metric", METRICS)
def test_places_without_a_candidate(metric):
    """They change nothing, whatever their scores and labels are."""
    scores, labels, weights = CASES["ties"]
    scores = np.where(scores == 0, -np.inf, scores).astype(np.float32)
    wanted = value_of(metric, scores, labels, weights, k=5)
    places = np.arange(CANDIDATES + 4) % (CANDIDATES + 4) < CANDIDATES
    generator = np.random.default_rng(0)
    for fill in (np.inf, -np.inf, np.nan, 0.0):
        padded = np.pad(scores, ((0, 0), (0, 4)), constant_values=fill)
        more = np.pad(labels, ((0, 0), (0, 4)), constant_values=3.0)
        order = generator.permutation(CANDIDATES + 4)
        is_candidate = np.broadcast_to(places[order], padded.shape)
        got = value_of(
            *(metric, padded[:, order], more[:, order], weights),
            is_candidate=is_candidate,
            k=5,
        )
        assert float(got) == pytest.approx(float(wanted), rel=RTOL)


@pytest.mark.parametrize("metric", quick_cases(METRICS))
def test_samples_without_a_relevant_candidate_do_not_count(metric):
    scores = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]], np.float32)
    labels = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    both = metric.from_batch(scores, labels, k=2)
    first = metric.from_batch(scores[:1], labels[:1], k=2)
    assert float(both.compute()) == float(first.compute())
    assert float(both.weights.value()) == 1
    for shape in ((2, 0), (0, 0), (0, 3), (2, 1)):
        none = metric.from_batch(np.zeros(shape), np.zeros(shape), k=2)
        assert not none.is_defined() and float(none.weights.value()) == 0
    for none in (metric.empty(k=2), metric.from_top_k(np.zeros((0, 3)), [], k=2)):
        assert not none.is_defined() and np.isnan(none.compute())


@pytest.mark.full
@pytest.mark.parametrize("metric", METRICS)
def test_nan_scores_and_weight_zero(metric):
    scores = np.array([[np.nan, 2.0], [1.0, 2.0]], np.float32)
    labels = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    assert np.isnan(metric.from_batch(scores, labels, k=1).compute())
    assert float(metric.from_batch(scores, labels, [0, 1], k=1).compute()) == 1
    assert np.isnan(metric.from_ranks([np.nan, 0.0], k=1).compute())
    assert float(metric.from_ranks([np.nan, 0.0], [0, 1], k=1).compute()) == 1


@pytest.mark.parametrize(
    ("labels", "options", "field", "value"),
    [
        (np.zeros((2, 3)), {"k": 0}, "NDCGAtK.k", 0),
        (np.zeros(2), {}, "labels", [2]),
        (np.zeros((2, 3)), {"weights": np.zeros((2, 3))}, "weights", [2, 3]),
        (np.zeros((2, 3)), {"is_candidate": np.ones(3)}, "is_candidate", [3]),
        (np.zeros((2, 3)), {"gains": "square"}, "NDCGAtK.gains", "square"),
    ],
)
def test_wrong_arguments(labels, options, field, value):
    with rejects(field=field, value=value):
        NDCGAtK.from_batch(np.zeros((2, 3)), labels, **{"k": 1} | options)
    with rejects(field="RecallAtK.k", value=-1):
        RecallAtK.from_ranks([0], k=-1)
    with rejects(field="scores", value=[3]):
        RecallAtK.from_batch(np.zeros(3), np.zeros(3), k=1)
