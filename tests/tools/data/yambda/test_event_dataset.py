"""Tests the data sets of the training loop that hold histories of events."""

import pickle

import jax
import numpy as np
import pytest

from tests.tools.data.yambda.test_event_samples import golden_samples
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.yambda.event_batches import EventBatches
from tpu_embedding.tools.data.yambda.event_dataset import EventDataset, EventOutline
from tpu_embedding.tools.data.yambda.event_samples import (
    BENCHMARK_TABLE_SIZES,
    HistorySettings,
)


def open_data(variant="benchmark"):
    samples = golden_samples(variant)
    return EventDataset(samples, EventBatches(samples, batch_size=6))


def test_batches_have_the_fields_of_the_samples():
    data = open_data()
    tree, batch = data.batches.train_batch(1), data.train_batch(1)
    assert batch.features.keys() == tree["features"].keys() == data.table_sizes.keys()
    np.testing.assert_array_equal(batch.labels, tree["label"])
    for name, array in batch.dense.items():
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, tree[name])
    assert batch.dense["action_weight"].shape == (6, data.history_length)
    part = data.train_part(1, range(2, 5))
    np.testing.assert_array_equal(part.labels, batch.labels[2:5])


def test_loader_processes_would_copy_the_log():
    with pytest.raises(DataError, match="in memory .* set loader_processes=0"):
        pickle.dumps(open_data())


def test_padding_of_an_evaluation_repeats_its_last_sample():
    *_, last = open_data().evaluation_batches()
    is_sample = last.weights == 1
    assert not is_sample.all()
    lengths = last.dense["history_length"]
    assert set(lengths[~is_sample]) == {lengths[is_sample][-1]}


def test_an_outline_has_the_shapes_and_different_ids_of_the_benchmark():
    settings = HistorySettings(history_length=300)
    outline = EventOutline(
        batch_size=64, table_sizes=BENCHMARK_TABLE_SIZES, settings=settings
    )
    batch = outline.train_batch(0)
    for name, share in (("item_id", 0.024), ("artist_id", 0.006), ("album_id", 0.015)):
        values = batch.features[name]["history"].values
        # Tolerance: the numbers of a user are rounded.
        np.testing.assert_allclose(
            len(np.unique(values)) / len(values), share, rtol=0.05
        )
    items = batch.features["item_id"]["history"].values
    albums = batch.features["album_id"]["history"].values
    pairs = np.unique(np.stack([items, albums]), axis=1)
    assert pairs.shape[1] == len(np.unique(items))

    def shapes(tree):
        """Returns dtypes, and shapes without the number of events."""
        return jax.tree.map(lambda x: (x.dtype.kind, x.shape[1:]), tree)

    data, settings = open_data(), golden_samples("benchmark").settings
    outline = EventOutline(
        batch_size=6, table_sizes=data.table_sizes, settings=settings
    )
    assert shapes(outline.train_batch(0)) == shapes(data.train_batch(0))
