"""Cuts a part out of a batch, and joins parts.

A data set that cannot read a part of a batch returns the whole one. The training loop
then keeps the samples of its process, and `slice_batch` cuts them out. Loader processes
read a part each, and `join_batches` puts them together.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tpu_embedding.inputs.forms import HostIds, read_ids
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.types import (
    DenseIds,
    RaggedIds,
    SparseIds,
)


def slice_batch(batch: Batch, samples: range) -> Batch:
    """Returns some consecutive samples of a batch.

    Args:
      batch: batch on the host, not prepared.
      samples: positions within the batch, with a step of 1.

    Returns:
      A batch of `len(samples)` samples. Its `origin` takes positions within the part.

    Raises:
      DataError: if a feature has another number of samples than the labels.

    Example:
      >>> batch = Batch(
      ...     features={"tags": RaggedIds.from_lists([[1, 2], [], [3]])},
      ...     labels=np.zeros(3),
      ...     weights=np.ones(3),
      ...     origin="clicks.csv, line {}".format,
      ... )
      >>> part = slice_batch(batch, range(1, 3))
      >>> part.features["tags"].row_splits.tolist(), part.origin(0)
      ([0, 0, 1], 'clicks.csv, line 1')
    """
    first, end = samples.start, samples.stop
    origin = batch.origin
    return dataclasses.replace(
        batch,
        features={
            name: _slice_feature(ids, samples, name, len(batch.labels))
            for name, ids in batch.features.items()
        },
        dense=jax.tree.map(lambda array: array[first:end], batch.dense),
        labels=batch.labels[first:end],
        weights=batch.weights[first:end],
        origin=None if origin is None else lambda sample: origin(first + sample),
    )


def _slice_feature(ids: Any, samples: range, name: str, batch_size: int) -> Any:
    if isinstance(ids, Mapping):
        return {
            key: _slice_feature(part, samples, f"{name}/{key}", batch_size)
            for key, part in ids.items()
        }
    owner = f"feature {name!r}"
    try:
        read = read_ids(ids, owner)
    except (TypeError, ValueError) as error:
        raise DataError(str(error)) from error
    if read.batch_shape[:1] != (batch_size,):
        raise DataError(
            f"The {owner} must have {batch_size} samples along its first axis, as many "
            f"as the labels, got a batch of shape {read.batch_shape}."
        )
    part = _slice_ids(read, samples, owner)
    if isinstance(part, DenseIds) and part.weights is None:
        return part.ids
    return part


def _slice_ids(
    read: HostIds, samples: range, owner: str
) -> DenseIds | RaggedIds | SparseIds:
    ids = read.ids
    if isinstance(ids, DenseIds):
        kept = slice(samples.start, samples.stop)
        weights = None if ids.weights is None else np.asarray(ids.weights)[kept]
        return DenseIds(ids=np.asarray(ids.ids)[kept], weights=weights)
    if isinstance(ids, RaggedIds):
        # One sample has several rows if the batch has further axes.
        rows = read.batch_size // read.batch_shape[0]
        splits = np.asarray(ids.row_splits)
        splits = splits[samples.start * rows : samples.stop * rows + 1]
        kept = slice(int(splits[0]), int(splits[-1]))
        return RaggedIds(
            values=np.asarray(ids.values)[kept],
            row_splits=splits - splits[0],
            weights=_slice_weights(ids.weights, kept, samples, owner),
        )
    indices = np.asarray(ids.indices)
    kept = (indices[:, 0] >= samples.start) & (indices[:, 0] < samples.stop)
    shape = np.array(ids.dense_shape)
    shape[0] = len(samples)
    first = np.zeros(indices.shape[1], indices.dtype)
    first[0] = samples.start
    return SparseIds(
        indices=indices[kept] - first,
        values=np.asarray(ids.values)[kept],
        dense_shape=shape,
        weights=_slice_weights(ids.weights, kept, samples, owner),
    )


def _slice_weights(
    weights: Any, kept: slice | np.ndarray, samples: range, owner: str
) -> Any:
    """Returns the weights of the kept values, held as an array or like the ids."""
    if weights is None:
        return None
    read = read_ids(weights, owner, "Weights")
    if isinstance(read.ids, DenseIds):
        return read.values[kept]
    return _slice_ids(read, samples, owner)
