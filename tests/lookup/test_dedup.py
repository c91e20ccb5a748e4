"""The order and ranks of ids of several words."""

import jax
import jax.numpy as jnp
import numpy as np

import tpu_embedding as te
from tpu_embedding.lookup._rounds import count_below, dedup, id_at_rank

SHARDS, ROWS = 3, 5
PADDING = te.inputs.PADDING_ROW_ID


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
