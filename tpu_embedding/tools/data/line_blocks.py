"""Random access to the lines of a text file that does not fit in memory.

`criteo_lines.py` reads Criteo's logs by it. One pass indexes the offset of each
block of lines.
"""

import pathlib
import zlib
from typing import Final

import numpy as np

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.mapped_file import MappedFile

SCAN_BYTES: Final = 2**24
"""Bytes scanned for line ends at a time; the scan takes a few times this memory."""

_NEWLINE: Final = ord("\n")


class LineBlocks:
    """A text file split into blocks of `block_size` consecutive lines.

    A line ends at a newline or at the end of the file. The index takes 8 bytes per
    block. The object can be pickled.

    Attributes:
      path: path of the file.
      block_size: lines per block; the last block may have fewer.
      num_lines: number of lines in the file.
      digest: CRC-32 of the text, as 8 hexadecimal digits.
    """

    def __init__(self, path: pathlib.Path, *, block_size: int, source: str):
        """Opens the file and builds the index.

        Args:
          path: path of the file.
          block_size: lines per block, at least 1.
          source: a sentence for error messages that says where to get the file.

        Raises:
          DataError: if the file is missing or empty.
        """
        if not path.is_file():
            raise DataError(f"{path} is not a file. {source}")
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty, expected at least one line. {source}")
        self.path = path
        self.block_size = block_size
        self._text = MappedFile(path)
        self.num_lines, self._offsets, self.digest = _index(self._text, block_size)

    def read(self, start: int, stop: int) -> bytes:
        """Returns lines `start` to `stop - 1`, counted from 0.

        The last byte is always a newline, even if the file does not end with one.
        """
        first, last = start // self.block_size, (stop - 1) // self.block_size
        offset = int(self._offsets[first])
        data = self._text.read(offset, int(self._offsets[last + 1]))
        if not data.endswith(b"\n"):
            data += b"\n"
        begin = _skip_lines(data, 0, start - first * self.block_size)
        if stop in ((last + 1) * self.block_size, self.num_lines):
            return data[begin:]
        end = int(self._offsets[last]) - offset
        return data[begin : _skip_lines(data, end, stop - last * self.block_size)]


def _skip_lines(data: bytes, begin: int, num_lines: int) -> int:
    """Returns the place behind some lines that begin at `begin`."""
    for _ in range(num_lines):
        begin = data.index(b"\n", begin) + 1
    return begin


def _index(text: MappedFile, block_size: int) -> tuple[int, np.ndarray, str]:
    """Returns number of lines, byte offsets of the blocks and file end, and digest."""
    num_lines, last_byte, digest = 0, _NEWLINE, 0
    parts = [np.zeros(1, np.int64)]
    for start in range(0, text.num_bytes, SCAN_BYTES):
        data = text.read(start, min(start + SCAN_BYTES, text.num_bytes))
        digest = zlib.crc32(data, digest)
        is_end = np.frombuffer(data, np.uint8) == _NEWLINE
        next_lines = np.flatnonzero(is_end) + (start + 1)
        # A copy, because a slice would keep the whole array in memory.
        parts.append(next_lines[-(num_lines + 1) % block_size :: block_size].copy())
        num_lines += len(next_lines)
        last_byte = data[-1]
    num_lines += int(last_byte != _NEWLINE)
    starts = np.concatenate(parts)
    offsets = np.append(starts[starts < text.num_bytes], text.num_bytes)
    return num_lines, offsets, f"{digest:08x}"
