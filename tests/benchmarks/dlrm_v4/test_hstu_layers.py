import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hstu_layers import SequenceLengths, STULayer, dropout, silu_attention

from tests.benchmarks.dlrm_v4 import FULL
from tests.benchmarks.dlrm_v4.golden_runs import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    check,
    golden,
    pad,
    run,
    under,
    unpad,
    with_weights,
)
from tests.tiers import quick_cases
from tpu_embedding.tools.train import load_config

FILE = golden("stu_layer")
LENGTHS = FILE["input.lengths"]


def golden_layer(block_size=512):
    dim = FILE["input.x"].shape[1]
    num_heads = int(FILE["num_heads"])
    sizes = dataclasses.replace(
        load_config(FULL).model.hstu,
        dim=dim,
        num_heads=num_heads,
        head_dim=dim // num_heads,
        dropout=0.0,
        block_size=block_size,
        dtype="float32",
    )
    layer = STULayer(sizes, rngs=nnx.Rngs(0))
    return with_weights(layer, under(FILE, "weight."))


def golden_lengths(case):
    num_targets = case.get("num_targets", np.zeros_like(LENGTHS))
    return SequenceLengths(
        tokens=jnp.asarray(LENGTHS, jnp.int32),
        shared=jnp.asarray(LENGTHS - num_targets, jnp.int32),
        normalizer=jnp.asarray(case["max_seq_len"], jnp.int32),
    )


@pytest.mark.parametrize(
    ("name", "block_size"),
    quick_cases([("no_targets", 512), ("many_targets", 7)], "many_targets-7"),
)
def test_the_layer_is_the_reference(name, block_size):
    case = under(FILE, f"{name}/")
    lengths = golden_lengths(case)

    def layer_outputs(layer, inputs):
        return {"y": unpad(layer(pad(inputs["x"], LENGTHS), lengths), LENGTHS)}

    inputs = {"x": case.get("input.x", FILE["input.x"])}
    outputs, gradients = run(
        layer_outputs,
        golden_layer(block_size),
        inputs,
        under(case, "cotangent."),
    )
    check(outputs, under(case, "output."), OUTPUT_TOLERANCE)
    check(gradients, under(case, "grad."), GRADIENT_TOLERANCE)


def test_dropout():
    x, keys = jnp.ones((100, 100)), jax.random.split(jax.random.key(0), 100)
    dropped = np.asarray(dropout(x, 0.2, keys))
    # Tolerance: 4 standard deviations of the share of 10,000 values.
    np.testing.assert_allclose((dropped == 0).mean(), 0.2, atol=4 * 0.004)
    np.testing.assert_allclose(dropped[dropped > 0], 1 / 0.8, rtol=1e-6)
    # That of a sample depends on its own key alone.
    np.testing.assert_array_equal(dropout(x[:7], 0.2, keys[:7]), dropped[:7])
    assert (dropped[0] != dropped[1]).any()


HEAD_DIM = 4


def dense_attention(q, k, v, lengths):
    """Returns the outputs by one array of all pairs of tokens."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD_DIM)
    query, key = np.indices(scores.shape[2:])
    is_shared = key[None] < np.asarray(lengths.shared)[:, None, None]
    is_visible = (query == key)[None] | (key < query)[None] & is_shared
    weights = jnp.where(is_visible[:, None], jax.nn.silu(scores), 0) / 50
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("block_size", quick_cases([5, 512], "5"))
def test_blocks_add_up_to_dense_attention(block_size):
    length = 23
    shape = (4, 3, length, 2, HEAD_DIM)
    arrays = np.random.default_rng(0).normal(size=shape)
    q, k, v, cotangent = jnp.asarray(arrays, jnp.float32)
    lengths = SequenceLengths(
        tokens=jnp.array([23, 1, 9]),
        shared=jnp.array([21, 0, 7]),
        normalizer=jnp.asarray(50),
    )
    is_token = np.arange(length) < np.asarray(lengths.tokens)[:, None]
    cotangent = cotangent * is_token[:, :, None, None]

    def blocks(q, k, v):
        return silu_attention(q, k, v, lengths, block_size=block_size)

    def dense(q, k, v):
        return dense_attention(q, k, v, lengths)

    outputs, pull_back = jax.vjp(jax.jit(blocks), q, k, v)
    wanted, pull_dense_back = jax.vjp(dense, q, k, v)
    # Tolerance: float32 sums of up to 23 numbers below 1, in another order.
    close = dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs[is_token], wanted[is_token], **close)
    gradients = zip(pull_back(cotangent), pull_dense_back(cotangent), strict=True)
    for got, want in gradients:
        np.testing.assert_allclose(got, want, **close)
