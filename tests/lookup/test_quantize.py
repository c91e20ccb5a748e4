"""Quantized values of rows."""

import jax.numpy as jnp
import numpy as np

import tpu_embedding as te
from tpu_embedding.lookup._rounds import quantize

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
