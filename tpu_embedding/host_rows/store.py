"""The records of all rows of a stack, in the host's memory or in a mapped file.

A record holds the bits of a table's row and of its slot variables, so that one access
reads everything that is stored for a row. The files of this folder write their own code
for what a record means; this file only moves bytes.
"""

import contextlib
import functools
import os
import pathlib
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

_SLICE_ROWS: Final = 4096
"""Fewest rows of a slice. Threads take 20 to 50 us to start, as long as its copy."""


def num_threads() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shared_threads() -> ThreadPoolExecutor:
    """Returns the threads of this process that copy and sort on the host.

    A function that runs in one of them must not wait for another.
    """
    return _threads_of_process(os.getpid())


@functools.cache
def _threads_of_process(process_id: int) -> ThreadPoolExecutor:
    """Returns new threads in a forked process: the parent's don't run there."""
    del process_id
    return ThreadPoolExecutor(num_threads(), thread_name_prefix="host_rows")


class RowStore:
    """Records of a stack's rows, in natural order: uint32 `[num_rows, words]`.

    Threads may read and write at the same time if their rows differ.

    Args:
      num_rows: rows of the stack.
      words: 4-byte words of a record.
      path: file to make and map, for tables larger than the host's memory. It is
        scratch space that `close` removes: after a crash, training continues from a
        checkpoint. `None` keeps the records in memory, and Linux provides each page
        when it is first written.

    Raises:
      FileExistsError: if the file exists.
      OSError: if the file can't be made, or the disk has too little space for it.
    """

    def __init__(self, num_rows: int, words: int, path: str | None = None):
        shape = (num_rows, words)
        if path is None:
            self._records = np.empty(shape, np.uint32)
            self._remove_file = None
        else:
            _make_file(path, 4 * num_rows * words)
            self._remove_file = weakref.finalize(self, _remove_file, path)
            self._records = np.asarray(np.memmap(path, np.uint32, "r+", shape=shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._records.nbytes

    def read(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Returns the records of rows, with several threads if there are many.

        Args:
          rows: int32 `[count]`, stack rows. The record of a negative row is
            unspecified.
          out: uint32 `[count, words]`, contiguous, to return. `None` makes an array.
        """
        if out is None:
            out = np.empty((len(rows), self._records.shape[1]), np.uint32)
        assert out.shape == (len(rows), self._records.shape[1])
        assert out.flags.c_contiguous and self._has(rows)

        def read_slice(part: slice) -> None:
            # Any mode but "raise" copies directly to `out`, without Python's lock.
            np.take(self._records, rows[part], axis=0, out=out[part], mode="clip")

        _in_slices(read_slice, len(rows))
        return out

    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Replaces the records of rows, with several threads if there are many.

        Args:
          rows: int32 `[count]`, distinct stack rows. Negative ones are skipped.
          records: uint32 `[count, words]`.
        """
        assert records.shape == (len(rows), self._records.shape[1])
        assert records.dtype == np.uint32 and self._has(rows)
        record = np.dtype((np.void, 4 * records.shape[1]))
        # `np.put` of whole records is the fastest scatter, and releases Python's lock.
        target = self._records.view(record)[:, 0]

        def write_slice(part: slice) -> None:
            used, values = rows[part], records[part]
            if (is_used := used >= 0).all():
                values = np.ascontiguousarray(values)
            else:
                used, values = used[is_used], values[is_used]
            np.put(target, used, values.view(record)[:, 0], mode="clip")

        _in_slices(write_slice, len(rows))

    def read_range(self, begin: int, end: int, words: slice) -> np.ndarray:
        """Returns a copy of some words of the rows `begin` to `end - 1`."""
        return self._records[begin:end, words].copy()

    def write_range(self, begin: int, values: np.ndarray, words: slice) -> None:
        """Replaces some words of `len(values)` rows, from row `begin` on.

        Args:
          begin: first row.
          values: uint32 `[rows, number of words]`.
          words: where they are in a record.
        """
        assert values.dtype == np.uint32 and begin + len(values) <= len(self._records)
        self._records[begin : begin + len(values), words] = values

    def read_words(self, rows: np.ndarray, words: slice) -> np.ndarray:
        """Returns some words of the records of rows: uint32 `[rows, words]`."""
        return self._records[rows, words]

    def write_words(self, rows: np.ndarray, values: np.ndarray, words: slice) -> None:
        """Replaces some words of the records of distinct rows."""
        self._records[rows, words] = values

    def close(self) -> None:
        """Frees the records, and removes the file. The store can't be used again."""
        self._records = self._records[:0].copy()
        if self._remove_file is not None:
            self._remove_file()

    def _has(self, rows: np.ndarray) -> bool:
        return not len(rows) or int(rows.max()) < len(self._records)


def _in_slices(function: Callable[[slice], None], count: int) -> None:
    """Calls a function for slices of `count` positions, in threads if it is large."""
    num_slices = min(num_threads(), count // _SLICE_ROWS)
    if num_slices < 2:
        return function(slice(0, count))
    ends = [count * number // num_slices for number in range(num_slices + 1)]
    for _ in shared_threads().map(function, map(slice, ends[:-1], ends[1:])):
        pass  # Raises the error of a slice.


def _make_file(path: str, num_bytes: int) -> None:
    """Makes a file, with its space on the disk reserved.

    A mapped file without space ends the process when a page of it is written.
    """
    try:
        file = open(path, "xb")
    except FileExistsError:
        raise FileExistsError(
            f"HostRows.directory must not have a file {path!r}, but has. Another run "
            "may be using it. If none is, a run that crashed has left it: remove it."
        ) from None
    with file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:
                file.truncate(num_bytes)
        except OSError as error:
            _remove_file(path)
            raise OSError(
                error.errno,
                f"HostRows.directory needs {num_bytes:,} bytes for the file {path!r}: "
                f"{error.strerror}. Use a larger disk, or fewer rows",
            ) from None


def _remove_file(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        pathlib.Path(path).unlink()
