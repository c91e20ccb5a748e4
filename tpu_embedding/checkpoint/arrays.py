"""Reads and writes the arrays of a checkpoint with tensorstore.

An array has the format zarr 3, without compression. Each chunk ends with its crc32c, so
a reader notices a flipped bit. A missing chunk is an error, never zeros. A chunk of a
large table is 10 to 20 MB of neighbouring rows.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import tensorstore as ts
from etils import epath

from tpu_embedding.checkpoint.errors import CheckpointError, damaged, unreadable
from tpu_embedding.checkpoint.format import (
    STORES,
    TABLES,
    ArrayRecord,
    TableRecord,
    array_name,
    check_files,
    describe,
    one_save,
)
from tpu_embedding.rows.file_rows import decode_int8

_DIGEST_DIFFERS: Final = ("DATA_LOSS", "FAILED_PRECONDITION")
"""Errors of tensorstore for a chunk of another digest, and of another size."""


class ArrayFile:
    """An array of a checkpoint, open to read or to write ranges of rows."""

    def __init__(self, directory: epath.Path, name: str, record: ArrayRecord):
        """Opens an array whose description is known.

        Args:
          directory: holds all arrays of the checkpoint.
          name: from `array_name`.
          record: shape and type of the array.
        """
        self._path, self._record = directory / name, record
        # Without a request to the file system.
        self._store = ts.open({**self._spec(), "assume_metadata": True}).result()

    def create(self) -> ts.Future:
        """Starts to write the description of the array; one process calls it."""
        return ts.open(self._spec(), create=True)

    def _spec(self) -> dict[str, Any]:
        record = self._record
        return {
            "driver": "zarr3",
            "kvstore": _kvstore(self._path),
            "metadata": {
                "shape": record.shape,
                "data_type": record.dtype,
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": record.chunk_shape},
                },
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
            },
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }

    def write(self, values: np.ndarray, start: int | None = None) -> ts.Future:
        """Starts to write; the values must stay as they are until the end.

        Args:
          values: rows, or the whole array.
          start: first row; None: the whole array.
        """
        store = self._store
        if start is not None:
            store = store[start : start + len(values)]
        write = store.write(values, can_reference_source_data_indefinitely=True)
        return write.commit

    def read(self, rows: slice | np.ndarray | None = None) -> np.ndarray:
        """Reads rows, or the whole array.

        Args:
          rows: a slice within the array, or row ids `[n]`; None: the whole array.

        Raises:
          CheckpointError: if a chunk is missing or damaged.
        """
        store = self._store if rows is None else self._store[rows]
        try:
            return store.read().result()
        except (ValueError, OSError, RuntimeError) as error:
            problem = str(error).partition(" [")[0].partition("\n")[0]
            if problem.startswith("NOT_FOUND"):
                raise unreadable(self._path, FileNotFoundError(problem)) from error
            if not problem.startswith(_DIGEST_DIFFERS):
                raise unreadable(self._path, error) from error
            if isinstance(rows, slice):
                problem += f" (rows {rows.start} to {rows.stop})"
            raise damaged(self._path, problem) from error


class HostBudget:
    """Bounds the bytes that wait in host memory to be written."""

    def __init__(self, limit: int):
        """Makes an unused budget.

        Args:
          limit: maximum number of bytes. Larger single arrays still pass, one by one.
        """
        self._limit, self._used = limit, 0
        self._condition = threading.Condition()

    def take(self, size: int) -> None:
        """Waits until the bytes fit, and counts them."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._used == 0 or self._used + size <= self._limit
            )
            self._used += size

    def give_back(self, size: int) -> None:
        """Ends the use of the bytes."""
        with self._condition:
            self._used -= size
            self._condition.notify_all()


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
    with one_save(directory) as root:
        file, of_table, array = _open_array(root, table, slot)
        values = _read_rows(file, array, rows)
    if slot is None and of_table.dtype == "int8":
        return decode_int8(values)
    return values


def iterate_rows(
    directory: str | os.PathLike[str], table: str, *, slot: str | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the rows of a table, or of a slot variable with rows, chunk by chunk.

    Only one chunk is in memory. Its rows are a power of two, or all rows.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.
      table: name of the table.
      slot: name of a slot variable; None: the values of the table.

    Yields:
      First row of the chunk, and the rows as `read_table` returns them.

    Raises:
      CheckpointError: see `read_table`.
    """
    with one_save(directory) as root:
        file, of_table, array = _open_array(root, table, slot)
        num_rows, chunk_rows = array.shape[0], array.chunk_rows or 1
        for start in range(0, num_rows, chunk_rows):
            values = file.read(slice(start, min(start + chunk_rows, num_rows)))
            is_int8 = slot is None and of_table.dtype == "int8"
            yield start, decode_int8(values) if is_int8 else values


def _open_array(
    root: epath.Path, table: str, slot: str | None
) -> tuple[ArrayFile, TableRecord, ArrayRecord]:
    """Opens an array of a checkpoint, after checking its files."""
    record = describe(root)
    if table not in record.tables:
        raise CheckpointError(
            f"The checkpoint {root} has no table {table!r}, only "
            f"{sorted(record.tables)}."
        )
    of_table = record.tables[table]
    if slot not in of_table.arrays:
        raise CheckpointError(
            f"Table {table!r} of the checkpoint {root} has no slot variable {slot!r}, "
            f"only {sorted(filter(None, of_table.arrays))}."
        )
    array = of_table.arrays[slot]
    name = array_name(table, slot)
    check_files(root, lambda file: file.startswith(f"{TABLES}/{name}/"))
    return ArrayFile(root / TABLES, name, array), of_table, array


def _read_rows(file: ArrayFile, array: ArrayRecord, rows: Any) -> np.ndarray:
    if rows is None or array.chunk_rows is None:
        return file.read()
    size = array.shape[0]
    if isinstance(rows, slice):
        start, stop, step = rows.indices(size)
        if step != 1:
            raise ValueError(f"rows must have step 1, got {rows}.")
        return file.read(slice(start, max(start, stop)))
    row_ids = np.asarray(rows)
    is_integer = np.issubdtype(row_ids.dtype, np.integer) or _holds_integers(row_ids)
    if row_ids.ndim != 1 or (row_ids.size and not is_integer):
        raise TypeError(
            "rows must be a slice or row ids [n] of an integer type, got "
            f"{row_ids.dtype}{list(row_ids.shape)}; write [3] for one row."
        )
    outside = row_ids[(row_ids < 0) | (row_ids >= size)]
    if outside.size:
        raise IndexError(f"rows must lie between 0 and {size - 1}, got {outside[0]}.")
    return file.read(row_ids.astype(np.int64))


def _holds_integers(values: np.ndarray) -> bool:
    """Returns True for integers beyond 64 bits, which NumPy holds as objects."""
    return values.dtype == object and all(type(value) is int for value in values.flat)


def _kvstore(path: epath.Path) -> dict[str, str]:
    text = os.fspath(path)
    for scheme, driver in STORES.items():
        if text.startswith(scheme):
            bucket, _, rest = text.removeprefix(scheme).partition("/")
            return {"driver": driver, "bucket": bucket, "path": f"{rest}/"}
    return {"driver": "file", "path": f"{text}/"}
