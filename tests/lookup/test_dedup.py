"""Sorting, ranks and destinations of the keys of one shard."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.lookup.stages import PADDING, plan_of
from tpu_embedding.lookup import _rounds
from tpu_embedding.lookup._rounds import (
    broadcast_to_ids,
    sort_ids,
)
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, Touched
from tpu_embedding.plan.capacity import round_size

NUM_IDS = 10
SHARDS, ROWS = 3, 5
ALL_KEYS = SHARDS * ROWS

CASES = {
    "nothing": [PADDING] * 10,
    "one key": [14] * 10,
    "first and last": [14, 0, 14, 0, 14, 0, 14, 0, 14, 0],
    "edges of shards": [4, 5, 9, 10, 14, 0, PADDING, 5, 10, PADDING],
    "rising": [0, 1, 2, 5, 6, 7, 10, 11, 12, 13],
    "falling": [13, 12, 11, 10, 7, 6, 5, 2, 1, 0],
    "middle shard only": [7, PADDING, 7, 6, 9, 9, 5, PADDING, 7, 6],
    "last shard only": [10, 11, PADDING, 14, 14, 14, 10, PADDING, 11, 14],
    "almost padding": [PADDING] * 9 + [0],
}


@functools.cache
def stack_of(keeps_duplicates=False):
    stack = plan_of(1, ROWS).stacks[0]
    optimizer = RowOptimizer(
        transformation=optax.identity(),
        driver=Touched(occurrence_norm=keeps_duplicates),
    )
    return dataclasses.replace(stack, num_shards=SHARDS, optimizer=optimizer)


SIZE = round_size(NUM_IDS, SHARDS, ROWS, capacity=2)


def run(keys, stack):
    unique = sort_ids(
        (keys,),
        SIZE,
        stack.num_shards,
        stack.rows_per_shard,
        keeps_duplicates=stack.keeps_duplicates,
    )
    return unique, broadcast_to_ids(jnp.array([7, 3, 5], jnp.int32), unique)


jitted_run = jax.jit(run, static_argnums=1)
# A long array is searched by another method, which must find the same.
searched_run = jax.jit(lambda keys, stack: run(keys, stack), static_argnums=1)


@pytest.mark.parametrize("is_long", [False, True], ids=["compared", "searched"])
@pytest.mark.parametrize("keeps_duplicates", [False, True], ids=["unique", "all"])
@pytest.mark.parametrize("case", CASES)
def test_equals_numpy(case, keeps_duplicates, is_long, monkeypatch):
    if is_long:
        monkeypatch.setattr(_rounds, "_MAX_COMPARISONS", 0)
    keys = np.array(CASES[case], np.int32)
    compiled = searched_run if is_long else jitted_run
    result = compiled(keys, stack_of(keeps_duplicates))
    unique, by_id = result

    in_order = np.sort(keys)
    np.testing.assert_array_equal(unique.keys, in_order)
    assert sorted(np.asarray(unique.order)) == list(range(NUM_IDS))
    np.testing.assert_array_equal(keys[unique.order], in_order)
    if keeps_duplicates:
        distinct = in_order
        np.testing.assert_array_equal(unique.order, np.argsort(keys, kind="stable"))
        ranks = np.arange(NUM_IDS)
    else:
        distinct, ranks = np.unique(in_order, return_inverse=True)
    np.testing.assert_array_equal(unique.ranks, ranks)
    first_keys = [0, ROWS, 2 * ROWS, ALL_KEYS]
    places = [int((keys < first).sum()) for first in first_keys]
    np.testing.assert_array_equal(unique.first_positions, places)
    first_ranks = [int((distinct < first).sum()) for first in first_keys]
    np.testing.assert_array_equal(unique.first_ranks, first_ranks)

    is_used = in_order != PADDING
    values = np.array([7, 3, 5])[in_order[is_used] // ROWS]
    np.testing.assert_array_equal(by_id[is_used], values)
    padding = [PADDING] * (NUM_IDS + SIZE.bucket_size - len(distinct))
    np.testing.assert_array_equal(unique.distinct[0], [*distinct, *padding])


def test_ids_of_several_words_are_ordered_as_tuples():
    random = np.random.default_rng(0)
    keys = random.choice([0, 4, 5, 14, PADDING], 40).astype(np.int32)
    values = np.uint32([0, 1, 2**31, 2**32 - 1])
    words = [random.choice(values, 40) for _ in "ab"]
    companions = random.integers(0, 9, 40).astype(np.uint32)

    @jax.jit
    def run(*words):
        return sort_ids(words, SIZE, SHARDS, ROWS, num_id_words=3)

    unique = run(keys, *words, companions)
    ids = list(zip(*(x.tolist() for x in (keys, *words)), strict=True))
    in_order = [ids[i] for i in unique.order]
    assert in_order == sorted(ids)
    assert unique.keys.tolist() == [key for key, *_ in in_order]
    distinct = sorted(set(ids))
    assert unique.ranks.tolist() == [distinct.index(x) for x in in_order]
    found = list(zip(*(x.tolist() for x in unique.distinct), strict=True))
    # The smallest companion of equal ids travels.
    smallest = [
        min(c for x, c in zip(ids, companions.tolist(), strict=True) if x == y)
        for y in distinct
    ]
    expected = [(*x, c) for x, c in zip(distinct, smallest, strict=True)]
    assert found[: len(distinct)] == expected
