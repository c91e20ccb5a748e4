"""Ragged and sparse ids, split by shard and padded."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import tpu_embedding as te
from tests.inputs.prepare_cases import (
    PADDING,
    RAGGED,
    prepare,
    ragged,
    sparse,
)


@pytest.mark.parametrize(
    ("num_devices", "values", "row_splits"),
    [
        (1, [[1, 2, 3, 4, 5]], [[0, 1, 1, 3, 4, 5]]),
        (4, [[1], [2, 3, 4], [5], []], [[0, 1, 1], [0, 2, 3], [0, 1, 1], [0, 0, 0]]),
    ],
)
def test_samples_are_dealt_to_shards_in_order(num_devices, values, row_splits):
    weights = np.arange(5) + 0.5
    ids = ragged([1, 2, 3, 4, 5], [0, 1, 1, 3, 4, 5], weights)
    prepared = prepare(ids, num_devices=num_devices)
    assert isinstance(prepared, te.inputs.ShardedRaggedIds)
    assert prepared.batch_size == 5
    assert prepared.row_splits.tolist() == row_splits
    assert prepared.values.shape == prepared.weights.shape == (num_devices, 8)
    for shard, of_shard in enumerate(values):
        end = len(of_shard)
        assert prepared.values[shard, :end].tolist() == of_shard
        assert (prepared.values[shard, end:] == PADDING).all()
        expected = [value - 0.5 for value in of_shard]
        assert prepared.weights[shard, :end].tolist() == expected
        assert not prepared.weights[shard, end:].any()
    for array in (prepared.values, prepared.row_splits):
        assert array.dtype == np.int32
    assert prepared.weights.dtype == np.float32
    assert prepare(RAGGED, num_devices=num_devices).weights is None


@pytest.mark.parametrize(
    ("expected_valence", "batch", "most", "size"),
    [
        *((None, 3, 0, 8), (None, 3, 8, 8), (None, 3, 9, 16), (None, 3, 100, 128)),
        *((3, 8, 0, 12), (3, 8, 12, 12), (3, 8, 13, 24), (2.5, 8, 10, 10)),
        *((3, 7, 12, 12), (0.01, 8, 0, 1)),  # 7 samples are 4 a shard.
    ],
)
def test_buffers_hold_the_fullest_shard(expected_valence, batch, most, size):
    """Buffers begin at the expected valence, or 8 ids, and double."""
    ids = ragged(np.zeros(most, int), [0, *[0] * (batch - 1), most])
    prepared = prepare(ids, expected_valence=expected_valence)
    assert prepared.values.shape == (2, size)
    assert (prepared.values != PADDING).sum() == most  # Never an id lost.


def test_empty_values_of_any_type():
    prepared = prepare(ragged([], [0, 0, 0]))
    assert prepared.values.dtype == np.int32
    assert (prepared.values == PADDING).all()
    assert prepared.batch_size == 2
    assert prepare(sparse(np.zeros((0, 2), int), [])).batch_size == 3


@st.composite
def coordinates(draw):
    """Draws a dense shape and places in it, in any order, some of them equal."""
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    places = draw(st.lists(st.tuples(*(st.integers(0, n - 1) for n in shape))))
    if draw(st.booleans()):
        places.sort()
    return shape, places


@hypothesis.given(coordinates())
def test_any_order_gives_the_ids_by_sample_and_position(drawn):
    shape, places = drawn
    values = np.arange(len(places)) % 10
    weights = np.arange(len(places)) + 0.5
    batch_shape = tuple(shape[:-1])
    prepared = prepare(
        sparse(places, values, shape, weights),
        num_devices=2,
        output_shape=batch_shape,
    )
    # Python's sort is stable, so ids at equal places keep their order.
    order = sorted(range(len(places)), key=lambda i: places[i])
    expected = [[] for _ in range(int(np.prod(batch_shape)))]
    for i in order:
        sample = np.ravel_multi_index(places[i][:-1], batch_shape)
        expected[sample].append((values[i], weights[i]))
    found = [
        list(zip(ids[a:b], weights[a:b], strict=True))
        for ids, weights, splits in zip(
            prepared.values, prepared.weights, prepared.row_splits, strict=True
        )
        for a, b in zip(splits[:-1], splits[1:], strict=True)
    ]
    assert found[: len(expected)] == expected
    assert not any(found[len(expected) :])


@hypothesis.given(coordinates(), st.integers(1, 5))
def test_sequences_in_any_order(drawn, length):
    shape, places = drawn
    shape, places = shape[-2:], sorted({place[-2:] for place in places}, key=hash)
    values = np.arange(len(places)) % 10
    prepared = prepare(sparse(places, values, shape), max_sequence_length=length)
    expected = np.full((shape[0], length), PADDING)
    for (sample, position), value in zip(places, values, strict=True):
        if position < length:
            expected[sample, position] = value
    np.testing.assert_array_equal(prepared, expected)
