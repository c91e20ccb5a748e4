"""The random bits of rows are those of JAX's generator, counted by row and column."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.initializers import key_words, row_bits, threefry

KEY = jax.random.key(2**40 + 5)


def test_threefry_is_that_of_jax():
    counts = np.random.default_rng(0).integers(0, 2**32, (2, 50), np.uint32)
    words = jax.random.key_data(KEY)
    expected = jax.extend.random.threefry_2x32(words, counts.ravel()).reshape(2, 50)
    found = jax.jit(threefry)(words[0], words[1], *map(jnp.asarray, counts))
    np.testing.assert_array_equal(found, expected)


def test_every_word_of_a_longer_key_counts():
    data = np.asarray(jax.random.key_data(jax.random.key(5, impl="rbg")))
    assert data.shape == (4,)
    changed = [data + np.eye(4, dtype=np.uint32)[i] for i in range(4)]
    words = {
        tuple(key_words(jax.random.wrap_key_data(jnp.asarray(d), impl="rbg")).tolist())
        for d in (data, *changed)
    }
    assert len(words) == 5


@pytest.mark.parametrize("dim", [1, 2, 3, 64])
def test_bits_depend_on_row_and_column_only(dim):
    rows = np.asarray([5, 0, 2**31 - 2, 5], np.int32)
    bits = np.asarray(row_bits(KEY, jnp.asarray(rows), dim))
    assert bits.shape == (4, dim) and bits.dtype == np.uint32
    np.testing.assert_array_equal(bits[0], bits[3])
    assert np.unique(bits).size == 3 * dim
    alone = np.asarray(row_bits(KEY, jnp.asarray(rows[2:3]), dim))
    np.testing.assert_array_equal(alone, bits[2:3])
