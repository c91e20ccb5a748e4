"""Reads ids or weights from any container with a clear meaning.

`prepare` uses this module for integers, and `tpu_embedding.strings` uses it for
strings. If a container is ambiguous, the error says how to choose.
"""

import dataclasses
import math
from typing import Any, Final, Literal

import jax
import jax.core
import numpy as np

from tpu_embedding.argument_checks import invalid
from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    RaggedIds,
    SparseIds,
    is_integer,
)

MAX_SAMPLES: Final = 2**27
"""Largest number of samples that a `dense_shape` may declare.

Row splits of that many samples take 1 GiB. A larger shape is probably a mistake, such
as the vocabulary size instead of the batch size.
"""

_LISTS: Final = (list, tuple, np.ndarray, jax.Array)

What = Literal["Ids", "Strings", "Weights"]


HostIds = DenseIds | RaggedIds | SparseIds
"""Ids as NumPy arrays, with `weights` as the user passed them."""


def read_ids(ids: Any, owner: str, what: What = "Ids") -> HostIds:
    """Reads ids, or weights in the same form, and checks shapes and row splits.

    Values and coordinates may be out of range, and values may have any dtype.
    """
    if isinstance(ids, DenseIds):
        inner = read_ids(ids.ids, owner, what)
        if not isinstance(inner, DenseIds):
            fix = "Pass them without DenseIds."
            name = f"DenseIds.ids of {owner}"
            raise invalid(name, "be an array", ids.ids, fix, TypeError)
        return dataclasses.replace(inner, weights=ids.weights)
    # Containers are recognized by their fields, so that TensorFlow's tensors can be
    # read without importing TensorFlow.
    if hasattr(ids, "values") and hasattr(ids, "row_splits"):
        return _read_ragged(ids, owner, what)
    if all(hasattr(ids, name) for name in ("indices", "values", "dense_shape")):
        return _read_sparse(ids, owner, what)
    if isinstance(ids, list | tuple):
        return _read_lists(list(ids), owner, what)
    array = as_array(ids, owner, what)
    # An object array may hold uneven lists. A scalar one holds an unknown object.
    if array.dtype != object:
        return DenseIds(ids=array)
    if array.ndim:
        return _read_lists(array.tolist(), owner, what)
    raise invalid(
        f"{what} of {owner}",
        "be an array, lists, DenseIds, RaggedIds or SparseIds",
        ids,
        "Convert one batch of it. For a SciPy matrix whose columns are ids, write m = "
        "matrix.tocsr() and te.RaggedIds(values=m.indices, row_splits=m.indptr, "
        "weights=m.data).",
        TypeError,
    )


def as_array(values: Any, owner: str, what: str = "Ids") -> np.ndarray:
    check_unmasked(type(values), f"{what} of {owner}")
    if isinstance(values, jax.core.Tracer):
        fix = "Call prepare outside jit and other transformations of JAX."
        raise invalid(f"{what} of {owner}", "be on the host", values, fix, TypeError)
    if isinstance(values, jax.Array) and not values.is_fully_addressable:
        fix = "Prepare the batch before sharding it over processes."
        raise invalid(f"{what} of {owner}", "be on this process", values, fix)
    # Don't use `np.asarray` here, because NumPy pads strings to the longest one.
    if isinstance(values, list) and values and are_strings(values):
        return _flat_array(values)
    try:
        return np.asarray(values)
    except Exception as error:  # A foreign object may raise anything.
        fix = f"NumPy cannot read it: {error}"
        name = f"{what} of {owner}"
        raise invalid(name, "be an array", values, fix, TypeError) from error


def check_unmasked(kind: type, name: str) -> None:
    """Rejects masked arrays, whose mask would be ignored."""
    if issubclass(kind, np.ma.MaskedArray):
        fix = f"Write .filled({PADDING_ROW_ID}) for ids, .filled(0) for weights."
        raise invalid(name, "be a plain array", kind, fix, TypeError)


def _read_ragged(ids: Any, owner: str, what: What) -> HostIds:
    row_splits = as_array(ids.row_splits, owner, "row_splits")
    weights = ids.weights if isinstance(ids, RaggedIds) else None
    if hasattr(ids.values, "row_splits"):
        fix = "Merge the inner lists of each sample, or pass lists."
        raise invalid(f"{what} of {owner}", "have one ragged axis", ids, fix)
    values = _values_of(ids, owner, what)
    name = f"row_splits of {owner}"
    if row_splits.ndim != 1 or row_splits.shape[0] < 2:
        rule = "have shape [batch + 1] with at least one sample"
        raise invalid(name, rule, row_splits)
    if not is_integer(row_splits.dtype):
        raise invalid(name, "be integers", row_splits, kind=TypeError)
    ends = [int(row_splits[0]), int(row_splits[-1])]
    if ends != [0, len(values)]:
        rule = f"begin with 0 and end with the number of values, {len(values)}"
        raise invalid(name, rule, ends)
    falls = row_splits[1:] < row_splits[:-1]
    if falls.any():
        i = int(falls.argmax())
        rule = f"not decrease at sample {i}"
        raise invalid(name, rule, row_splits[i : i + 2].tolist())
    return RaggedIds(values=values, row_splits=row_splits, weights=weights)


