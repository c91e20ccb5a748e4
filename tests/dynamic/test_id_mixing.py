"""Mixed ids: one to one, equal in NumPy and JAX, and spread evenly over buckets."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.dynamic.ids_64 import NO_ID, mix_ids, multiply_high, unmix_ids


def words_of(ids):
    ids = np.asarray(ids, np.uint64)
    return (ids >> np.uint64(32)).astype(np.uint32), ids.astype(np.uint32)


def random_ids(size, seed=0):
    draw = np.random.default_rng(seed)
    return draw.integers(0, 2**64 - 1, size, dtype=np.uint64)


def test_mixing_can_be_undone():
    edges = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 2, 2**64 - 1]
    words = words_of(np.concatenate([np.uint64(edges), random_ids(10**6)]))
    for expected, found in zip(words, unmix_ids(*mix_ids(*words)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_no_id_stays_no_id_and_no_other_becomes_it():
    none = np.full(1, NO_ID)
    assert [int(x[0]) for x in mix_ids(none, none)] == [NO_ID, NO_ID]
    # The id that the network alone would turn into "no id".
    before = unmix_ids(*mix_ids(none, none))
    assert [int(x[0]) for x in before] == [NO_ID, NO_ID]
    first, second = mix_ids(*words_of(np.arange(10**6)))
    assert not np.any((first == NO_ID) & (second == NO_ID))


def test_jax_mixes_as_numpy_does():
    words = words_of(random_ids(10_000))
    of_jax = mix_ids(*map(jnp.asarray, words))
    for expected, found in zip(mix_ids(*words), of_jax, strict=True):
        assert found.dtype == jnp.uint32
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("factor", [1, 3, 64, 15_625, 2**25 + 1, 2**31 - 1])
def test_buckets_rise_with_the_first_word(factor):
    words = np.concatenate([words_of(random_ids(10_000))[0], [np.uint32(0), NO_ID]])
    expected = (words.astype(np.uint64) * np.uint64(factor)) >> np.uint64(32)
    np.testing.assert_array_equal(multiply_high(words, factor), expected)
    np.testing.assert_array_equal(multiply_high(jnp.asarray(words), factor), expected)


@pytest.mark.parametrize("ids", [np.arange(2**20), np.arange(2**20) << 40])
def test_neighbouring_ids_spread_over_buckets(ids):
    first, _ = mix_ids(*words_of(ids))
    counts = np.bincount(multiply_high(first, 1024), minlength=1024)
    # Chi squared of 1023 degrees of freedom: 1023 and a deviation of 45.
    chi_squared = np.sum((counts - 1024.0) ** 2) / 1024
    assert 800 < chi_squared < 1250
