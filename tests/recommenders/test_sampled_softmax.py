"""Softmax over sampled and hard negatives: equal to loops over pairs in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tests.tiers import each_once

BATCH, NEGATIVES, DIM = 6, 9, 4
RNG = np.random.default_rng(0)
QUERIES, ITEMS = RNG.normal(size=(2, BATCH, DIM)).astype(np.float32)
SAMPLED = RNG.normal(size=(NEGATIVES, DIM)).astype(np.float32)
IDS = np.array([3, 1, 4, 1, 5, 9], np.int32)
SAMPLED_IDS = np.array([1, 2, 3, 4, 1, 6, 7, 8, 0], np.int32)
LOG_Q = np.log(RNG.uniform(0.01, 1, BATCH)).astype(np.float32)
SAMPLED_LOG_Q = np.log(RNG.uniform(0.01, 1, NEGATIVES)).astype(np.float32)


def reference(own, negatives, num_hard):
    """Returns log-softmax, and numbers of higher and equal scores, of one query."""
    own, negatives = np.float64(own), np.float64(negatives)
    hard = np.sort(negatives)[::-1][:num_hard]
    top = max([own, *hard])
    total = np.log(np.exp(own - top) + np.sum(np.exp(hard - top)))
    higher, equal = np.sum(negatives > own), np.sum(negatives == own)
    return own - top - total, higher, 1 + equal


def check(found, expected, atol=1e-6):
    log_softmax, ranks = found
    wanted = np.array(expected).T
    # Sums of exponentials in float32, in another order.
    np.testing.assert_allclose(log_softmax, wanted[0], rtol=1e-5, atol=atol)
    np.testing.assert_array_equal(ranks.num_higher, wanted[1])
    np.testing.assert_array_equal(ranks.num_equal, wanted[2])


HARD = [None, 1, 3, 100]


@pytest.mark.parametrize(
    ("num_hard", "by_ids", "corrects"), each_once(HARD, [False, True], [True, False])
)
def test_sampled_negatives(num_hard, by_ids, corrects):
    options = {"num_hard_negatives": num_hard}
    if by_ids:
        options |= {"item_ids": IDS, "negative_ids": SAMPLED_IDS}
    if corrects:
        options |= {
            "item_log_probabilities": LOG_Q,
            "negative_log_probabilities": SAMPLED_LOG_Q,
        }
    expected = []
    for i in range(BATCH):
        own = QUERIES[i] @ ITEMS[i] - corrects * LOG_Q[i]
        scores = [
            QUERIES[i] @ SAMPLED[j] - corrects * SAMPLED_LOG_Q[j]
            for j in range(NEGATIVES)
            if not by_ids or IDS[i] != SAMPLED_IDS[j]
        ]
        expected.append(reference(own, scores, num_hard))
    found = jax.jit(lambda: te.nn.sampled_softmax(QUERIES, ITEMS, SAMPLED, **options))()
    check(found, expected)


@pytest.mark.parametrize(
    ("num_hard", "by_ids", "scale"), each_once(HARD, [False, True], [1, 300])
)
def test_hard_negatives_of_the_batch(num_hard, by_ids, scale):
    expected = []
    for i in range(BATCH):
        scores = scale * QUERIES[i] @ ITEMS.T - LOG_Q
        is_negative = (IDS != IDS[i]) if by_ids else (np.arange(BATCH) != i)
        expected.append(reference(scores[i], scores[is_negative], num_hard))
    ids = IDS if by_ids else None
    found = te.nn.in_batch_softmax(
        scale * QUERIES, ITEMS, LOG_Q, item_ids=ids, num_hard_negatives=num_hard
    )
    # float32 rounds scores of several hundred by 3e-5.
    check(found, expected, atol=1e-6 if scale == 1 else 1e-4)


def test_only_hard_negatives_get_a_gradient_and_hits_get_none():
    def gradients(negative_ids, num_hard):
        ids = {"item_ids": IDS[:1], "negative_ids": negative_ids}

        def loss(negatives):
            return te.nn.sampled_softmax(
                *(QUERIES[:1], ITEMS[:1], negatives), num_hard_negatives=num_hard, **ids
            )[0].sum()

        return np.asarray(jax.grad(loss)(jnp.asarray(SAMPLED)))

    moves = np.any(gradients(SAMPLED_IDS, 2) != 0, axis=1)
    scores = np.where(SAMPLED_IDS == IDS[0], -np.inf, SAMPLED @ QUERIES[0])
    np.testing.assert_array_equal(np.flatnonzero(moves), np.sort(scores.argsort()[-2:]))
    np.testing.assert_array_equal(gradients(np.full(9, IDS[0]), None), 0)


WIDE = np.array([5, 2**40 + 5, 2**32 - 1])
"""Modulo 2^32, the second id equals the first, and the third is -1."""


@pytest.mark.parametrize(
    ("item_ids", "negative_ids"),
    [
        (WIDE, jnp.array([5, -1])),
        (WIDE.tolist(), jnp.array([5, -1])),
        (WIDE.astype(np.uint64), jnp.array([5, -1])),
        (WIDE, np.array([5, 2**64 - 1], np.uint64)),
        (jnp.array([5, 6, 2**32 - 1], jnp.uint32), jnp.array([5, -1])),
        ([jnp.int32(5), jnp.int32(6), jnp.int32(7)], np.array([5, 2**32 + 6])),
        (jnp.array([5, 6, -1], jnp.int16), WIDE[[0, 2]]),
        (jnp.array([5, 6, -1], jnp.int8), np.array([5, 255])),
    ],
)
def test_ids_of_different_kinds_are_compared_exactly(item_ids, negative_ids):
    """Only the first item is a hit, of the first negative."""

    def loss(queries):
        items, negatives = ITEMS[:3], SAMPLED[:2]
        ids = {"item_ids": item_ids, "negative_ids": negative_ids}
        return te.nn.sampled_softmax(queries, items, negatives, **ids)

    own = np.sum(QUERIES[:3] * ITEMS[:3], axis=1)
    scores = QUERIES[:3] @ SAMPLED[:2].T
    scores[0, 0] = -np.inf
    wanted = own - np.log(np.exp(own) + np.exp(scores).sum(axis=1))
    for run in (loss, jax.jit(loss)):
        np.testing.assert_allclose(run(QUERIES[:3])[0], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_hard_negatives": 0}, "num_hard_negatives"),
        ({"item_ids": IDS}, "negative_ids"),
        ({"negative_log_probabilities": SAMPLED_LOG_Q}, "item_log_probabilities"),
        ({"item_ids": SAMPLED_IDS, "negative_ids": SAMPLED_IDS}, "shapes"),
        (
            {"item_ids": IDS, "negative_ids": SAMPLED_IDS.astype(np.float32)},
            "negative_ids",
        ),
        ({"negatives": SAMPLED[:, :2]}, "negatives"),
    ],
)
def test_wrong_arguments_are_named(options, field):
    with rejects(field=field):
        te.nn.sampled_softmax(QUERIES, ITEMS, **{"negatives": SAMPLED, **options})
