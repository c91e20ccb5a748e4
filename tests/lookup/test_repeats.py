"""Repeats added to the first occurrences of their rows, chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.lookup import _repeats
from tpu_embedding.lookup._repeats import add_repeats
from tpu_embedding.rows.packed_rows import RowLayout, pack_rows, unpack_rows

NUM_PLACES = 9


@functools.partial(jax.jit, static_argnames="layout")
def jitted_add(sums, is_repeat, places, value_ids, values, layout):
    packed = add_repeats(
        pack_rows(sums, layout),
        is_repeat,
        places,
        value_ids,
        read_values=lambda _, ids: values[ids],
    )
    return unpack_rows(packed)


def check(is_repeat, dim=2, line_lanes=None, seed=0):
    n = len(is_repeat)
    generator = np.random.default_rng(seed)
    layout = RowLayout(num_rows=NUM_PLACES, row_shape=(dim,), line_lanes=line_lanes)
    sums = generator.integers(-9, 10, (NUM_PLACES, dim)).astype(np.float32)
    values = generator.integers(-9, 10, (n, dim)).astype(np.float32)
    places = generator.integers(0, NUM_PLACES, n).astype(np.int32)
    value_ids = generator.permutation(n).astype(np.int32)
    result = jitted_add(sums, is_repeat, places, value_ids, values, layout)
    expected = sums.copy()  # JAX may still read the array itself
    np.add.at(expected, places[is_repeat], values[value_ids[is_repeat]])
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("num_repeats", [0, 1, 127, 128, 129, 383, 384, 385, 1000])
def test_any_number_of_chunks(num_repeats, monkeypatch):
    monkeypatch.setattr(_repeats, "_MIN_CHUNK_SIZE", 128)
    is_repeat = np.random.default_rng(1).permutation(1000) < num_repeats
    check(is_repeat)


@pytest.mark.parametrize("line_lanes", [None, 128])
@pytest.mark.parametrize("dim", [1, 3, 128, 200])
def test_dims(dim, line_lanes):
    check(np.arange(12) % 3 > 0, dim, line_lanes)


@pytest.mark.parametrize("is_repeat", [[False], [True]])
def test_one_occurrence(is_repeat):
    check(np.array(is_repeat))


@pytest.mark.parametrize(
    ("num_occurrences", "chunk_size"),
    [
        (1, 1),
        (8, 8),
        (1023, 1023),
        (1025, 1024),
        (8 * 1024, 1024),
        (8 * 1024 + 1, 1152),
        (8 * 1152, 1152),
        (8 * 1152 + 1, 1280),
        (100_000, 12544),
    ],
)
def test_sizes_of_chunks(num_occurrences, chunk_size):
    sizes = []

    def read_values(sums, ids):
        assert sums.layout.num_rows == NUM_PLACES
        sizes.append(ids.shape[0])
        return jnp.zeros((ids.shape[0], 2))

    layout = RowLayout(num_rows=NUM_PLACES, row_shape=(2,))
    ids = jax.ShapeDtypeStruct((num_occurrences,), jnp.int32)
    mask = jax.ShapeDtypeStruct((num_occurrences,), bool)
    rows = jax.ShapeDtypeStruct((NUM_PLACES, 2), jnp.float32)
    jax.eval_shape(
        lambda rows, mask, places, ids: (
            add_repeats(pack_rows(rows, layout), mask, places, ids, read_values).lines
        ),
        rows,
        mask,
        ids,
        ids,
    )
    assert set(sizes) == {chunk_size}


def test_values_may_be_read_from_the_sums():
    """As the merge does: places of repeats keep what they held."""
    layout = RowLayout(num_rows=4, row_shape=(1,))
    result = add_repeats(
        pack_rows(jnp.array([[1.0], [2], [4], [8]]), layout),
        jnp.array([False, True, True, False]),
        places=jnp.array([0, 0, 0, 3], jnp.int32),
        value_ids=jnp.array([0, 1, 2, 3], jnp.int32),
        read_values=lambda sums, ids: unpack_rows(sums)[ids],
    )
    assert unpack_rows(result)[:, 0].tolist() == [7, 2, 4, 8]
