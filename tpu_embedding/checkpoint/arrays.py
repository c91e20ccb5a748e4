"""Reads and writes the arrays of a checkpoint with tensorstore.

An array has the format zarr 3, without compression. Each chunk ends with its crc32c, so
any reader of zarr notices a flipped bit. A missing chunk is an error, never zeros. A
chunk of a large table is 10 to 20 MB of neighbouring rows.
"""

import collections
import math
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorstore as ts
from etils import epath

from tpu_embedding.checkpoint.errors import CheckpointError, errors_of_reading
from tpu_embedding.checkpoint.records import (
    STORES,
    ArrayRecord,
    array_keys,
    describe,
    state_directory,
)
from tpu_embedding.rows.file_rows import decode_int8
from tpu_embedding.tables.row_windows import rows_per_block

MAX_PENDING_BYTES: Final = 2**28
"""Bound on the bytes that wait in host memory to be written."""

_MAX_PADDING: Final = 1 / 128
"""Bound on the padding of the last chunk, as a share of the array's rows."""


def array_spec(
    path: epath.Path, dtype: Any, shape: Sequence[int], chunk_shape: Sequence[int]
) -> dict[str, Any]:
    """Returns the tensorstore spec of a new array.

    Args:
      path: directory of the array.
      dtype: type of its elements.
      shape: shape of the array.
      chunk_shape: shape of a chunk; an axis without elements still has chunks of one.
    """
    return {
        "driver": "zarr3",
        "kvstore": _kvstore(path),
        "metadata": {
            "shape": list(shape),
            "data_type": np.dtype(dtype).name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [max(1, x) for x in chunk_shape]},
            },
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        },
        "store_data_equal_to_fill_value": True,
    }


def rows_per_chunk(num_rows: int, row_shape: Sequence[int], dtype: Any) -> int:
    """Returns the rows of a chunk: all, or a power of two that divides a block's.

    All chunks of an array have one size in its files. The last one is filled up with
    zeros, so chunks are smaller where it would be larger than its share.

    Args:
      num_rows: rows of the array.
      row_shape: shape of a row.
      dtype: type of its elements.
    """
    size = rows_per_block(math.prod(row_shape) * np.dtype(dtype).itemsize)
    if num_rows <= size:
        return num_rows
    while size > 1 and -num_rows % size > _MAX_PADDING * num_rows:
        size //= 2
    return size


class PendingWrites:
    """Writes in progress; `add` waits for the oldest ones while too many bytes wait."""

    def __init__(self):
        self._writes: collections.deque[tuple[int, ts.Future]] = collections.deque()
        self._num_bytes = 0

    def add(self, store: ts.TensorStore, values: np.ndarray) -> None:
        """Starts to write values, which must stay as they are until the end."""
        write = store.write(values, can_reference_source_data_indefinitely=True)
        self._writes.append((values.nbytes, write.commit))
        self._num_bytes += values.nbytes
        while self._num_bytes > MAX_PENDING_BYTES:
            num_bytes, oldest = self._writes.popleft()
            oldest.result()
            self._num_bytes -= num_bytes

    @property
    def futures(self) -> list[ts.Future]:
        """The ends of the writes that go on."""
        return [future for _, future in self._writes]


class SavedArray:
    """An array of a checkpoint, which opens in the background."""

    def __init__(
        self, root: epath.Path, keys: Sequence[str], record: ArrayRecord | None = None
    ):
        """Starts to open an array.

        Args:
          root: directory of the state.
          keys: of the array in the tree.
          record: shape and type that it must have; None: any.
        """
        self._owner = f"The array {'.'.join(keys)} of {root}"
        self._record = record
        spec = {"driver": "zarr3", "kvstore": _kvstore(root / ".".join(keys))}
        self._opening = ts.open(spec | {"fill_missing_data_reads": False}, read=True)

    def opened(self) -> ts.TensorStore:
        """Returns the open array.

        Raises:
          CheckpointError: if it is not there, or has another shape or type.
        """
        with errors_of_reading(self._owner):
            store = self._opening.result()
            found = ArrayRecord(shape=store.shape, dtype=store.dtype.name)
            if self._record is not None and str(found) != str(self._record):
                raise ValueError(f"it is {found} instead of {self._record}")
            return store

    def read(self, index: Any = ()) -> np.ndarray:
        """Reads a part of the array, or all of it.

        Args:
          index: slices within the array, or row ids `[n]`.

        Raises:
          CheckpointError: if a chunk is missing or damaged.
        """
        store = self.opened()
        with errors_of_reading(self._owner):
            return store[index].read().result()


def read_table(
    directory: str | os.PathLike[str],
    table: str,
    rows: slice | Any = None,
    *,
    slot: str | None = None,
) -> np.ndarray:
    """Reads rows of a table, or of one of its slot variables, without its plan.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.
      table: name of the table.
      rows: a slice with step 1, or row ids `[n]`; None: all rows.
      slot: name of a slot variable; None: the values of the table. `":ids"`: the ids
        of the rows of a dynamic table, uint64.

    Returns:
      `[n, *row_shape]`; tables in their own type. Rows of int8 tables are decoded to
      float32. Values that all rows share have no axis of rows.

    Raises:
      CheckpointError: if the table is not in the checkpoint, or a file is damaged.
      IndexError: if a row is not in the table.
      TypeError: if the row ids are no integers along one axis.
    """
    root = state_directory(directory)
    tables = describe(root).tables
    if table not in tables:
        raise CheckpointError(
            f"The checkpoint {root} has no table {table!r}, only {sorted(tables)}."
        )
    arrays = tables[table].arrays
    if slot not in arrays:
        raise CheckpointError(
            f"Table {table!r} of the checkpoint {root} has no slot variable "
            f"{slot!r}, only {sorted(filter(None, arrays))}."
        )
    array = SavedArray(root, array_keys(table, slot), arrays[slot])
    values = array.read(_index_of(rows, arrays[slot]))
    if slot is None and tables[table].dtype == "int8":
        return decode_int8(values)
    return values


def _index_of(rows: Any, array: ArrayRecord) -> Any:
    """Returns the index of some rows of an array, after checking it."""
    if rows is None or not array.has_rows:
        return ()
    size = array.shape[0]
    if isinstance(rows, slice):
        start, stop, step = rows.indices(size)
        if step != 1:
            raise ValueError(f"rows must have step 1, got {rows}.")
        return slice(start, max(start, stop))
    row_ids = np.asarray(rows)
    if row_ids.ndim != 1 or (row_ids.size and row_ids.dtype.kind not in "iu"):
        raise TypeError(
            "rows must be a slice or row ids [n] of an integer type, got "
            f"{row_ids.dtype}{list(row_ids.shape)}; write [3] for one row."
        )
    outside = row_ids[(row_ids < 0) | (row_ids >= size)]
    if outside.size:
        raise IndexError(f"rows must lie between 0 and {size - 1}, got {outside[0]}.")
    return row_ids.astype(np.int64)


def _kvstore(path: epath.Path) -> dict[str, str]:
    text = os.fspath(path)
    for scheme, driver in STORES.items():
        if text.startswith(scheme):
            bucket, _, rest = text.removeprefix(scheme).partition("/")
            return {"driver": driver, "bucket": bucket, "path": f"{rest}/"}
    return {"driver": "file", "path": f"{text}/"}
