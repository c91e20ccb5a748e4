"""Random access to the text inside a gzip file, without unpacking it to disk.

A gzip stream can only be decoded from its beginning, unless the decoder's state was
kept at some places. One pass over the file keeps a copy of the state every few
megabytes. That pass also checks length and checksum.

indexed_gzip and rapidgzip were tried instead. The first reads damaged and truncated
files without an error, and takes twice the time. The second aborts the process at exit,
and reads truncated files without an error.
"""

import bisect
import collections
import dataclasses
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import numpy as np

from tpu_embedding.tools.data.batch import DataError

GZIP_MAGIC: Final = b"\x1f\x8b"  # RFC 1952, section 2.3.1

SPACING: Final = 2**22
"""Bytes of text between two kept states of the decoder, which take 40 kB each.

A gigabyte of text thus costs 10 MB of memory.
"""

NUM_SEGMENTS: Final = 24
"""Decoded pieces of `SPACING` bytes that are kept, about 100 MB."""

_CHUNK_BYTES: Final = 2**18
_MAX_TEXT_BYTES: Final = 2**22  # of a chunk, which may be a thousand times as long
_GZIP_FORMAT: Final = 31  # of zlib: a gzip header, a window of 32 kB, and a checksum


class GzipFile:
    """The text of a gzip file, of one or several members.

    It can be pickled. The state of a decoder cannot, so the copy reads the whole file
    once more.

    Attributes:
      path: path of the file.
      num_bytes: size of the text.
    """

    def __init__(self, path: pathlib.Path):
        """Reads the file once, and keeps the decoder's state at some places.

        Raises:
          DataError: if the file is damaged or truncated.
        """
        self.path = path
        self._places: list[_Place] = []
        self._segments: collections.OrderedDict[int, bytes]
        self._segments = collections.OrderedDict()
        place = _Place()
        with path.open("rb") as file:
            while True:
                if place.text_start >= len(self._places) * SPACING:
                    self._places.append(place.copy())
                if place.read(file) is None:
                    break
        self._starts = [place.text_start for place in self._places]
        self.num_bytes = place.text_start

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the bytes of the text from `start` to `stop - 1`."""
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        text = b"".join(self._segment(i) for i in range(first, last))
        offset = self._starts[first]
        return np.frombuffer(text, np.uint8)[start - offset : stop - offset]

    def _segment(self, index: int) -> bytes:
        """Returns the text from one kept place to the next."""
        text = self._segments.get(index)
        if text is None:
            stop = [*self._starts, self.num_bytes][index + 1]
            text = b"".join(self._decode(self._places[index].copy(), stop))
            self._segments[index] = text
            if len(self._segments) > NUM_SEGMENTS:
                self._segments.popitem(last=False)
        self._segments.move_to_end(index)
        return text

    def _decode(self, place: "_Place", stop: int) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            while (missing := stop - place.text_start) > 0:
                text = place.read(file)
                if text is None:
                    raise DataError(f"{self.path} became shorter while it was read.")
                yield text[:missing]

    def __reduce__(self):
        return type(self), (self.path,)


@dataclasses.dataclass
class _Place:
    """A place in the file, from which the decoder can go on.

    Attributes:
      text_start: offset in the text.
      file_start: offset in the file of the next compressed byte.
      decoder: state of the decoder.
    """

    text_start: int = 0
    file_start: int = 0
    decoder: Any = dataclasses.field(
        default_factory=lambda: zlib.decompressobj(_GZIP_FORMAT)
    )

    def copy(self) -> "_Place":
        return dataclasses.replace(self, decoder=self.decoder.copy())

    def read(self, file: BinaryIO) -> bytes | None:
        """Moves on by one piece of text, and returns it; None at the end.

        Raises:
          DataError: if the file is damaged or ends early.
        """
        file.seek(self.file_start)
        data = file.read(_CHUNK_BYTES)
        if self.decoder.eof and data:  # Padding, or another member.
            padding = len(data) - len(data.lstrip(b"\0"))
            if padding:
                self.file_start += padding
                return b""
            self.decoder = zlib.decompressobj(_GZIP_FORMAT)
        try:
            text = self.decoder.decompress(data, _MAX_TEXT_BYTES)
        except zlib.error as error:
            raise DataError(
                f"{file.name} is damaged: gzip fails with {str(error)!r} after "
                f"{self.text_start:,} bytes of text, before byte "
                f"{self.file_start + len(data):,} of the file; fetch the file again."
            ) from error
        decoder = self.decoder
        unread = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
        self.file_start += len(data) - len(unread)
        self.text_start += len(text)
        if not data and not text:
            if not self.decoder.eof:
                raise DataError(
                    f"{file.name} is truncated: its gzip stream has no end after "
                    f"{self.text_start:,} bytes of text; fetch the file again."
                )
            return None
        return text
