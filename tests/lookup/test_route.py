"""Rounds, their ranges of rows, and the places of ids in buffers."""

import functools

import numpy as np
import pytest

from tests.lookup.stages import (
    PADDING,
    buckets_of,
    lines_of,
    on_shards,
    place_at_source,
    plan_of,
    round_size_of,
    rounds_of,
    rows_by_owner,
)
from tests.tiers import matrix
from tpu_embedding.lookup._dedup import dedup
from tpu_embedding.lookup._route import route, route_all

NUM_IDS = 14
ROWS_PER_SHARD = 7
SIZES = {
    "1-padded": (1, round_size_of("padded", 3)),
    "3-padded": (3, round_size_of("padded", 3, num_shards=3)),
    "3-ragged": (3, round_size_of("ragged", 3, received_rows=8, num_shards=3)),
    # Lines of 4 rows: 4 lines, so that each of 3 shards gets one, of 4 rows.
    "3-lines": (3, round_size_of("ragged", 6, 4, received_rows=20, num_shards=3)),
}


def requests_of_owner(num_shards, owner, counts):
    """Returns keys of the first rows of one owner, so many for each source."""
    keys = np.full((num_shards, NUM_IDS), PADDING)
    for source in range(num_shards):
        rows = np.arange(counts[source % len(counts)])
        keys[source, : len(rows)] = owner * ROWS_PER_SHARD + rows[::-1]
    return keys


def random_keys(num_shards, seed):
    generator = np.random.default_rng(seed)
    keys = generator.integers(0, num_shards * ROWS_PER_SHARD, (num_shards, NUM_IDS))
    keys[generator.random(keys.shape) < 0.3] = PADDING
    return keys


def last_rows(num_shards):
    """Returns twice the last row of each owner, and padding around it."""
    owners = np.resize(np.arange(num_shards), NUM_IDS // 4)
    keys = np.full((num_shards, NUM_IDS), PADDING)
    keys[:, 2 : 2 + 2 * len(owners)] = np.tile((owners + 1) * ROWS_PER_SHARD - 1, 2)
    return keys


CASES = {
    "nothing": lambda n: np.full((n, NUM_IDS), PADDING),
    "one row": lambda n: np.full((n, NUM_IDS), n * ROWS_PER_SHARD - 1),
    "last rows": last_rows,
    "random": lambda n: random_keys(n, 0),
    "random again": lambda n: random_keys(n, 1),
    "every row of an owner twice": lambda n: np.tile(np.arange(7), (n, 2)),
    "capacity hit": lambda n: requests_of_owner(n, n - 1, [3]),
    "capacity exceeded": lambda n: requests_of_owner(n, n - 1, [4, 1, 3]),
    # 3 + 2 + 2 rows are all that the owner has room for in "3-ragged".
    "room hit": lambda n: requests_of_owner(n, 0, [3, 2, 2]),
    "room exceeded": lambda n: requests_of_owner(n, 0, [3, 2, 3]),
    # 2 + 1 + 1 lines, or 2 + 2 + 1, in "3-lines".
    "lines hit": lambda n: requests_of_owner(n, 0, [5, 4, 1]),
    "lines exceeded": lambda n: requests_of_owner(n, 0, [5, 5, 1]),
    "other owners": lambda n: requests_of_owner(n, n // 2, [7, 0, 1, 5]),
}


@functools.cache
def program(name):
    num_shards, size = SIZES[name]
    plan = plan_of(num_shards, ROWS_PER_SHARD)
    stack = plan.stacks[0]

    def run(keys, first_ranks):
        return route(dedup(keys, stack), first_ranks, size, stack, plan)

    return on_shards(run, plan)


def check_round(result, source, keys, sent, size):
    """Compares the buffers of one source with the rows that it sends."""
    expected_places = []
    for key in keys:
        place = size.sent_rows
        if key != PADDING:
            owner, row = divmod(int(key), ROWS_PER_SHARD)
            if row in sent[owner]:
                place = place_at_source(sent, owner, size) + sent[owner].index(row)
        expected_places.append(place)
    np.testing.assert_array_equal(result.places[source], expected_places)
    order = np.asarray(result.ids_by_row.order[source])
    assert sorted(order) == list(range(len(keys)))
    assert (np.diff(np.asarray(keys)[order]) >= 0).all()
    np.testing.assert_array_equal(
        result.ids_by_row.places[source], np.asarray(expected_places)[order]
    )
    np.testing.assert_array_equal(result.row_ids[source], buckets_of(sent, size))
    assert result.row_ids[source, -1] == PADDING
    np.testing.assert_array_equal(result.num_ids[source], [len(x) for x in sent])


@pytest.mark.parametrize(("name", "case"), matrix(SIZES, CASES))
def test_every_round(name, case):
    num_shards, size = SIZES[name]
    keys = CASES[case](num_shards).astype(np.int32)
    rows = rows_by_owner(keys, num_shards, ROWS_PER_SHARD)
    counts = np.array([[len(x) for x in of_source] for of_source in rows], np.int32)
    ranks = np.cumsum(counts, axis=1, dtype=np.int32) - counts
    rounds = rounds_of(rows, size, ROWS_PER_SHARD)
    for sent, ends in rounds:
        result = program(name)(keys, ranks)
        for source in range(num_shards):
            check_round(result, source, keys[source], sent[source], size)
        ranks += np.array([[len(x) for x in of_source] for of_source in sent], np.int32)
        np.testing.assert_array_equal(result.next_ranks, ranks)
        np.testing.assert_array_equal(result.end_row, ends)
        is_last = ends == [ROWS_PER_SHARD] * num_shards
        assert np.asarray(result.is_last).tolist() == [is_last] * num_shards
    # The cases do what their names say.
    num_rounds = {
        ("3-padded", "capacity hit"): 1,
        ("3-padded", "capacity exceeded"): 2,
        ("3-ragged", "room hit"): 1,
        ("3-ragged", "room exceeded"): 2,
        ("3-lines", "lines hit"): 1,
        ("3-lines", "lines exceeded"): 2,
    }
    assert len(rounds) == num_rounds.get((name, case), len(rounds))
    lines = [
        sum(lines_of(len(x), size) for x in of) for sent, _ in rounds for of in sent
    ]
    assert max(lines) * size.rows_per_line <= size.sent_rows


@pytest.mark.parametrize(("kind", "rows_per_line"), [("padded", 1), ("ragged", 4)])
def test_all_in_one_round(kind, rows_per_line):
    size = round_size_of(kind, 7, rows_per_line, received_rows=99, num_shards=3)
    plan = plan_of(3, ROWS_PER_SHARD)
    stack = plan.stacks[0]
    run = on_shards(lambda keys: route_all(dedup(keys, stack), size, stack), plan)
    for case in ("nothing", "random", "last rows", "every row of an owner twice"):
        keys = CASES[case](3).astype(np.int32)
        rows = rows_by_owner(keys, 3, ROWS_PER_SHARD)
        sent = [[sorted(x) for x in of_source] for of_source in rows]
        result = run(keys)
        for source in range(3):
            check_round(result, source, keys[source], sent[source], size)
        counts = [[len(x) for x in of_source] for of_source in sent]
        np.testing.assert_array_equal(result.next_ranks, np.cumsum(counts, axis=1))
        assert np.asarray(result.end_row).tolist() == [ROWS_PER_SHARD] * 3
        assert np.asarray(result.is_last).all()
