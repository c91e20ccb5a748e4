"""Running sums in blocks."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.lookup._running_sum import running_sum


@pytest.mark.parametrize(
    "size", [0, 1, 2, 127, 128, 129, 2**14, 2**14 + 1, 2**20 + 2**10 + 1]
)
def test_equals_numpy(size):
    values = np.random.default_rng(size).integers(-9, 9, size).astype(np.int32)
    result = running_sum(jnp.asarray(values))
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, np.cumsum(values))
