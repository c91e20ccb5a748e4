"""Softmax over sampled and hard negatives: equal to loops over pairs in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import matrix, quick_cases

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
    hard = sorted(negatives, reverse=True)[:num_hard]
    log_softmax = own - np.log(np.exp(own) + np.sum(np.exp(hard)))
    higher = sum(x > own for x in negatives)
    return log_softmax, higher, 1 + sum(x == own for x in negatives)


def check(found, expected):
    log_softmax, ranks = found
    wanted = np.array(expected).T
    # Sums of exponentials in float32, in another order.
    np.testing.assert_allclose(log_softmax, wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ranks.num_higher, wanted[1])
    np.testing.assert_array_equal(ranks.num_equal, wanted[2])


@pytest.mark.parametrize("num_hard", [None, 1, 3, 100])
@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("corrects", [False, True])
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


@pytest.mark.parametrize("num_hard", [None, 1, 3, 100])
@pytest.mark.parametrize("by_ids", [False, True])
def test_hard_negatives_of_the_batch(num_hard, by_ids):
    expected = []
    for i in range(BATCH):
        scores = QUERIES[i] @ ITEMS.T - LOG_Q
        is_negative = (IDS != IDS[i]) if by_ids else (np.arange(BATCH) != i)
        expected.append(reference(scores[i], scores[is_negative], num_hard))
    ids = IDS if by_ids else None
    found = te.nn.in_batch_softmax(
        QUERIES, ITEMS, LOG_Q, item_ids=ids, num_hard_negatives=num_hard
    )
    check(found, expected)


def test_only_hard_negatives_get_a_gradient_and_hits_get_none():
    def loss(negatives):
        return -te.nn.sampled_softmax(
            QUERIES[:1],
            ITEMS[:1],
            negatives,
            item_ids=IDS[:1],
            negative_ids=SAMPLED_IDS,
            num_hard_negatives=2,
        )[0].sum()

    moves = np.any(np.asarray(jax.grad(loss)(jnp.asarray(SAMPLED))) != 0, axis=1)
    scores = np.where(SAMPLED_IDS == IDS[0], -np.inf, SAMPLED @ QUERIES[0])
    np.testing.assert_array_equal(np.flatnonzero(moves), np.sort(scores.argsort()[-2:]))
    only_hits = jax.grad(
        lambda x: te.nn.sampled_softmax(
            QUERIES[:1], ITEMS[:1], x, item_ids=IDS[:1], negative_ids=np.full(9, IDS[0])
        )[0].sum()
    )(jnp.asarray(SAMPLED))
    np.testing.assert_array_equal(only_hits, 0)


def test_the_correction_estimates_the_softmax_over_all_items():
    """Its mean over draws of negatives is near the full softmax."""
    scores = np.float32([2.0, 0.5, 0.0, -1.0, 1.0])
    q = np.float32([0.4, 0.3, 0.1, 0.1, 0.1])
    num_drawn = 4000
    drawn = np.random.default_rng(1).choice(5, num_drawn, p=q / q.sum())
    found, _ = te.nn.sampled_softmax(
        np.ones((1, 1), np.float32),
        scores[:1, None],
        scores[drawn, None],
        item_log_probabilities=np.zeros(1, np.float32),  # The own item is there once.
        negative_log_probabilities=np.log(num_drawn * q)[drawn],
        item_ids=np.zeros(1, np.int32),
        negative_ids=drawn,
    )
    wanted = scores[0] - np.log(np.exp(scores).sum())
    # The sum over 4,000 draws has a standard error of 1 %.
    np.testing.assert_allclose(found[0], wanted, atol=0.05)


COLLAPSED = quick_cases(
    matrix([1, 7, 128, 200], [jnp.float32, jnp.bfloat16], [1, 8], [False, True]),
    "1-float32-8-True",
    "128-float32-1-False",
    "128-bfloat16-1-False",
    "200-float32-8-True",
)


@pytest.mark.parametrize(("dim", "dtype", "num_devices", "is_jitted"), COLLAPSED)
def test_a_collapsed_model_has_the_recall_of_a_random_order(
    dim, dtype, num_devices, is_jitted
):
    """A column of a matmul is rounded differently than a sum of products."""
    generator, log_q = np.random.default_rng(0), -1.3  # Powers of two would be exact.
    queries, vector = generator.normal(size=(64, dim)), generator.normal(size=(1, dim))
    sharding = NamedSharding(mesh_of(num_devices), PartitionSpec("shard"))
    queries, items, negatives, item_log_q, negative_log_q = (
        jax.device_put(jnp.asarray(array, dtype), sharding)
        for array in (
            queries,
            np.tile(vector, (64, 1)),
            np.tile(vector, (200, 1)),
            np.full(64, log_q),
            np.full(200, log_q),
        )
    )

    def loss(*arrays):
        return te.nn.sampled_softmax(
            *arrays,
            item_log_probabilities=item_log_q,
            negative_log_probabilities=negative_log_q,
        )

    run = jax.jit(loss) if is_jitted else loss
    log_softmax, ranks = run(queries, items, negatives)
    np.testing.assert_array_equal(ranks.num_higher, 0)
    np.testing.assert_array_equal(ranks.num_equal, 201)
    recall = te.metrics.RecallAtK.from_ranks(ranks, k=10).compute()
    assert float(recall) == pytest.approx(10 / 201, rel=1e-6)  # float32 rounding
    # bfloat16 rounds scores of up to 64 to 8 bits.
    atol = 0.5 if dtype == jnp.bfloat16 else 1e-4
    log_softmax = np.asarray(log_softmax, np.float32)
    np.testing.assert_allclose(log_softmax, -np.log(201), atol=atol)


def test_equal_vectors_with_different_probabilities_are_in_their_order():
    vectors = np.tile(np.random.default_rng(0).normal(size=(1, 131)), (5, 1))
    queries, items = np.ones((2, 131), np.float32), vectors[:2].astype(np.float32)
    _, ranks = te.nn.sampled_softmax(
        queries,
        items,
        vectors[2:].astype(np.float32),
        item_log_probabilities=np.float32([-1, -3]),
        negative_log_probabilities=np.float32([-2, -1, -3]),
    )
    np.testing.assert_array_equal(ranks.num_higher, [2, 0])
    np.testing.assert_array_equal(ranks.num_equal, [2, 2])


WIDE = np.array([5, 2**40 + 5, 2**32 - 1])
"""Modulo 2^32, the second id equals the first, and the third is -1."""


@pytest.mark.parametrize("is_jitted", [False, True])
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
def test_ids_of_different_kinds_are_compared_exactly(item_ids, negative_ids, is_jitted):
    """Only the first item is a hit, of the first negative."""

    def loss(queries):
        items, negatives = ITEMS[:3], SAMPLED[:2]
        ids = {"item_ids": item_ids, "negative_ids": negative_ids}
        return te.nn.sampled_softmax(queries, items, negatives, **ids)

    log_softmax, _ = (jax.jit(loss) if is_jitted else loss)(QUERIES[:3])
    own = np.sum(QUERIES[:3] * ITEMS[:3], axis=1)
    scores = QUERIES[:3] @ SAMPLED[:2].T
    scores[0, 0] = -np.inf
    wanted = own - np.log(np.exp(own) + np.exp(scores).sum(axis=1))
    np.testing.assert_allclose(log_softmax, wanted, rtol=1e-5)  # float32 sums


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_hard_negatives": 0}, "num_hard_negatives.*got 0"),
        ({"item_ids": IDS}, "item_ids and negative_ids"),
        ({"negative_log_probabilities": SAMPLED_LOG_Q}, "log_probabilities"),
        ({"item_ids": SAMPLED_IDS, "negative_ids": SAMPLED_IDS}, r"item_ids \[9\]"),
        (
            {"item_ids": IDS, "negative_ids": SAMPLED_IDS.astype(np.float32)},
            "negative_ids must be integers.*float32",
        ),
        ({"negatives": SAMPLED[:, :2]}, r"\[negatives, 4\].*got \[9, 2\]"),
    ],
)
def test_wrong_arguments_are_named(options, match):
    arguments = {"negatives": SAMPLED, **options}
    with pytest.raises(ValueError, match=match):
        te.nn.sampled_softmax(QUERIES, ITEMS, **arguments)
