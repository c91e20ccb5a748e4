"""Running sums, and values held until the next, in blocks."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.xla import forward_fill, running_sum


def _hold(values):
    held = -1
    for i, value in enumerate(values):
        held = value if value >= 0 else held
        values[i] = held
    return values


@pytest.mark.parametrize(
    ("running", "expected"), [(running_sum, np.cumsum), (forward_fill, _hold)]
)
@pytest.mark.parametrize("size", [129, 2**14 + 1])
def test_equals_numpy(size, running, expected):
    values = np.random.default_rng(size).integers(-9, 9, size).astype(np.int32)
    result = running(jnp.asarray(values))
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, expected(values.copy()))
