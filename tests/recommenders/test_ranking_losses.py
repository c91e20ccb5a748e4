"""Losses of rankings: values of Keras Recommenders' tests, and definitions in NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te

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


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.bool_])
def test_labels_that_have_no_negative(dtype):
    labels = np.array([0, 1, 0]).astype(dtype)
    for loss in LOSSES.values():
        expected = loss(SCORES[0, :3], labels.astype(np.float32))
        np.testing.assert_array_equal(loss(SCORES[0, :3], labels), expected)


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
def test_shapes_that_would_broadcast_are_refused(call):
    with pytest.raises(ValueError, match=r"all must have one shape \["):
        call()


def in_numpy(scores, own):
    """Returns log-softmax and rank of each sample's own item, in float64."""
    top = scores.max(axis=1)
    totals = np.log(np.exp(scores - top[:, None]).sum(axis=1))
    return own - top - totals, (scores > own[:, None]).sum(axis=1)


@pytest.mark.parametrize("scale", [1, 300])
def test_in_batch_softmax(scale):
    generator = np.random.default_rng(0)
    queries, items = generator.normal(size=(2, 7, 3)).astype(np.float32)
    log_q = np.log(generator.random(7)).astype(np.float32)
    scores = scale * queries.astype(np.float64) @ items.T - log_q
    ids = np.array([4, 2, 4, 1, 0, 2, 4])
    is_other = (ids[:, None] == ids) & ~np.eye(7, dtype=bool)
    own = np.diag(scores)
    for options, of_rows in (
        ({}, scores),
        ({"item_ids": ids}, np.where(is_other, -np.inf, scores)),
    ):
        got, ranks = te.nn.in_batch_softmax(
            scale * queries, jnp.array(items), jnp.array(log_q), **options
        )
        wanted, wanted_ranks = in_numpy(of_rows, own)
        np.testing.assert_array_equal(ranks, wanted_ranks)
        # Tolerance: float32 rounds scores of several hundred by 3e-5.
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
