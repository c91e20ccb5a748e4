"""Random access to the lines of a text file that does not fit in memory.

`criteo.py` reads its batches through it. The file is memory-mapped. One pass builds an
index of the byte offset of each block of lines.
"""

import pathlib
from typing import Final

import numpy as np

from tpu_embedding.data.batch import DataError

SCAN_BYTES: Final = 2**24
"""Bytes scanned for line ends at a time; the scan takes a few times this memory."""

NEWLINE: Final = ord("\n")
GZIP_MAGIC: Final = b"\x1f\x8b"  # RFC 1952, section 2.3.1


class LineBlocks:
    """A text file split into blocks of `block_size` consecutive lines.

    A line ends at a newline or at the end of the file. The index takes 8 bytes per
    block.

    Attributes:
      path: path of the file.
      block_size: lines per block; the last block may have fewer.
      num_lines: number of lines in the file.
    """

    def __init__(self, path: pathlib.Path, *, block_size: int, source: str):
        """Maps the file and builds the index.

        Args:
          path: path of the file.
          block_size: lines per block, at least 1.
          source: a sentence for error messages that says where to get the file.

        Raises:
          DataError: if the file is missing, empty or compressed.
        """
        if not path.is_file():
            raise DataError(f"{path} is not a file. {source}")
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty, expected at least one line. {source}")
        self.path = path
        self.block_size = block_size
        self._bytes = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        if self._bytes[: len(GZIP_MAGIC)].tobytes() == GZIP_MAGIC:
            raise DataError(f"{path} is compressed with gzip; unpack it first.")
        self.num_lines, self._offsets = _index(self._bytes, block_size)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the bytes of lines `start` to `stop - 1`, counted from 0.

        The last byte is always a newline, even if the file does not end with one.
        """
        first_block, last_block = (
            start // self.block_size,
            (stop - 1) // self.block_size,
        )
        data = self._bytes[self._offsets[first_block] : self._offsets[last_block + 1]]
        if data[-1] != NEWLINE:
            data = np.append(data, np.uint8(NEWLINE))
        skipped = start - first_block * self.block_size
        ends = np.flatnonzero(data == NEWLINE) + 1
        begin = ends[skipped - 1] if skipped else 0
        return data[begin : ends[skipped + stop - start - 1]]


def _index(data: np.ndarray, block_size: int) -> tuple[int, np.ndarray]:
    """Returns the number of lines and the byte offsets of the blocks and file end."""
    num_lines = 0
    offsets = [np.zeros(1, np.int64)]
    for start in range(0, len(data), SCAN_BYTES):
        next_lines = np.flatnonzero(data[start : start + SCAN_BYTES] == NEWLINE) + (
            start + 1
        )
        offsets.append(next_lines[-(num_lines + 1) % block_size :: block_size])
        num_lines += len(next_lines)
    num_lines += int(data[-1] != NEWLINE)
    starts = np.concatenate(offsets)
    return num_lines, np.append(starts[starts < len(data)], len(data))
