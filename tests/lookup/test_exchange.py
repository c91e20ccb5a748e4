"""The all-to-all of ids, rows and gradients, padded and ragged."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.lookup.stages import (
    PADDING,
    on_shards,
    plan_of,
    round_size_of,
)
from tpu_embedding.lookup import _exchange
from tpu_embedding.lookup._exchange import (
    Buckets,
    exchange,
    quantize,
)

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


P = PADDING


@pytest.mark.parametrize(
    ("received_rows", "row_ids", "expected"),
    [
        (5, [P, 3, P, 1, 3], [3, 1, 3, P, P]),
        (2, [P, 3, P, 1, P], [3, 1]),
        (7, [P, 3, P, 1, P], [3, 1, P, P, P, P, P]),
        (3, [P, P, P, P], [P, P, P]),
    ],
)
def test_padding_moves_to_the_end(received_rows, row_ids, expected):
    size = round_size_of("ragged", 3, received_rows)
    compacted = _exchange._compact(jnp.array(row_ids, jnp.int32), size)
    assert compacted.tolist() == expected


def test_a_tpu_moves_buckets_by_its_own_collective(monkeypatch):
    tpu = types.SimpleNamespace(platform="tpu")
    mesh = types.SimpleNamespace(devices=np.array([tpu]), axis_names=("shard",))
    plan = dataclasses.replace(plan_of(1, 8), mesh=mesh)
    calls = []

    def ragged_all_to_all(*arguments, **options):
        calls.append((*arguments, options))
        return arguments[1]

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    sent, received = (
        Buckets(
            starts=jnp.array([start]),
            sizes=jnp.array([start + 1]),
            remote_starts=jnp.array([start + 2]),
        )
        for start in (10, 20)
    )
    lines = jnp.ones((4, 3))
    result = _exchange._exchange_ragged(lines, sent, received, 7, plan.stacks[0], plan)
    assert result.shape == (7, 3)
    ((operand, output, *bounds, options),) = calls
    assert operand is lines
    assert output.dtype == lines.dtype
    assert [int(x[0]) for x in bounds] == [10, 11, 12, 21]
    assert options == {"axis_name": ("shard",)}
