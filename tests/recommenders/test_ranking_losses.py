"""Losses of rankings: values of Keras Recommenders' tests, and definitions in NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tests.tiers import each_once

SCORES = np.array([[1.0, 3.0, 2.0, 4.0, 0.8], [1.0, 1.8, 2.0, 3.0, 2.0]], np.float32)
LABELS = np.array([[1.0, 0.0, 1.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0, 1.5]], np.float32)
WHERE = np.array([[True] * 5, [True, True, True, False, False]])

# Keras Recommenders returns a value per item; these are their sums over the list. The
# third column is that with its mask.
LOSSES = {
    "hinge": functools.partial(
        te.nn.pairwise_loss, of_difference=lambda d: jax.nn.relu(1 + d)
    ),
    "logistic": te.nn.pairwise_loss,
    "list_mle": te.nn.list_mle_loss,
}
KNOWN = {
    "hinge": ([3 + 2 + 6.6000004, 2.8], [11.6, 1.0]),
    "logistic": ([8.535424, 3.903783], [8.535424, 0.371101 + 0.9114]),
    "list_mle": ([6.865693, 3.088192], [6.865693, None]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_values_of_keras_recommenders(name):
    loss, (whole, masked) = LOSSES[name], KNOWN[name]
    np.testing.assert_allclose(loss(SCORES, LABELS), whole, rtol=1e-5)
    found = loss(SCORES, LABELS, where=WHERE)
    if masked[1] is not None:
        np.testing.assert_allclose(found, masked, rtol=1e-5)
    # Places without an item do not count, whatever they hold.
    cut = loss(SCORES[1, :3], LABELS[1, :3])
    np.testing.assert_allclose(found[1], cut, rtol=1e-6)
    scores = np.where(WHERE, SCORES, np.nan)
    gradients = jax.grad(lambda s: loss(s, LABELS, where=WHERE).sum())(scores)
    assert np.isfinite(gradients).all()
    assert (np.asarray(gradients)[~WHERE] == 0).all()


def test_list_mle_is_a_probability_of_orders():
    """The likelihoods of all orders of a list add up to 1."""
    scores = jnp.array([0.3, -1.2, 2.0, 0.7])
    losses = [
        te.nn.list_mle_loss(scores, jnp.array(order, jnp.float32))
        for order in itertools.permutations(range(4))
    ]
    # 24 rounded exponentials.
    np.testing.assert_allclose(np.exp(-np.array(losses)).sum(), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "first", "enable_x64"),
    each_once(
        [(np.int32, 1_700_000_000), (np.int64, 2**40), (np.uint64, 2**63)]
        + [(float, 2**52), (np.uint8, 0), (np.uint32, 0)],
        [False, True],
    ),
)
def test_labels_keep_all_their_bits(dtype, first, enable_x64):
    places, same = np.array([1, 3, 2]), np.array([0, 1, 0])
    labels = np.array(first, dtype) + places.astype(dtype)
    ids = same.astype(dtype) + labels[0]
    scores, vectors = np.array([0.1, 2.0, -0.5], np.float32), SCORES[:, :3, None]
    with jax.enable_x64(enable_x64):
        for name, loss in LOSSES.items():
            of_places = loss(scores, places)
            for given in (labels, labels.tolist()):
                np.testing.assert_array_equal(loss(scores, given), of_places, name)
        by_item = te.nn.in_batch_softmax(*vectors, item_ids=ids)
        wanted = te.nn.in_batch_softmax(*vectors, item_ids=same)
        jax.tree.map(np.testing.assert_array_equal, by_item, wanted)


@pytest.mark.parametrize(
    "of_difference",
    [
        lambda d: -jnp.log(jax.nn.sigmoid(-d)),  # BPR, infinite from d = 89
        lambda d: jnp.sqrt(jnp.abs(d)),  # infinite derivative at 0
        lambda d: jnp.exp(d),  # infinite from d = 89
        lambda d: 1 / -d,  # infinite at 0
    ],
    ids=["bpr", "root", "exponential", "inverse"],
)
@pytest.mark.parametrize("where", [None, np.array([True, True, True, False])])
def test_pairs_that_do_not_count_have_no_gradient(of_difference, where):
    """The pairs of a good order have small differences, the opposite ones large."""
    scores = jnp.array([300.0, 150.0, 0.0, np.nan if where is not None else 0.0])
    labels = np.array([2, 1, 0, 0])
    loss, gradients = jax.value_and_grad(
        lambda s: te.nn.pairwise_loss(s, labels, of_difference, where=where)
    )(scores)
    assert np.isfinite(loss) and np.isfinite(gradients).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: te.nn.pairwise_loss(SCORES, LABELS[0]),
        lambda: te.nn.pairwise_loss(SCORES, LABELS, where=WHERE[:, :1]),
        lambda: te.nn.list_mle_loss(SCORES, LABELS[:, :4]),
        lambda: te.nn.list_mle_loss(SCORES[0, 0], LABELS[0, 0]),
        lambda: te.nn.in_batch_softmax(SCORES, LABELS[:1]),
        lambda: te.nn.in_batch_softmax(SCORES[0], LABELS[0]),
        lambda: te.nn.in_batch_softmax(SCORES, LABELS, LABELS[:, :1]),
        lambda: te.nn.in_batch_softmax(SCORES, LABELS, item_ids=np.arange(5)),
    ],
)
def test_shapes_that_would_broadcast_are_rejected(call):
    with rejects(field="shapes"):
        call()


METRICS = (te.metrics.RecallAtK, te.metrics.NDCGAtK)


@pytest.mark.parametrize("score", [np.nan, 0.0, -np.inf])
def test_a_model_that_tells_no_items_apart_ranks_none_first(score):
    one, scores = np.ones((64, 1), np.float32), np.full((64, 1), score, np.float32)
    _, ranks = te.nn.in_batch_softmax(scores, one)
    for metric in METRICS:
        value = metric.from_ranks(ranks, k=1).compute()
        wanted = np.nan if np.isnan(score) else 1 / 64
        assert float(value) == pytest.approx(wanted, nan_ok=True)


def test_no_samples_and_no_items():
    log_softmax, ranks = te.nn.in_batch_softmax(np.zeros((0, 3)), np.zeros((0, 3)))
    assert log_softmax.shape == ranks.num_higher.shape == ranks.num_equal.shape == (0,)
    for loss in LOSSES.values():
        assert float(loss(np.zeros(0), [])) == 0
