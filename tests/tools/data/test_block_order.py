"""Tests that the order of blocks visits each sample once, whoever reads it."""

import tracemalloc

import numpy as np
import pytest

from tpu_embedding.tools.data.block_order import (
    MAX_BLOCKS,
    BlockOrder,
    block_bounds,
    bounded_block_size,
    by_part,
)

BOUNDS = {
    "one_block": [0, 7],
    "one_sample": [0, 1],
    "uneven": [0, 1, 9, 10, 30],
    "blocks_of_one": list(range(14)),
    "large_first": [0, 50, 51, 52],
}
STREAMS = {
    "one_stream": (1, 1),
    "long_stride": (1, 100),
    "three_streams": (3, 1),
    "strides": (3, 4),
    "more_streams_than_samples": (64, 2),
}


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
def test_every_sample_once_per_epoch(bounds, streams):
    num_streams, stride = streams
    order = BlockOrder(np.array(bounds), seed=3, num_streams=num_streams, stride=stride)
    size = bounds[-1]
    for epoch in (0, 1, 5, 1):
        positions = range(epoch * size, (epoch + 1) * size)
        samples = order.samples(positions)
        assert sorted(samples.tolist()) == list(range(size))
        # Any split of the positions, across epochs too, has the same samples.
        pieces = [order.samples(range(p, p + 1))[0] for p in positions]
        assert pieces == samples.tolist()
    whole = order.samples(range(3 * size))
    assert order.samples(range(size - 1, 2 * size)).tolist() == (
        whole[size - 1 : 2 * size].tolist()
    )


def test_blocks_stay_together_and_epochs_differ():
    order = BlockOrder(block_bounds([40, 25], 5), seed=0)
    epochs = order.samples(range(130)).reshape(2, 13, 5)
    assert (epochs[:, :, 0] % 5 == 0).all() and (np.diff(epochs, axis=2) == 1).all()
    assert epochs[0].tolist() != epochs[1].tolist()
    other = BlockOrder(block_bounds([40, 25], 5), seed=1).samples(range(65))
    assert other.tolist() != epochs[0].ravel().tolist()


def test_readers_of_a_stream_each_open_every_block_once():
    # 4 readers share 8 streams of 64 blocks: each block has one reader, but for the
    # blocks at the borders of the streams.
    bounds = block_bounds([6400], 100)
    order = BlockOrder(bounds, seed=0, num_streams=8, stride=4)
    readers = [set() for _ in range(4)]
    for step in range(6400 // 32):
        for number, reader in enumerate(readers):
            first = step * 32 + number * 8
            reader.update((order.samples(range(first, first + 8)) // 100).tolist())
    assert sum(map(len, readers)) <= 64 + 8
    assert set.union(*readers) == set(range(64))


def test_a_batch_copies_no_array_of_all_blocks():
    order = BlockOrder(np.arange(100_001) * 64, seed=0)
    tracemalloc.start()
    try:
        order.samples(range(100, 356))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Some arrays of 256 numbers of 8 bytes; the ends of all blocks are 800,000 bytes.
    assert peak_bytes < 50_000


@pytest.mark.parametrize(
    ("num_samples", "block_size"),
    [(1, 64), (64 * 2**20, 64), (64 * 2**20 + 1, 128), (4_373_472_329, 8192)],
)
def test_blocks_of_many_samples_are_larger(num_samples, block_size):
    assert bounded_block_size(num_samples, 64) == block_size
    assert -(-num_samples // block_size) <= MAX_BLOCKS


def test_parts_of_samples():
    samples = np.array([3, 4, 5, 9, 0, 5, 6])
    parts = list(by_part(samples, np.array([0, 5, 8])))
    assert [number for number, _, _ in parts] == [0, 1, 2, 0, 1]
    assert [rows.tolist() for _, _, rows in parts] == [[3, 4], [0], [1], [0], [0, 1]]
    joined = [samples[places].tolist() for _, places, _ in parts]
    assert sum(joined, []) == samples.tolist()
