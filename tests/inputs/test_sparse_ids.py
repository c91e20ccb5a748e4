"""Sparse ids become ragged ones, or the matrix of a sequence."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from tests.inputs.prepare_cases import (
    PADDING,
    prepare,
    sparse,
)


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
