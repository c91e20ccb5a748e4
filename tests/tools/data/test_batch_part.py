"""Parts of a batch hold the same samples as the whole, in every form of ids."""

import dataclasses

import numpy as np
import pytest

from tpu_embedding.inputs.forms import read_ids
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.batch_part import slice_batch
from tpu_embedding.types import DenseIds, RaggedIds, SparseIds

SIZE = 5
LISTS = [[1, 2], [], [3], [], [4, 5, 6]]
WEIGHTS = [[0.5, 2.0], [], [3.0], [], [4.0, 5.0, 6.0]]
FORMS = {
    "matrix": np.arange(2 * SIZE).reshape(SIZE, 2),
    "lists": LISTS,
    "weighted_matrix": DenseIds(
        ids=np.arange(2 * SIZE).reshape(SIZE, 2),
        weights=np.linspace(0, 1, 2 * SIZE).reshape(SIZE, 2),
    ),
    "ragged": RaggedIds.from_lists(LISTS),
    "weighted_ragged": RaggedIds.from_lists(LISTS, WEIGHTS),
    "weights_like_ragged": RaggedIds(
        values=np.arange(6),
        row_splits=np.array([0, 2, 2, 3, 3, 6]),
        weights=RaggedIds.from_lists(WEIGHTS),
    ),
    "nested_ragged": RaggedIds(
        values=RaggedIds.from_lists([[i] * (i % 3) for i in range(2 * SIZE)]),
        row_splits=np.arange(SIZE + 1) * 2,
    ),
    "sparse": SparseIds(
        indices=np.array([[4, 0], [0, 1], [2, 0], [1, 3]]),  # in no order
        values=np.array([7, 8, 9, 10]),
        dense_shape=np.array([SIZE, 4]),
        weights=np.array([1.0, 2.0, 3.0, 4.0], np.float32),
    ),
    "no_ids": RaggedIds.from_lists([[]] * SIZE),
}


def batch_of(ids):
    return Batch(
        features={"feature": ids},
        dense=np.arange(3 * SIZE).reshape(SIZE, 3),
        labels=np.arange(SIZE),
        weights=np.arange(SIZE) + 10,
        origin="file, line {}".format,
    )


def samples_of(ids, size):
    """Returns the ids and weights of each sample, as lists of tuples."""
    read = read_ids(ids, "it")
    if isinstance(read.ids, SparseIds):
        rows = np.asarray(read.ids.indices)[:, 0]
        places = np.asarray(read.ids.indices)[:, 1:]
    elif isinstance(read.ids, RaggedIds):
        splits = np.asarray(read.ids.row_splits)
        bags = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
        rows = bags // (read.batch_size // size)
        places = np.arange(len(bags))[:, None] * 0
    else:
        rows = np.repeat(np.arange(size), read.values.size // size)
        places = np.zeros((rows.size, 1), int)
    weights = read.ids.weights
    if weights is None:
        weights = np.ones(rows.size)
    weights = read_ids(weights, "it", "Weights").values.ravel()
    values = read.values.ravel()
    found = [[] for _ in range(size)]
    for row, place, value, weight in zip(rows, places, values, weights, strict=True):
        found[row].append((*place.tolist(), value, weight))
    return found


@pytest.mark.parametrize("samples", [range(5), range(2), range(1, 4), range(3, 4)])
@pytest.mark.parametrize("ids", FORMS.values(), ids=FORMS.keys())
def test_part_holds_the_samples_of_the_whole(ids, samples):
    part = slice_batch(batch_of(ids), samples)
    whole = samples_of(ids, SIZE)
    assert any(whole) or ids is FORMS["no_ids"]
    found = samples_of(part.features["feature"], len(samples))
    assert found == whole[samples.start : samples.stop]
    assert part.labels.tolist() == list(samples)
    assert part.weights.tolist() == [i + 10 for i in samples]
    assert part.dense[:, 0].tolist() == [3 * i for i in samples]
    assert part.origin(0) == f"file, line {samples.start}"


def test_dicts_of_ids_and_dense_inputs():
    """Features with unique rows have dicts of ids; dense inputs may have names."""
    batch = Batch(
        features={"items": {"history": RaggedIds.from_lists(LISTS), "next": [1] * 5}},
        dense={"times": np.arange(2 * SIZE).reshape(SIZE, 2), "length": np.arange(5)},
        labels=np.zeros(SIZE),
        weights=np.ones(SIZE),
    )
    part = slice_batch(batch, range(1, 4))
    assert part.features["items"]["history"].row_splits.tolist() == [0, 0, 1, 1]
    assert part.dense["times"].tolist() == [[2, 3], [4, 5], [6, 7]]
    wrong = dataclasses.replace(batch, features={"items": {"history": LISTS[1:]}})
    with pytest.raises(DataError, match="'items/history' must have 5 samples"):
        slice_batch(wrong, range(2))
