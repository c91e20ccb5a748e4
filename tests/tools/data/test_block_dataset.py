"""The order of blocks: each sample once per epoch, and the same for any reader."""

import itertools

import numpy as np
import pytest

from tests.rejections import rejects
from tests.tools.data.damage import samples_of_steps
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.block_dataset import BlockDataset, BlockOrder

BOUNDS = {
    "one_block": [0, 7],
    "blocks_of_one": list(range(18)),
    "different": [0, 5, 6, 14, 15, 40],
}


class Numbers:
    """Reads the numbers of the samples themselves, and notes the blocks."""

    def __init__(self, bounds):
        self.block_bounds = np.array(bounds)

    def read(self, samples):
        return Batch(
            features={"number": samples},
            labels=samples,
            weights=np.ones(len(samples)),
        )


@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
def test_each_sample_comes_once_per_epoch(bounds, num_streams):
    order = BlockOrder(np.array(bounds), seed=1, num_streams=num_streams, stride=2)
    size = bounds[-1]
    samples = order.samples(np.arange(3 * size))
    epochs = samples.reshape(3, size)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(size), (3, 1)))
    if len(bounds) > 2:
        assert epochs[0].tolist() != epochs[1].tolist()
    # Any part of the order can be asked for, in any order.
    for start, stop in ((2 * size - 3, 2 * size + 4), (0, 5), (size, size + 1)):
        found = order.samples(np.arange(start, stop))
        np.testing.assert_array_equal(found, samples[start:stop])


@pytest.mark.parametrize("num_streams", [1, 4])
def test_parts_and_resumed_runs_read_the_same_batches(num_streams):
    def opened(seed=3):
        return BlockDataset(
            Numbers(range(0, 121, 8)),
            batch_size=12,
            num_evaluation_samples=20,
            seed=seed,
            num_streams=num_streams,
        )

    data = opened()
    assert data.num_train_samples == 100
    batches = [data.train_batch(step).labels for step in range(25)]
    assert sorted(np.concatenate(batches)) == sorted([*range(100)] * 3)
    resumed = opened()
    for step in (17, 4):
        for edges in ([0, 12], [0, 3, 8, 12]):
            parts = [
                resumed.train_part(step, range(*edge)).labels
                for edge in itertools.pairwise(edges)
            ]
            assert np.concatenate(parts).tolist() == batches[step].tolist()
    assert samples_of_steps(opened(4), 25).tolist() != np.concatenate(batches).tolist()
    held_out = list(data.evaluation_batches())
    assert [batch.weights.sum() for batch in held_out] == [12, 8]
    assert held_out[1].labels.tolist() == [*range(112, 120), *[119] * 4]


def test_held_out_samples_of_another_reader():
    data = BlockDataset(
        Numbers([0, 4]), batch_size=3, evaluation_reader=Numbers([0, 2, 5])
    )
    assert (data.num_train_samples, data.num_evaluation_samples) == (4, 5)
    batches = [batch.labels.tolist() for batch in data.evaluation_batches()]
    assert batches == [[0, 1, 2], [3, 4, 4]]


@pytest.mark.parametrize("num_held_out", [8, 9])
def test_too_few_samples_are_rejected(num_held_out):
    with rejects(DataError, field="num_evaluation_samples", value=num_held_out):
        BlockDataset(Numbers([0, 8]), batch_size=2, num_evaluation_samples=num_held_out)
