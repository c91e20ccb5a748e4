"""Gradients at the owners of rows: each round once, each row in one round."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.lookup.stages import PADDING, full, on_shards, plan_of
from tests.tiers import quick_cases
from tpu_embedding.lookup._backward import gradient_rounds, stack_gradient
from tpu_embedding.lookup._flatten_to_owners import FeatureInput
from tpu_embedding.lookup._forward import lookup_stack
from tpu_embedding.rows.packed_rows import pack_rows

ROWS_PER_SHARD = 6
SAMPLES, VALENCE, DIM = 4, 3, 2
NUM_IDS = SAMPLES * VALENCE
MAX_ROUNDS = 8


def plan_for(num_shards, duplicates="sum", **options):
    plan = plan_of(num_shards, ROWS_PER_SHARD, DIM, **options)
    (stack,) = plan.stacks
    if duplicates != "sum":
        # A plan that is made for such a rule sums no blocks.
        spread = stack.backends.spread._replace(form="whole")
        stack = dataclasses.replace(
            stack,
            optimizer=dataclasses.replace(stack.optimizer, duplicates=duplicates),
            backends=stack.backends._replace(spread=spread, update=spread),
        )
    return dataclasses.replace(plan, stacks=(stack,))


def weights_of(num_shards):
    """Returns weights 1, 0, -1 and 2, which make the same sums in any order."""
    return np.resize(np.float32([1, 0, -1, 2]), (num_shards, NUM_IDS))


def run_stack(plan):
    """Compiles lookup, gradient and a fold over all its rounds."""
    (stack,) = plan.stacks

    def run(rows, ids, weights, cotangents):
        given = FeatureInput(
            ids=ids,
            weights=weights,
            sample_ids=None,
            num_samples=SAMPLES,
            valence=VALENCE,
        )
        found = lookup_stack(pack_rows(rows, stack.layout), [given], stack, plan)
        gradient = stack_gradient(found.routing, [cotangents], stack, plan)
        rounds = gradient_rounds(gradient, stack, plan)
        assert (gradient.pending is None) == (rounds.fold_later is None)
        assert (gradient.pending is None) == (rounds.first_rows is None)
        first = gradient.first_round

        def body(carry, gradients, row_range):
            sums, visits, ends, squares, outside, turn = carry
            updates = gradients.as_row_updates()
            sums = sums.at[updates.row_ids].add(updates.values, mode="drop")
            visits = visits.at[updates.row_ids].add(1, mode="drop")
            is_used = updates.row_ids != PADDING
            if row_range is not None:
                is_outside = updates.row_ids < row_range.first_row
                is_outside |= updates.row_ids >= row_range.end_row
                outside += jnp.sum(is_used & is_outside)
                ends = ends.at[turn].set(jnp.stack(row_range))
            occurrences = gradients.occurrences
            if occurrences is not None:
                of_ids = jnp.sum(jnp.square(occurrences.values), axis=1)
                squares = squares.at[occurrences.row_ids].add(of_ids, mode="drop")
            return sums, visits, ends, squares, outside, turn + 1

        carry = (
            jnp.zeros((ROWS_PER_SHARD, DIM)),
            jnp.zeros((ROWS_PER_SHARD,), jnp.int32),
            jnp.full((MAX_ROUNDS, 2), -1, jnp.int32),
            jnp.zeros((ROWS_PER_SHARD,)),
            jnp.int32(0),
            jnp.int32(0),
        )
        pooled = found.activations[0]
        return rounds.fold(body, carry), first, found.rounds, pooled

    return on_shards(run, plan)


def batch_of(num_shards, case):
    """Returns ids `[shard, valence * sample]` in the order of the stages."""
    vocabulary_size = num_shards * ROWS_PER_SHARD
    shape = (num_shards, NUM_IDS)
    generator = np.random.default_rng(2)
    match case:
        case "nothing":
            ids = np.full(shape, PADDING)
        case "last row":
            ids = np.full(shape, vocabulary_size - 1)
        case "one owner":
            ids = np.tile(
                np.arange(NUM_IDS) * num_shards % vocabulary_size, shape[:1] + (1,)
            )
        case "random":
            ids = generator.integers(0, vocabulary_size, shape)
            ids[generator.random(shape) < 0.2] = PADDING
    return ids.astype(np.int32)


def occurrences_of(ids, weights, cotangents, num_shards):
    """Returns `[owner][row]`, the gradients of single ids in order of their samples."""
    found = [[[] for _ in range(ROWS_PER_SHARD)] for _ in range(num_shards)]
    for shard in range(num_shards):
        for sample in range(SAMPLES):
            for i in range(sample, NUM_IDS, SAMPLES):
                if ids[shard, i] != PADDING:
                    row, owner = divmod(int(ids[shard, i]), num_shards)
                    gradient = weights[shard, i] * cotangents[shard, sample]
                    found[owner][row].append(gradient)
    return found


def inputs_of(num_shards, case):
    generator = np.random.default_rng(3)
    ids, weights = batch_of(num_shards, case), weights_of(num_shards)
    rows = generator.integers(-9, 10, (num_shards, ROWS_PER_SHARD, DIM))
    cotangents = generator.integers(-9, 10, (num_shards, SAMPLES, DIM))
    return rows.astype(np.float32), ids, weights, cotangents.astype(np.float32)


CASES = ["nothing", "last row", "one owner", "random"]
PLANS = {
    "1": (1, {}, {}),
    "1, capacity 2": (1, dict(capacity=2), {"one owner": 3, "last row": 1}),
    "3": (3, {}, {"one owner": 1}),
    "3, capacity 1": (3, dict(capacity=1), {"one owner": 6, "last row": 1}),
    "3, ragged": (3, dict(capacity=2, exchange="ragged"), {"one owner": 3}),
    "8, capacity 4": (8, dict(capacity=4), {"one owner": 2, "nothing": 1}),
}


@pytest.mark.parametrize(
    "name",
    quick_cases(
        [
            full("1"),
            "1, capacity 2",
            "3",
            full("3, capacity 1"),
            "3, ragged",
            full("8, capacity 4"),
        ],
        "1, capacity 2",
    ),
)
def test_gradients_of_all_rounds(name):
    num_shards, options, num_rounds = PLANS[name]
    run = run_stack(plan_for(num_shards, **options))
    for case in CASES:
        rows, ids, weights, cotangents = inputs_of(num_shards, case)
        folded, _, rounds, pooled = run(rows, ids, weights, cotangents)
        sums, visits, ends, _, outside, turns = folded
        occurrences = occurrences_of(ids, weights, cotangents, num_shards)
        assert rounds[0, 0] == num_rounds.get(case, rounds[0, 0])
        assert (turns == rounds[0, 0]).all()
        assert not outside.any()
        for owner in range(num_shards):
            for row in range(ROWS_PER_SHARD):
                of_row = occurrences[owner][row]
                assert visits[owner, row] == bool(of_row)
                np.testing.assert_array_equal(sums[owner, row], sum(of_row))
            check_ranges(ends[owner], rounds[0, 0] if options else 0)
        check_activations(pooled, rows, ids, weights)


def check_ranges(ranges, num_rounds):
    """The ranges of rounds follow each other, from the first row to the last."""
    used = ranges[ranges[:, 0] >= 0]
    assert len(used) == num_rounds
    if num_rounds:
        assert used[0, 0] == 0
        assert used[-1, 1] == ROWS_PER_SHARD
        np.testing.assert_array_equal(used[1:, 0], used[:-1, 1])


def check_activations(pooled, rows, ids, weights):
    num_shards = len(ids)
    expected = np.zeros((num_shards, SAMPLES, DIM))
    for shard in range(num_shards):
        for i, row in enumerate(ids[shard].tolist()):
            if row != PADDING:
                value = rows[row % num_shards, row // num_shards]
                expected[shard, i % SAMPLES] += weights[shard, i] * value
    np.testing.assert_array_equal(pooled, expected)


@pytest.mark.parametrize("num_shards", [full(1), 3])
def test_squares_of_occurrences(num_shards):
    run = run_stack(plan_for(num_shards, "norm"))
    for case in CASES:
        rows, ids, weights, cotangents = inputs_of(num_shards, case)
        folded, first, rounds, _ = run(rows, ids, weights, cotangents)
        sums, visits, _, squares, _, _ = folded
        assert rounds[0, 0] == 1
        occurrences = occurrences_of(ids, weights, cotangents, num_shards)
        for owner in range(num_shards):
            row_ids = first.occurrences.row_ids[owner]
            for row in range(ROWS_PER_SHARD):
                of_row = occurrences[owner][row]
                # Summed for the rule, and each once for the norm.
                assert visits[owner, row] == bool(of_row)
                np.testing.assert_array_equal(sums[owner, row], sum(of_row))
                assert (row_ids == row).sum() == len(of_row)
                expected = sum(np.sum(np.square(gradient)) for gradient in of_row)
                assert squares[owner, row] == expected


@pytest.mark.parametrize("num_shards", [full(1), 3])
def test_gradients_in_the_order_of_occurrences(num_shards):
    plan = plan_for(num_shards, "sequence")
    run = run_stack(plan)
    for case in CASES:
        rows, ids, weights, cotangents = inputs_of(num_shards, case)
        _, first, _, _ = run(rows, ids, weights, cotangents)
        assert first.occurrences is None
        occurrences = occurrences_of(ids, weights, cotangents, num_shards)
        for owner in range(num_shards):
            for row in range(ROWS_PER_SHARD):
                is_row = first.row_ids[owner] == row
                of_row = occurrences[owner][row]
                expected = np.reshape(of_row, (len(of_row), DIM))
                values = first.values.lines[owner][is_row]
                np.testing.assert_array_equal(values, expected)
