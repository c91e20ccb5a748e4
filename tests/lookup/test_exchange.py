"""The all-to-all of ids, rows and gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.lookup.stages import on_shards, plan_of
from tpu_embedding.lookup._rounds import exchange, quantize

ROWS_PER_SHARD = 9


@pytest.mark.parametrize("num_shards", [1, 3])
def test_buckets_go_to_their_shards_and_back(num_shards):
    plan = plan_of(num_shards, ROWS_PER_SHARD)
    (stack,) = plan.stacks
    buffers = [
        np.arange(num_shards * num_shards * np.prod(shape)).reshape(
            num_shards, num_shards, *shape
        )
        # A bucket of 128 travels in its place in memory.
        for shape in ((2,), (128,), (3, 5), (2, 128))
    ]

    def run(*flat):
        once = [exchange(buffer, stack) for buffer in flat]
        return once, [exchange(buffer, stack) for buffer in once]

    flat = [x.reshape(num_shards, -1, *x.shape[3:]).astype(np.int32) for x in buffers]
    once, twice = on_shards(run, plan)(*flat)
    for buffer, sent, result, back in zip(buffers, flat, once, twice, strict=True):
        np.testing.assert_array_equal(result, buffer.swapaxes(0, 1).reshape(sent.shape))
        np.testing.assert_array_equal(back, sent)


QUANTIZATION = te.QuantizationConfig(num_buckets=5, lower=-1.0, upper=1.0)
QUANTIZED = {
    -9: -1, -1: -1, -0.76: -1, -0.75: -0.5, -0.5: -0.5, -0.26: -0.5, -0.25: 0, 0: 0,
    0.24: 0, 0.25: 0.5, 0.74: 0.5, 0.75: 1, 1: 1, 9: 1,
}  # fmt: skip


def test_quantize():
    values = jnp.array(list(QUANTIZED), jnp.float32)
    expected = list(QUANTIZED.values())
    np.testing.assert_array_equal(quantize(values, QUANTIZATION), expected)
    shifted = te.QuantizationConfig(num_buckets=3, lower=2.0, upper=6.0)
    result = quantize(jnp.array([0.0, 2.9, 3.0, 4.9, 5.0, 7.0]), shifted)
    np.testing.assert_array_equal(result, [2, 2, 4, 4, 6, 6])
