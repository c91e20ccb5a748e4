import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.tools.train.models.hstu.hstu_sizes import MAX_TIME_BUCKETS
from tpu_embedding.tools.train.models.hstu.position_encoder import time_buckets


@pytest.mark.parametrize("num_buckets", [1, 2048, MAX_TIME_BUCKETS])
def test_time_buckets_are_exact_at_their_limits(num_buckets):
    k = np.arange(num_buckets + 1)
    limits = 60 * k**2
    for distance in (-5, -1, 0, 1):
        wanted = np.clip(k - (distance < 0), 0, num_buckets)
        ages = jnp.asarray(limits + distance, jnp.int32)
        np.testing.assert_array_equal(time_buckets(ages, num_buckets), wanted)
    last = time_buckets(jnp.asarray([-(2**31), 2**31 - 1]), num_buckets)
    np.testing.assert_array_equal(last, [0, num_buckets])
