"""Joins the parts of a batch that several loader processes have read."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embedding.inputs.forms import read_ids
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.types import PADDING_ROW_ID, DenseIds, RaggedIds, SparseIds


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Returns the samples of several batches in one; the inverse of `slice_batch`.

    Args:
      parts: batches on the host, not prepared, of one sample or more, whose features
        have the same forms. Dense features may differ in valence.

    Returns:
      A batch without `origin`. Its arrays are copies.

    Example:
      >>> parts = [
      ...     Batch(
      ...         features={"tags": RaggedIds.from_lists(lists)},
      ...         labels=np.zeros(len(lists)),
      ...         weights=np.ones(len(lists)),
      ...     )
      ...     for lists in ([[1, 2], []], [[3]])
      ... ]
      >>> join_batches(parts).features["tags"].row_splits.tolist()
      [0, 2, 2, 3]
    """
    first = parts[0]
    return Batch(
        features={
            name: _join_features([part.features[name] for part in parts], name)
            for name in first.features
        },
        dense=jax.tree.map(
            lambda *arrays: _concatenate(arrays), *[part.dense for part in parts]
        ),
        labels=_concatenate([part.labels for part in parts]),
        weights=_concatenate([part.weights for part in parts]),
    )


def _join_features(parts: Sequence[Any], name: str) -> Any:
    if isinstance(parts[0], Mapping):
        return {
            key: _join_features([part[key] for part in parts], f"{name}/{key}")
            for key in parts[0]
        }
    joined = _join_ids([read_ids(ids, f"feature {name!r}").ids for ids in parts])
    if isinstance(joined, DenseIds) and joined.weights is None:
        return joined.ids
    return joined


def _join_ids(parts: Sequence[Any]) -> DenseIds | RaggedIds | SparseIds:
    if isinstance(parts[0], DenseIds):
        return DenseIds(
            ids=_concatenate(
                [_as_wide(part.ids, parts, PADDING_ROW_ID) for part in parts]
            ),
            weights=_join_weights(
                [
                    None if part.weights is None else _as_wide(part.weights, parts, 0)
                    for part in parts
                ]
            ),
        )
    values = _concatenate([part.values for part in parts])
    weights = _join_weights([part.weights for part in parts])
    if isinstance(parts[0], RaggedIds):
        lengths = _concatenate([np.diff(np.asarray(part.row_splits)) for part in parts])
        row_splits = np.concatenate([[0], np.cumsum(lengths)])
        return RaggedIds(values=values, row_splits=row_splits, weights=weights)
    shapes = np.stack([np.asarray(part.dense_shape) for part in parts])
    starts = np.cumsum([0, *shapes[:-1, 0]])
    indices = []
    for part, start in zip(parts, starts, strict=True):
        shifted = np.array(part.indices)
        shifted[:, 0] += start
        indices.append(shifted)
    shape = shapes.max(axis=0)
    shape[0] = shapes[:, 0].sum()
    return SparseIds(
        indices=np.concatenate(indices),
        values=values,
        dense_shape=shape,
        weights=weights,
    )


def _as_wide(array: Any, parts: Sequence[DenseIds], fill: int) -> np.ndarray:
    """Returns a dense array, padded to the largest valence of the parts."""
    array = np.asarray(array)
    valence = max(np.shape(part.ids)[-1] for part in parts)
    if array.ndim < 2 or array.shape[-1] == valence:
        return array
    if array.dtype.kind in "iu":
        array = array.astype(np.int64)  # which holds the id of padding
    padding = [(0, 0)] * (array.ndim - 1) + [(0, valence - array.shape[-1])]
    return np.pad(array, padding, constant_values=fill)


def _join_weights(parts: Sequence[Any]) -> Any:
    """Returns joined weights, held as arrays or like the ids; None without any."""
    if parts[0] is None:
        return None
    read = [read_ids(part, "a feature", "Weights") for part in parts]
    if all(isinstance(each.ids, DenseIds) for each in read):
        return _concatenate([each.values for each in read])
    return _join_ids([each.ids for each in read])


def _concatenate(arrays: Sequence[Any]) -> np.ndarray:
    """Returns a plain array, a copy even of one array in shared memory."""
    return np.concatenate([np.asarray(array).view(np.ndarray) for array in arrays])
