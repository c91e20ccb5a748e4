"""Files of which parts are read, while the memory of the process stays bounded.

A mapped page counts as memory of the process until the kernel takes it back. A process
that reads a whole terabyte would seem to hold all free memory. `MappedFile` therefore
returns the pages every few megabytes. They stay in the kernel's file cache.
"""

import mmap
import os
import pathlib
import weakref
import zlib
from typing import Any, Final, Literal

import numpy as np

from tpu_embedding.tools.data.batch import DataError

RELEASE_BYTES: Final = 2**24
"""Bytes read between two releases of the mapped pages.

The kernel maps 64 kB around each page that is read, so several times this memory may be
in use.
"""

_NUM_PIECES: Final = 64
_PIECE_BYTES: Final = 2**12
"""Pieces of a file that its digest covers, at equal distances from start to end."""


class MappedFile:
    """A file as read-only bytes. It can be pickled: the copy maps the file anew.

    Attributes:
      path: path of the file, which must not be empty.
      num_bytes: size of the file when it was opened.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
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

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` to `stop - 1`.

        It reads the file instead of mapped pages, which suits small pieces better.

        Raises:
          DataError: if the file has become shorter.
        """
        data = os.pread(self._descriptor, stop - start, start)
        if len(data) < stop - start:
            raise DataError(f"{self.path} became shorter while it was read.")
        return data

    def sample_digest(self) -> str:
        """Returns a digest of the size and of some pieces of the file.

        It finds another file in the place of this one, but not each changed byte.
        """
        digest = zlib.crc32(str(self.num_bytes).encode())
        last = max(0, self.num_bytes - _PIECE_BYTES)
        for start in np.linspace(0, last, _NUM_PIECES, dtype=np.int64).tolist():
            stop = min(start + _PIECE_BYTES, self.num_bytes)
            digest = zlib.crc32(self.read(start, stop), digest)
        return f"{digest:08x}"

    def note_read(self, num_bytes: int) -> None:
        """Counts bytes of views that were read; releases the pages now and then."""
        self._unreleased += num_bytes
        if self._unreleased >= RELEASE_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._unreleased = 0

    def __reduce__(self):
        return type(self), (self.path,)
