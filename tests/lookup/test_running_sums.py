"""Running sums, and values held until the next, in blocks."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiers import full_cases, matrix
from tpu_embedding.lookup._running_sums import forward_fill, running_sum


def _hold(values):
    held = -1
    for i, value in enumerate(values):
        held = value if value >= 0 else held
        values[i] = held
    return values


@pytest.mark.parametrize(
    ("running", "expected", "size"),
    full_cases(
        matrix(
            [(running_sum, np.cumsum), (forward_fill, _hold)],
            [0, 1, 2, 127, 128, 129, 2**14, 2**14 + 1, 2**20 + 2**10 + 1],
        ),
        "running_sum-cumsum-127",
        "running_sum-cumsum-129",
        "running_sum-cumsum-16385",
        "running_sum-cumsum-1049601",
        "forward_fill-_hold-127",
        "forward_fill-_hold-1049601",
    ),
)
def test_equals_numpy(size, running, expected):
    values = np.random.default_rng(size).integers(-9, 9, size).astype(np.int32)
    result = running(jnp.asarray(values))
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, expected(values.copy()))
