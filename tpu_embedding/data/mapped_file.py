"""Memory-mapped files whose resident memory stays bounded.

A mapped page counts as memory of the process until the kernel takes it back. A process
that reads a whole terabyte would seem to hold all free memory. `MappedFile` therefore
returns the pages every few megabytes. They stay in the kernel's file cache.
"""

import mmap
import pathlib
from typing import Any, Final, Literal

import numpy as np

RELEASE_BYTES: Final = 2**26
"""Bytes read between two releases of the mapped pages."""


class MappedFile:
    """A file as read-only bytes. It can be pickled: the copy maps the file anew.

    Attributes:
      path: path of the file, which must not be empty.
      num_bytes: size of the file when it was opened.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.num_bytes = len(self._map)
        self._unreleased = 0

    def view(
        self,
        offset: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        order: Literal["C", "F"] = "C",
    ) -> np.ndarray:
        """Returns an array over the bytes from `offset` on, without a copy."""
        return np.ndarray(shape, dtype, self._map, offset, order=order)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns a copy of the bytes from `start` to `stop - 1`."""
        data = self.view(start, np.dtype(np.uint8), (stop - start,)).copy()
        self.note_read(data.nbytes)
        return data

    def note_read(self, num_bytes: int) -> None:
        """Counts bytes that were read, and releases the pages from time to time."""
        self._unreleased += num_bytes
        if self._unreleased >= RELEASE_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._unreleased = 0

    def __reduce__(self):
        return type(self), (self.path,)
