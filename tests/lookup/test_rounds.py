"""The loop over the rounds after the first."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.lookup.stages import (
    PADDING,
    full,
    on_shards,
    plan_of,
    round_size_of,
    rounds_of,
    rows_by_owner,
)
from tpu_embedding.lookup._dedup import dedup
from tpu_embedding.lookup._rounds import PendingRounds, for_each_round
from tpu_embedding.lookup._route import route

ROWS_PER_SHARD = 7
NUM_IDS = 12
MAX_ROUNDS = 10


def every_round(plan, size):
    """Compiles a count of requested rows and a list of end rows, round by round."""
    stack = plan.stacks[0]
    num_keys = stack.num_shards * ROWS_PER_SHARD
    owners = jnp.repeat(jnp.arange(stack.num_shards), size.bucket_size)

    def run(keys):
        unique = dedup(keys, stack)
        first = route(unique, unique.first_ranks[:-1], size, stack, plan)
        pending = PendingRounds(
            dedup=unique,
            next_ranks=first.next_ranks,
            end_row=first.end_row[None],
            is_pending=~first.is_last[None],
            size=size,
        )

        def body(carry, current):
            requests, ends, turn = carry
            is_used = current.row_ids != PADDING
            keys = jnp.where(
                is_used, owners * ROWS_PER_SHARD + current.row_ids, num_keys
            )
            requests = requests.at[keys].add(1, mode="drop")
            return requests, ends.at[turn].set(current.end_row), turn + 1

        carry = (
            jnp.zeros((num_keys,), jnp.int32),
            jnp.full((MAX_ROUNDS,), -1, jnp.int32),
            jnp.int32(0),
        )
        (requests, ends, turns), rounds = for_each_round(
            pending, body, carry, stack, plan
        )
        return requests, ends, turns, rounds

    return on_shards(run, plan)


@pytest.mark.parametrize(("num_shards", "capacity"), [full(1, 3), (3, 1), full(8, 2)])
def test_each_pending_row_travels_once(num_shards, capacity):
    size = round_size_of("padded", capacity, num_shards=num_shards)
    run = every_round(plan_of(num_shards, ROWS_PER_SHARD), size)
    num_keys = num_shards * ROWS_PER_SHARD
    generator = np.random.default_rng(0)
    shape = (num_shards, NUM_IDS)
    few = np.full(shape, PADDING)
    few[-1, 3] = num_keys - 1
    all_of_one = np.tile(np.arange(NUM_IDS) % ROWS_PER_SHARD, (num_shards, 1))
    is_first_shard = np.arange(num_shards)[:, None] == 0
    cases = {
        "nothing": np.full(shape, PADDING),
        "one row": few,
        "every row of one owner": all_of_one,
        "one shard only": np.where(is_first_shard, all_of_one, PADDING),
        "random": generator.integers(0, num_keys, shape),
    }
    seen = {}
    for name, keys in cases.items():
        keys = keys.astype(np.int32)
        rows = rows_by_owner(keys, num_shards, ROWS_PER_SHARD)
        first, *later = rounds_of(rows, size, ROWS_PER_SHARD)
        requests, ends, turns, rounds = run(keys)
        assert rounds.tolist() == turns.tolist() == [len(later)] * num_shards
        seen[name] = len(later)
        for shard in range(num_shards):
            expected = np.zeros(num_keys)
            for sent, _ in later:
                for owner in range(num_shards):
                    expected[
                        np.array(sent[shard][owner], int) + owner * ROWS_PER_SHARD
                    ] += 1
            np.testing.assert_array_equal(requests[shard], expected)
            end_rows = [of_owners[shard] for _, of_owners in later]
            padding = [-1] * (MAX_ROUNDS - len(later))
            assert ends[shard].tolist() == end_rows + padding
    assert seen["nothing"] == seen["one row"] == 0
    assert seen["every row of one owner"] == -(-ROWS_PER_SHARD // capacity) - 1