def _values_of(ids: Any, owner: str, what: What) -> np.ndarray:
    values = as_array(ids.values, owner, what)
    if values.ndim != 1:
        raise invalid(f"values of {owner}", "have one axis", values)
    # NumPy turns empty lists into float arrays.
    return values if values.size else values.astype(np.int32)


def _read_sparse(ids: Any, owner: str, what: What) -> HostIds:
    indices = as_array(ids.indices, owner, "indices")
    values = _values_of(ids, owner, what)
    dense_shape = as_array(ids.dense_shape, owner, "dense_shape")
    weights = ids.weights if isinstance(ids, SparseIds) else None
    if dense_shape.ndim != 1 or (
        dense_shape.size and not is_integer(dense_shape.dtype)
    ):
        name = f"dense_shape of {owner}"
        raise invalid(name, "be a list of integers", ids.dense_shape, kind=TypeError)
    shape = tuple(int(size) for size in dense_shape)
    if not values.size and not indices.size:
        indices = np.zeros((0, len(shape)), np.int64)
    if indices.shape != (values.shape[0], len(shape)) or len(shape) < 2:
        rule = (
            "have shape [num_values, rank] with rank >= 2, here "
            f"[{values.shape[0]}, {len(shape)}]"
        )
        raise invalid(f"indices of {owner}", rule, indices)
    if not is_integer(indices.dtype):
        raise invalid(f"indices of {owner}", "be integers", indices, kind=TypeError)
    # Check the declared shape before anything of its size is allocated.
    if min(shape) < 0 or math.prod(shape[:-1]) > MAX_SAMPLES:
        rule = f"be [batch, positions], with at most {MAX_SAMPLES} samples"
        raise invalid(f"dense_shape of {owner}", rule, list(shape))
    return SparseIds(
        indices=indices, values=values, dense_shape=dense_shape, weights=weights
    )


def _read_lists(items: list[Any], owner: str, what: What) -> HostIds:
    """Reads nested lists: as dense if they are rectangular, otherwise as ragged."""
    name = f"{what} of {owner}"
    for kind in set(map(type, items)):
        check_unmasked(kind, name)
    rows = (item if _is_list(item) else [item] for item in items)
    # The first id shows if ids are strings, without walking all lists in Python.
    first_id = next((row[0] for row in rows if len(row)), None)
    if not isinstance(first_id, str | bytes):
        try:
            array = np.asarray(items)
        except Exception:  # Uneven lists, or elements that NumPy cannot read.
            array = None
        if array is not None and array.dtype != object:
            if array.dtype.kind in "US":  # NumPy would cut and convert strings.
                array = np.asarray(items, object)
            elif not array.size:
                array = array.astype(np.int32)
            return DenseIds(ids=array)
    if not _has_lists(items):
        return DenseIds(ids=_flat_array(items))
    if not all(map(_is_list, items)):
        wrong = next(item for item in items if not _is_list(item))
        fix = "Write [x] for a sample with one id, [] for one without ids."
        raise invalid(name, "be lists of one depth", wrong, fix)
    rows = [
        list(item) if isinstance(item, list | tuple) else np.asarray(item).tolist()
        for item in items
    ]
    lengths = [len(row) for row in rows]
    values = [value for row in rows for value in row]
    if _has_lists(values):
        fix = "Merge the lists within a sample's list, or pass te.SparseIds."
        rule = "be one list of ids per sample if lengths differ"
        raise invalid(name, rule, items, fix)
    array = _flat_array(values)
    if len(set(lengths)) == 1:
        return DenseIds(ids=array.reshape(len(rows), -1))
    return RaggedIds(values=array, row_splits=np.cumsum([0, *lengths]))


def are_strings(items: list[Any]) -> bool:
    # Checking each distinct type is much faster than checking each item.
    return all(issubclass(kind, str | bytes) for kind in set(map(type, items)))


def _has_lists(items: list[Any]) -> bool:
    kinds = set(map(type, items))
    return any(issubclass(k, _LISTS) for k in kinds) and any(map(_is_list, items))


def _is_list(item: Any) -> bool:
    # Zero-dimensional arrays are ids, not lists.
    return isinstance(item, _LISTS) and getattr(item, "ndim", 1) > 0


def _flat_array(items: list[Any]) -> np.ndarray:
    """Makes a 1-D array. Strings stay objects, because their lengths differ."""
    if not items:
        return np.zeros(0, np.int32)
    if any(issubclass(kind, str | bytes) for kind in set(map(type, items))):
        return np.fromiter(items, object, len(items))
    return np.asarray(items)
