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
    count_below,
    dedup,
    id_at_rank,
)
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, Touched

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
    return dataclasses.replace(stack, num_shards=SHARDS, trained_by=optimizer)


QUERIES = jnp.array([0, 1, 4, 5, 9, 10, 13, 14, 15, PADDING], jnp.int32)


def run(keys, stack):
    unique = dedup(
        (keys,),
        stack.num_shards,
        stack.rows_per_shard,
        keeps_duplicates=stack.keeps_duplicates,
    )
    by_shard = jnp.array([7, 3, 5], jnp.int32)
    return (
        unique,
        count_below((QUERIES,), unique),
        broadcast_to_ids(by_shard, unique),
        id_at_rank(jnp.arange(12, dtype=jnp.int32), unique)[0],
    )


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
    unique, below, by_id, at_rank = result

    in_order = np.sort(keys)
    np.testing.assert_array_equal(unique.sorted_keys, in_order)
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

    expected = [int((distinct < query).sum()) for query in np.asarray(QUERIES)]
    np.testing.assert_array_equal(below, expected)
    is_used = in_order != PADDING
    values = np.array([7, 3, 5])[in_order[is_used] // ROWS]
    np.testing.assert_array_equal(by_id[is_used], values)
    expected = [*distinct, *[PADDING] * 12][:12]
    np.testing.assert_array_equal(at_rank, expected)


def test_ids_of_several_words_are_ordered_as_tuples():
    random = np.random.default_rng(0)
    keys = random.choice([0, 4, 5, 14, PADDING], 40).astype(np.int32)
    words = [random.choice(np.uint32([0, 1, 2**31, 2**32 - 1]), 40) for _ in "ab"]
    queries = [(0, 0, 0), (4, 1, 2**31), (5, 0, 0), (14, 2**32 - 1, 1), (15, 0, 0)]
    query_words = [
        np.array(x, d)
        for x, d in zip(
            zip(*queries, strict=True), [np.int32, *[np.uint32] * 2], strict=True
        )
    ]

    @jax.jit
    def run(ids, queries):
        unique = dedup(ids, SHARDS, ROWS, keeps_duplicates=False)
        ranks = jnp.arange(40, dtype=jnp.int32)
        return unique, count_below(queries, unique), id_at_rank(ranks, unique)

    unique, below, at_rank = run((keys, *words), tuple(query_words))
    ids = list(zip(*(x.tolist() for x in (keys, *words)), strict=True))
    in_order = list(zip(*(x.tolist() for x in unique.words), strict=True))
    assert in_order == sorted(ids)
    assert [ids[i] for i in unique.order] == in_order
    distinct = sorted(set(ids))
    assert unique.ranks.tolist() == [distinct.index(x) for x in in_order]
    assert below.tolist() == [sum(x < q for x in distinct) for q in queries]
    found = list(zip(*(x.tolist() for x in at_rank), strict=True))
    assert found[: len(distinct)] == distinct
