"""The all-to-all of ids, rows and gradients, padded and ragged."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import needs_kernels
from tests.lookup.stages import (
    PADDING,
    buckets_of,
    on_shards,
    place_at_owner,
    place_at_source,
    plan_of,
    round_size_of,
)
from tpu_embedding.lookup import _exchange
from tpu_embedding.lookup._exchange import (
    Buckets,
    exchange,
    fetch_rows,
    quantize,
    send_gradients,
    send_requests,
)
from tpu_embedding.lookup._route import IdsByRow, Round
from tpu_embedding.rows.kernels.kernel_access import KernelAccess
from tpu_embedding.rows.packed_rows import RowLayout, pack_rows, unpack_rows

ROWS_PER_SHARD = 9


@pytest.mark.parametrize("num_shards", [1, 3, 8])
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


# Rows that each source requests from each owner: none, one, the last, several.
REQUESTS = {
    1: [[[8, 0, 3]]],
    3: [
        [[0, 1, 2], [], [8]],
        [[2, 8], [4], []],
        [[], [0, 3, 4], [5, 8]],
    ],
    8: [[[(s * d) % 9] * ((s + d) % 2) for d in range(8)] for s in range(8)],
}
NOTHING = {n: [[[]] * n] * n for n in (1, 3, 8)}
SIZES = {
    "padded": dict(kind="padded", capacity=3),
    "ragged": dict(kind="ragged", capacity=3, received_rows=10),
    "lines": dict(kind="ragged", capacity=3, rows_per_line=4, received_rows=20),
}


@functools.cache
def round_trip(num_shards, size, layout, kernels):
    """Compiles requests, rows to the sources, and gradients to the owners."""
    plan = plan_of(num_shards, ROWS_PER_SHARD, layout.dim)
    stack = dataclasses.replace(plan.stacks[0], layout=layout)

    def run(row_ids, num_ids, rows, gradients):
        unused = jnp.zeros(1, jnp.int32)
        current = Round(
            places=unused,
            ids_by_row=IdsByRow(order=unused, places=unused),
            row_ids=row_ids,
            num_ids=num_ids,
            next_ranks=num_ids,
            end_row=jnp.int32(0),
            is_last=jnp.ones((), bool),
        )
        requests = send_requests(current, size, stack)
        table = pack_rows(rows, layout, kernels)
        fetched = fetch_rows(table, requests, stack, plan)
        sent = pack_rows(gradients, table.buffer_layout(size.sent_rows))
        received = send_gradients(sent, requests, stack, plan)
        assert received.layout.num_rows == size.received_rows
        return requests.row_ids, unpack_rows(fetched), unpack_rows(received)

    return on_shards(run, plan)


def check_round_trip(num_shards, size, layout, sent, kernels=None):
    generator = np.random.default_rng(num_shards)
    table = generator.normal(size=(num_shards, ROWS_PER_SHARD, layout.dim))
    table = table.astype(np.float32)
    gradients = generator.normal(size=(num_shards, size.sent_rows, layout.dim))
    gradients = gradients.astype(np.float32)
    row_ids, fetched, received = round_trip(num_shards, size, layout, kernels)(
        np.stack([buckets_of(of_source, size) for of_source in sent]),
        np.array([[len(x) for x in of_source] for of_source in sent], np.int32),
        table,
        gradients,
    )
    assert fetched.dtype == received.dtype == jnp.float32
    expected_ids = np.full((num_shards, size.received_rows), PADDING)
    for source in range(num_shards):
        for owner, rows in enumerate(sent[source]):
            here = place_at_source(sent[source], owner, size)
            there = place_at_owner(sent, source, owner, size)
            for i, row in enumerate(rows):
                np.testing.assert_array_equal(
                    fetched[source, here + i], table[owner, row]
                )
                np.testing.assert_array_equal(
                    received[owner, there + i], gradients[source, here + i]
                )
                expected_ids[owner, there + i] = row
    np.testing.assert_array_equal(row_ids, expected_ids)


@pytest.mark.parametrize("requests", [REQUESTS, NOTHING], ids=["some", "nothing"])
@pytest.mark.parametrize(
    ("num_shards", "size", "dim", "line_lanes"),
    [
        (1, "padded", 3, None),
        (3, "padded", 1, None),
        (3, "padded", 16, 128),
        (3, "ragged", 3, None),
        (3, "ragged", 1, 128),
        (8, "padded", 3, None),
        (8, "ragged", 200, 128),
    ],
)
def test_rows_and_gradients(num_shards, size, dim, line_lanes, requests):
    layout = RowLayout(num_rows=ROWS_PER_SHARD, row_shape=(dim,), line_lanes=line_lanes)
    size = round_size_of(**SIZES[size], num_shards=num_shards)
    check_round_trip(num_shards, size, layout, requests[num_shards])


@needs_kernels
@pytest.mark.parametrize("requests", [REQUESTS, NOTHING], ids=["some", "nothing"])
def test_rows_and_gradients_in_lines(requests):
    layout = RowLayout(num_rows=ROWS_PER_SHARD, row_shape=(32,), line_lanes=128)
    size = round_size_of(**SIZES["lines"], num_shards=3)
    kernels = KernelAccess(backend="interpreter")
    check_round_trip(3, size, layout, requests[3], kernels)


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


def test_fetched_rows_are_quantized():
    plan = plan_of(1, len(QUANTIZED), 1)
    stack = dataclasses.replace(plan.stacks[0], quantization=QUANTIZATION)
    rows = jnp.array(list(QUANTIZED), jnp.float32)[:, None]
    requests = _exchange.Requests(
        row_ids=jnp.arange(len(QUANTIZED), dtype=jnp.int32), buckets=None
    )
    fetched = fetch_rows(pack_rows(rows, stack.layout), requests, stack, plan)
    expected = list(QUANTIZED.values())
    np.testing.assert_array_equal(unpack_rows(fetched)[:, 0], expected)


P = PADDING


@pytest.mark.parametrize(
    ("rows_per_line", "received_rows", "row_ids", "expected"),
    [
        (1, 5, [P, 3, P, 1, 3], [3, 1, 3, P, P]),
        (1, 2, [P, 3, P, 1, P], [3, 1]),
        (1, 7, [P, 3, P, 1, P], [3, 1, P, P, P, P, P]),
        (1, 3, [P, P, P, P], [P, P, P]),
        (2, 6, [P, P, 7, P, 4, 5, P, P], [7, P, 4, 5, P, P]),
        (3, 9, [P, P, P, 7, P, P, 4, 5, 6], [7, P, P, 4, 5, 6, P, P, P]),
        (
            4,
            12,
            [1, 2, P, P, P, P, P, P, 0, P, P, P],
            [1, 2, P, P, 0, P, P, P] + [P] * 4,
        ),
        (4, 4, [P, P, P, P, 9, 8, 7, 6], [9, 8, 7, 6]),
    ],
)
def test_padding_moves_to_the_end(rows_per_line, received_rows, row_ids, expected):
    size = round_size_of("ragged", 3, rows_per_line, received_rows)
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
    result = _exchange._move_ragged(lines, sent, received, 7, plan.stacks[0], plan)
    assert result.shape == (7, 3)
    ((operand, output, *bounds, options),) = calls
    assert operand is lines
    assert output.dtype == lines.dtype
    assert [int(x[0]) for x in bounds] == [10, 11, 12, 21]
    assert options == {"axis_name": ("shard",)}
