"""Records in host memory or in a memory-mapped file, one per row.

One access reads a table row with its slot variables. This module only moves bytes;
`records.py` says what they mean.
"""

import functools
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

_SLICE_BYTES: Final = 2**20
"""Minimum bytes per thread without a file, since starting threads takes 20 to 50 us."""

_FILE_THREADS: Final = 32
_FILE_SLICE_ROWS: Final = 64
"""Minimum rows per thread with a file, where each row may wait for the disk."""


class RowStore:
    """Records ordered by row, uint32 `[num_rows, words]`.

    Threads may read and write concurrently if their rows differ. With a `directory`,
    the records are in an unnamed file there, which is freed when the store or the
    process ends. After a crash, training can therefore only continue from a checkpoint.
    """

    def __init__(self, num_rows: int, words: int, directory: str | None = None):
        self._map = None
        if directory is None:
            # Zeros, because totals also read padding rows. Linux allocates zero pages
            # lazily.
            self._records = np.zeros((num_rows, words), np.uint32)
            return
        self._map = _mapped_file(directory, 4 * num_rows * words)
        if hasattr(mmap, "MADV_RANDOM"):
            # Without this, Linux reads 128 KiB for each row.
            self._map.madvise(mmap.MADV_RANDOM)
        self._records = np.frombuffer(self._map, np.uint32).reshape(num_rows, words)

    @property
    def num_bytes(self) -> int:
        return self._records.nbytes

    def read(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Reads records, into a contiguous `out` if given.

        Negative rows give unspecified records.
        """
        if out is None:
            out = np.empty((len(rows), self._records.shape[1]), np.uint32)
        assert out.shape == (len(rows), self._records.shape[1])
        assert out.flags.c_contiguous and self._has(rows)

        def read_slice(part: slice) -> None:
            # Any mode except "raise" copies directly to `out`, without the GIL.
            np.take(self._records, rows[part], axis=0, out=out[part], mode="clip")

        self._in_slices(read_slice, len(rows))
        return out

    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Replaces records. Rows must be distinct; negative ones are skipped."""
        assert records.shape == (len(rows), self._records.shape[1])
        assert records.dtype == np.uint32 and self._has(rows)
        record = np.dtype((np.void, 4 * records.shape[1]))
        # `np.put` of whole records is the fastest scatter, and releases the GIL.
        target = self._records.view(record)[:, 0]

        def write_slice(part: slice) -> None:
            used, values = rows[part], records[part]
            if (is_used := used >= 0).all():
                values = np.ascontiguousarray(values)
            else:
                used, values = used[is_used], values[is_used]
            np.put(target, used, values.view(record)[:, 0], mode="clip")

        self._in_slices(write_slice, len(rows))

    def write_words(self, rows: np.ndarray, values: np.ndarray, words: slice) -> None:
        """Replaces the columns `words` in records. Rows must be distinct."""

        def write_slice(part: slice) -> None:
            self._records[rows[part], words] = values[part]

        self._in_slices(write_slice, len(rows))

    def fill(self, record: np.ndarray, words: slice) -> None:
        """Writes `record`, uint32 `[1, n]`, into all records' columns `words`."""

        def fill_slice(part: slice) -> None:
            self._records[part, words] = record

        self._in_slices(fill_slice, len(self._records))

    def read_range(self, begin: int, end: int, words: slice) -> np.ndarray:
        """Copies the columns `words` from rows `begin` to `end - 1`."""
        if self._map is None or begin >= end or not hasattr(mmap, "MADV_RANDOM"):
            return self._records[begin:end, words].copy()
        # Turns read-ahead back on, only for these rows.
        row_bytes = self._records.strides[0]
        start = begin * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_NORMAL, start, end * row_bytes - start)
        values = self._records[begin:end, words].copy()
        self._map.madvise(mmap.MADV_RANDOM, start, end * row_bytes - start)
        return values

    def write_range(self, begin: int, values: np.ndarray, words: slice) -> None:
        """Replaces the columns `words` in `len(values)` rows, from `begin` on."""
        assert values.dtype == np.uint32 and begin + len(values) <= len(self._records)
        target = self._records[begin : begin + len(values), words]

        def write_slice(part: slice) -> None:
            target[part] = values[part]

        self._in_slices(write_slice, len(values))

    def _has(self, rows: np.ndarray) -> bool:
        return not len(rows) or int(rows.max()) < len(self._records)

    def _in_slices(self, function: Callable[[slice], None], count: int) -> None:
        """Calls a function on slices, in threads if there are many rows."""
        num_threads, num_bytes = _num_cores(), count * self._records.strides[0]
        num_slices = min(num_threads, num_bytes // _SLICE_BYTES)
        if self._map is not None:
            num_threads = _FILE_THREADS
            num_slices = min(num_threads, count // _FILE_SLICE_ROWS)
        if num_slices < 2:
            return function(slice(0, count))
        ends = [count * number // num_slices for number in range(num_slices + 1)]
        slices = list(map(slice, ends[:-1], ends[1:]))
        for _ in in_threads(function, slices, num_threads=num_threads):
            pass  # Raises the error of a slice.


def in_threads(
    function: Callable[..., Any], *arguments: Sequence[Any], num_threads: int = 0
) -> Iterator[Any]:
    """Maps a function in threads, by default one per core.

    Calls must not wait for each other.
    """
    if len(arguments[0]) == 1:
        return map(function, *arguments)
    threads = _threads_of_process(os.getpid(), num_threads or _num_cores())
    return threads.map(function, *arguments)


@functools.cache
def _threads_of_process(process_id: int, count: int) -> ThreadPoolExecutor:
    del process_id  # A forked process can't use its parent's threads.
    return ThreadPoolExecutor(count, "host_rows")


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _mapped_file(directory: str, num_bytes: int) -> mmap.mmap:
    """Maps a new unnamed file, which exists as long as the map."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            # Without reserved space, writing to a page would kill the process once the
            # disk is full.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:
                file.truncate(num_bytes)
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"HostRows.directory must be a directory with room for {num_bytes:,} "
            f"bytes, got {directory!r}: {error.strerror}. Use a larger disk or a "
            "smaller table",
        ) from None
