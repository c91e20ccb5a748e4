"""Tests the hash of keys against runs of the library that MLPerf's reference uses."""

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tpu_embedding.tools.data.yambda.xxhash64 import xxh64


@pytest.mark.parametrize("num_keys", [2, 3])
def test_hashes_are_those_of_the_library(num_keys):
    with np.load(GOLDEN / "dlrm_v4" / "data_pipeline.npz") as arrays:
        keys = list(arrays[f"hash.keys{num_keys}"].T)
        for seed in (0, 7):
            expected = arrays[f"hash.xxh64_seed{seed}_keys{num_keys}"]
            np.testing.assert_array_equal(xxh64(keys, seed=seed), expected)
        expected = arrays[f"hash.mod_100000000_keys{num_keys}"]
    np.testing.assert_array_equal(xxh64(keys) % np.uint64(100_000_000), expected)


HASHES = [
    9642548396912002761,
    12152329712329987385,
    10030996614438012228,
    8451194947889500653,
]


def test_keys_of_any_integer_dtype_and_of_negative_value():
    """The library hashes int64 [-1], [12], [5, 0], [2**63 - 1, -(2**63)] to HASHES.

    The seed of the last is 2**64 - 1.
    """
    assert xxh64([np.array([-1, 12])]).tolist() == HASHES[:2]
    assert xxh64([np.array([12], np.uint32)]).tolist() == HASHES[1:2]
    assert xxh64([np.array([5], np.uint8), np.array([0])]).tolist() == HASHES[2:3]
    limits = np.iinfo(np.int64)
    both = [np.array([limits.max]), np.array([limits.min])]
    assert xxh64(both, seed=2**64 - 1).tolist() == HASHES[3:]


def test_no_keys_and_too_many_keys_are_refused():
    assert xxh64([np.zeros(0, np.int64)] * 3).shape == (0,)
    for num_keys in (0, 4):
        with pytest.raises(ValueError, match=f"1 to 3 keys per tuple, got {num_keys}"):
            xxh64([np.zeros(1, np.int64)] * num_keys)
