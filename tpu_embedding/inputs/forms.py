"""Reads the ids or weights of one feature from any container whose meaning is clear.

Each container becomes `DenseIds`, `RaggedIds` or `SparseIds` of NumPy arrays. One with
several meanings is refused, and the error says how to choose. `lookup.prepare` reads
integer ids by this module, `tpu_embedding.strings` reads strings.
"""

import collections.abc
import dataclasses
import math
from typing import Any, Final, Literal

import jax
import jax.core
import numpy as np

from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    RaggedIds,
    SparseIds,
)

MAX_SAMPLES: Final = 2**27
"""Largest number of samples that a `dense_shape` may declare.

Row splits of so many samples take 1 GiB. A larger shape is a mistake, such as the size
of the vocabulary in place of the batch.
"""

MAX_AXES: Final = 32
"""Deepest nest of lists, far above any batch; it ends the search in cyclic lists."""

What = Literal["Ids", "Strings", "Weights"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostIds:
    """The values of one feature as NumPy arrays, and the shape of its batch.

    Attributes:
      ids: the values in one of three containers. Its `weights` are those of the user.
      batch_shape: sizes of all axes but the last, which holds the ids of a sample;
        `(batch,)` for values of one axis, `()` for a scalar.
    """

    ids: DenseIds | RaggedIds | SparseIds
    batch_shape: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return math.prod(self.batch_shape)

    @property
    def values(self) -> np.ndarray:
        """The ids alone: all places of a dense feature, the values of another."""
        ids = self.ids
        return np.asarray(ids.ids if isinstance(ids, DenseIds) else ids.values)

    def with_values(self, values: np.ndarray) -> DenseIds | RaggedIds | SparseIds:
        """Returns the container with other values in the same places."""
        if isinstance(self.ids, DenseIds):
            return dataclasses.replace(self.ids, ids=values)
        return dataclasses.replace(self.ids, values=values)


def read_ids(ids: Any, owner: str, what: What = "Ids") -> HostIds:
    """Reads a container of ids, or of weights that are held like ids.

    Args:
      ids: array, nested lists, `DenseIds`, `RaggedIds`, `SparseIds`, an object with
        `values` and `row_splits` (`tf.RaggedTensor`), or one with `indices`, `values`
        and `dense_shape` (`tf.SparseTensor`). Masked places of a NumPy masked array
        become `PADDING_ROW_ID`.
      owner: owner of the ids, for errors, such as `"feature 'movie'"`.
      what: name of the values, for errors.

    Returns:
      The values as NumPy arrays, of any dtype. Row splits, and the shapes and dtypes of
      coordinates, are checked. Values and the range of coordinates are not.

    Raises:
      TypeError: if the container is none of those.
      ValueError: if its parts do not fit each other.
    """
    _refuse_unclear(ids, owner, what)
    if isinstance(ids, DenseIds):
        inner = read_ids(ids.ids, owner, what)
        if not isinstance(inner.ids, DenseIds):
            raise TypeError(
                f"{what} of {owner}: DenseIds.ids must be an array, got "
                f"{type(ids.ids).__name__}; pass it without DenseIds around it."
            )
        dense = dataclasses.replace(inner.ids, weights=ids.weights)
        return dataclasses.replace(inner, ids=dense)
    if hasattr(ids, "values") and hasattr(ids, "row_splits"):
        return _read_ragged(ids, owner, what)
    if all(hasattr(ids, name) for name in ("indices", "values", "dense_shape")):
        return _read_sparse(ids, owner, what)
    if isinstance(ids, list | tuple):
        return _read_lists(ids, owner, what)
    array = as_array(ids, owner, what)
    if array.dtype == object and array.ndim:
        return _read_lists(array.tolist(), owner, what)
    return _dense(array)


def as_array(values: Any, owner: str, what: str = "Ids") -> np.ndarray:
    """Converts values to a NumPy array, with errors that name their owner."""
    if isinstance(values, np.ma.MaskedArray):
        return _without_mask(values, owner, what)
    if isinstance(values, jax.core.Tracer):
        raise TypeError(
            f"{what} of {owner} must be on the host, got {values}; call prepare "
            "outside jit and other transformations of JAX."
        )
    if isinstance(values, jax.Array) and not values.is_fully_addressable:
        raise ValueError(
            f"{what} of {owner} must be on this process, got an array of shape "
            f"{values.shape} that other processes hold a part of; prepare the batch "
            "before it is sharded."
        )
    if isinstance(values, list) and values and are_strings(values):
        return _flat_array(values)
    try:
        return np.asarray(values)
    except Exception as error:  # A foreign object may raise anything.
        raise TypeError(
            f"{what} of {owner} must be an array, got {type(values).__name__}, which "
            f"NumPy cannot read: {error}"
        ) from error


def check_row_splits(row_splits: np.ndarray, num_values: int, owner: str) -> None:
    """Refuses row splits that do not cut the values into at least one sample."""
    if row_splits.ndim != 1 or row_splits.shape[0] < 2:
        raise ValueError(
            f"row_splits of {owner} must have shape [batch + 1] with at least one "
            f"sample, got {row_splits.shape}."
        )
    if not is_integer(row_splits.dtype):
        raise TypeError(
            f"row_splits of {owner} must be integers, got dtype {row_splits.dtype}."
        )
    if row_splits[0] != 0 or row_splits[-1] != num_values:
        raise ValueError(
            f"row_splits of {owner} must begin with 0 and end with the number of "
            f"values, {num_values}, got {row_splits[0]} and {row_splits[-1]}."
        )
    falls = row_splits[1:] < row_splits[:-1]
    if falls.any():
        i = int(falls.argmax())
        raise ValueError(
            f"row_splits of {owner} must not fall, got {row_splits[i]} and then "
            f"{row_splits[i + 1]} at sample {i}."
        )


def is_integer(dtype: Any) -> bool:
    """Returns True for integers of any width; False for booleans and time spans."""
    return jax.numpy.issubdtype(dtype, np.integer) and np.dtype(dtype).kind != "m"


def is_real(dtype: Any) -> bool:
    """Returns True for numbers that a weight may be: floats, integers and booleans."""
    return (
        jax.numpy.issubdtype(dtype, np.floating)
        or jax.numpy.issubdtype(dtype, np.bool_)
        or is_integer(dtype)
    )


def _dense(array: np.ndarray) -> HostIds:
    shape = array.shape if array.ndim <= 1 else array.shape[:-1]
    return HostIds(ids=DenseIds(ids=array), batch_shape=shape)


def _without_mask(values: np.ma.MaskedArray, owner: str, what: str) -> np.ndarray:
    if not np.ma.is_masked(values):
        return np.asarray(values.data)
    if what != "Ids" or not is_integer(values.dtype):
        raise TypeError(
            f"{what} of {owner} must have no masked places, got a masked array of "
            f"dtype {values.dtype}; choose their value with .filled(value)."
        )
    # The ids' own type may be too narrow for the padding.
    data = values.data.astype(np.promote_types(values.dtype, np.uint32))
    data[np.ma.getmaskarray(values)] = PADDING_ROW_ID
    return data


def _read_ragged(ids: Any, owner: str, what: What) -> HostIds:
    row_splits = as_array(ids.row_splits, owner, "row_splits")
    weights = ids.weights if isinstance(ids, RaggedIds) else None
    if hasattr(ids.values, "row_splits"):
        return _read_nested_ragged(row_splits, weights, ids.values, owner, what)
    values = as_array(ids.values, owner, what)
    if values.ndim != 1:
        raise ValueError(
            f"values of {owner} must have one axis, got shape {values.shape}."
        )
    check_row_splits(row_splits, values.shape[0], owner)
    ragged = RaggedIds(values=values, row_splits=row_splits, weights=weights)
    return HostIds(ids=ragged, batch_shape=(row_splits.shape[0] - 1,))


def _read_nested_ragged(
    row_splits: np.ndarray, weights: Any, inner_ids: Any, owner: str, what: What
) -> HostIds:
    """Reads several ragged axes, of which all but the last must have equal rows."""
    inner = _read_ragged(inner_ids, owner, what)
    num_rows, *further = inner.batch_shape
    check_row_splits(row_splits, num_rows, owner)
    lengths = np.diff(row_splits)
    if (lengths != lengths[0]).any():
        _raise_uneven(lengths.tolist(), owner, what)
    return HostIds(
        ids=dataclasses.replace(inner.ids, weights=weights),
        batch_shape=(lengths.shape[0], int(lengths[0]), *further),
    )


def _read_sparse(ids: Any, owner: str, what: What) -> HostIds:
    indices = as_array(ids.indices, owner, "indices")
    values = as_array(ids.values, owner, what)
    dense_shape = as_array(ids.dense_shape, owner, "dense_shape")
    weights = ids.weights if isinstance(ids, SparseIds) else None
    if values.ndim != 1:
        raise ValueError(
            f"values of {owner} must have one axis, got shape {values.shape}."
        )
    if dense_shape.ndim != 1 or (
        dense_shape.size and not is_integer(dense_shape.dtype)
    ):
        raise TypeError(
            f"dense_shape of {owner} must be a list of integers, got "
            f"{ids.dense_shape!r}."
        )
    shape = tuple(int(size) for size in dense_shape)
    if not values.size and not indices.size:
        indices = np.zeros((0, len(shape)), np.int64)
    if indices.shape != (values.shape[0], len(shape)) or len(shape) < 2:
        raise ValueError(
            f"indices of {owner} must have shape [num_values, rank] with rank >= 2, "
            f"here ({values.shape[0]}, {len(shape)}), got {indices.shape}."
        )
    if not is_integer(indices.dtype):
        raise TypeError(
            f"indices of {owner} must be integers, got dtype {indices.dtype}."
        )
    if min(shape) < 0 or math.prod(shape[:-1]) > MAX_SAMPLES:
        raise ValueError(
            f"dense_shape of {owner} must be [batch, positions], with at most "
            f"{MAX_SAMPLES} samples, got {list(shape)}."
        )
    sparse = SparseIds(
        indices=indices, values=values, dense_shape=dense_shape, weights=weights
    )
    return HostIds(ids=sparse, batch_shape=shape[:-1])


def _read_lists(items: Any, owner: str, what: What) -> HostIds:
    """Reads nested lists: rectangular ones as dense, others as ragged."""
    if not isinstance(_first_leaf(items), str | bytes):
        try:
            array = np.asarray(items)
        except Exception:  # Uneven lists, or elements that NumPy cannot read.
            array = None
        if array is not None and array.dtype != object:
            # NumPy takes empty lists for floats.
            return _dense(array if array.size else array.astype(np.int32))
    shape = [len(items)]
    level = list(items)
    while _has_lists(level):
        if not all(map(_is_list, level)):
            i = [_is_list(item) for item in level].index(False)
            raise ValueError(
                f"{what} of {owner} must be lists of one depth, got {level[i]!r} "
                "beside lists; write [x] for a sample with one id, [] for one without."
            )
        rows = [_as_list(item) for item in level]
        lengths = [len(row) for row in rows]
        level = [item for row in rows for item in row]
        is_last = not _has_lists(level)
        if is_last and len(set(lengths)) > 1:
            row_splits = np.cumsum([0, *lengths])
            ragged = RaggedIds(values=_flat_array(level), row_splits=row_splits)
            return HostIds(ids=ragged, batch_shape=tuple(shape))
        if len(set(lengths)) > 1:
            _raise_uneven(lengths, owner, what)
        if len(shape) == MAX_AXES:
            raise ValueError(
                f"{what} of {owner} must have fewer than {MAX_AXES} axes, got lists "
                "that are nested deeper."
            )
        shape.append(lengths[0])
    return _dense(_flat_array(level).reshape(shape))


def _raise_uneven(lengths: list[int], owner: str, what: str) -> None:
    i = next(i for i, length in enumerate(lengths) if length != lengths[0])
    raise ValueError(
        f"{what} of {owner} may vary in length along their last axis only, got "
        f"{lengths[0]} and {lengths[i]} lists of ids at 0 and {i}; fill up the shorter "
        "with empty lists, or merge the lists of a sample."
    )


def are_strings(items: list[Any]) -> bool:
    """Returns True if all items are str or bytes."""
    # One look at each type is much faster than one at each item.
    return all(issubclass(kind, str | bytes) for kind in set(map(type, items)))


def _has_lists(items: list[Any]) -> bool:
    return not are_strings(items) and any(map(_is_list, items))


def _is_list(item: Any) -> bool:
    return isinstance(item, list | tuple) or bool(
        isinstance(item, np.ndarray | jax.Array) and item.ndim
    )


def _as_list(item: Any) -> list[Any]:
    return list(item) if isinstance(item, list | tuple) else np.asarray(item).tolist()


def _first_leaf(items: Any) -> Any:
    for _ in range(MAX_AXES):
        if not _is_list(items) or not len(items):
            return items
        # An empty sample at the front tells nothing.
        items = next((item for item in items if not _is_list(item) or len(item)), None)
    return items


def _flat_array(items: list[Any]) -> np.ndarray:
    """Makes an array of one axis. Strings stay objects: they differ in length."""
    if not items:
        return np.zeros(0, np.int32)
    if any(issubclass(kind, str | bytes) for kind in set(map(type, items))):
        return np.fromiter(items, object, len(items))
    return np.asarray(items)


_STREAM = "is no batch; pass one batch of it, such as next(iter(data))"

# Properties by which an object is recognised, and the way out.
_UNCLEAR: Final = (
    (
        lambda ids: hasattr(ids, "tocoo") and hasattr(ids, "shape"),
        "is a SciPy matrix, whose columns may be ids or positions; write "
        "te.RaggedIds.from_scipy(matrix) if columns are ids and the data their "
        "weights, te.SparseIds.from_scipy(matrix) if columns are positions and the "
        "data the ids",
    ),
    (
        lambda ids: all(hasattr(ids, name) for name in ("indices", "data", "todense")),
        "is a sparse matrix, whose columns may be ids or positions; write "
        "te.SparseIds(indices=..., values=..., dense_shape=...) if the data are ids",
    ),
    (
        lambda ids: hasattr(ids, "values") and hasattr(ids, "offsets"),
        "is a jagged array; write te.RaggedIds(values=..., row_splits=...) with its "
        "values and offsets as NumPy arrays",
    ),
    (
        lambda ids: isinstance(ids, collections.abc.Mapping),
        "is a mapping; write te.DenseIds(ids=..., weights=...) or te.RaggedIds(...)",
    ),
    (lambda ids: hasattr(ids, "element_spec"), _STREAM),
    (lambda ids: isinstance(ids, collections.abc.Iterator), _STREAM),
    (
        lambda ids: isinstance(ids, collections.abc.Set),
        "is a set, which has no order; write list(...)",
    ),
)


def _refuse_unclear(ids: Any, owner: str, what: str) -> None:
    for is_meant, way_out in _UNCLEAR:
        if is_meant(ids):
            raise TypeError(
                f"{what} of {owner} must be an array, lists, DenseIds, RaggedIds or "
                f"SparseIds. {type(ids).__name__} {way_out}."
            )
