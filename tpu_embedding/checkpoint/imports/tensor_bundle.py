"""Reads TensorFlow's checkpoint files, without TensorFlow.

A checkpoint of prefix `ckpt-1` has an index and data files:

    ckpt-1.index                   a sorted table of keys and entries (LevelDB's format)
    ckpt-1.data-00000-of-00002     the bytes of arrays, where the entries say

An entry tells dtype, shape, file, offset, size and CRC-32C of an array. An array that
was saved in slices has one further entry per slice, under a key made of its name and
the ranges of the slice.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.crc32c import crc32c, unmask
from tpu_embedding.checkpoint.imports.protobuf import Field, fields, varint
from tpu_embedding.checkpoint.imports.source import RowArray

_MAGIC: Final = bytes.fromhex("57fb808b247547db")
_FOOTER_BYTES: Final = 48
_STRING: Final = 7
_FULL_EXTENT: Final = -1

_DTYPES: Final[Mapping[int, Any]] = {
    1: np.float32,
    2: np.float64,
    3: np.int32,
    4: np.uint8,
    6: np.int8,
    9: np.int64,
    10: np.bool_,
    14: jnp.bfloat16,
    19: np.float16,
}
"""Number of a type in TensorFlow to the type; others are left out."""

_Extent = tuple[int, int]
"""Start and length of a slice along one axis; the length -1 is the whole axis."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """Where the bytes of an array or slice are.

    Attributes:
      dtype: number of the type.
      shape: of the whole array.
      shard: number of the data file.
      offset: of the first byte.
      size: in bytes.
      checksum: masked CRC-32C of the bytes.
      slices: extents of each slice; empty if the array was saved as a whole.
    """

    dtype: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    checksum: int = 0
    slices: tuple[tuple[_Extent, ...], ...] = ()


class TensorBundle:
    """The arrays of one checkpoint."""

    def __init__(self, prefix: pathlib.Path):
        """Reads the index.

        Args:
          prefix: path of the index, without `.index`.

        Raises:
          CheckpointError: if the index is damaged.
        """
        self.prefix = prefix
        index = prefix.with_name(prefix.name + ".index")
        try:
            pairs = dict(_table_entries(index.read_bytes()))
            num_shards = _num_shards(pairs.pop(b"", b""))
            self._entries = {key: _entry(value) for key, value in pairs.items()}
        except ValueError as error:
            raise CheckpointError(
                f"{index} cannot be read as an index of TensorFlow: {error}. Copy the "
                "file again, or take another checkpoint."
            ) from None
        self._files = [
            prefix.with_name(f"{prefix.name}.data-{i:05d}-of-{num_shards:05d}")
            for i in range(num_shards)
        ]

    def keys(self) -> list[str]:
        """Returns the names of all arrays and strings."""
        return [key.decode() for key in self._entries if not key.startswith(b"\0")]

    def arrays(self) -> dict[str, RowArray]:
        """Returns all arrays of numbers that have rows, by key.

        Raises:
          CheckpointError: if a data file is missing or truncated.
        """
        return {
            key: self._array(key.encode(), entry)
            for key in self.keys()
            for entry in [self._entries[key.encode()]]
            if entry.dtype in _DTYPES and entry.shape
        }

    def string(self, key: str) -> bytes | None:
        """Returns a scalar string, or None if there is none of that key.

        Raises:
          CheckpointError: if it is damaged.
        """
        entry = self._entries.get(key.encode())
        if entry is None or entry.dtype != _STRING or entry.shape:
            return None
        data = self._bytes(key, entry).tobytes()
        try:
            size, position = varint(data, 0)
        except ValueError as error:
            raise self._contradiction(f"{key!r} is no string, {error}") from None
        begin = position + 4
        checksum = crc32c(size.to_bytes(4, "little"))
        checksum = crc32c(data[position:begin], checksum)
        if crc32c(data[begin:], checksum) != unmask(entry.checksum):
            raise self._damaged(key, entry)
        return data[begin : begin + size]

    def _array(self, key: bytes, entry: _Entry) -> RowArray:
        name, dtype = key.decode(), np.dtype(_DTYPES[entry.dtype])
        if not entry.slices:
            array = self._bytes(name, entry).view(dtype)
            if array.size != math.prod(entry.shape):
                raise self._contradiction(
                    f"{name!r} has {array.size} numbers and shape {list(entry.shape)}"
                )
            array = array.reshape(entry.shape)
            return RowArray(
                entry.shape,
                dtype,
                lambda start, n: array[start : start + n],
                functools.partial(self._check, name, entry),
            )
        slices = [self._slice(key, entry, extents) for extents in entry.slices]
        return RowArray(
            entry.shape,
            dtype,
            functools.partial(_read_slices, slices, entry.shape, dtype),
            functools.partial(_check_slices, slices),
        )

    def _slice(
        self, key: bytes, whole: _Entry, extents: tuple[_Extent, ...]
    ) -> tuple[RowArray, tuple[slice, ...]]:
        """Returns a slice of an array, and where it lies in the array."""
        found = self._entries.get(_slice_key(key, extents))
        place = tuple(
            slice(start, start + length if length != _FULL_EXTENT else size)
            for (start, length), size in zip(extents, whole.shape, strict=True)
        )
        shape = tuple(part.stop - part.start for part in place)
        if found is None or found.shape != shape or found.slices:
            raise self._contradiction(
                f"{key.decode()!r} lacks the slice {list(extents)}"
            )
        return self._array(key, dataclasses.replace(found, dtype=whole.dtype)), place

    def _bytes(self, name: str, entry: _Entry) -> np.ndarray:
        """Returns the bytes of an entry, mapped to memory."""
        if entry.shard >= len(self._files):
            raise self._contradiction(
                f"{name!r} is in file {entry.shard} of {len(self._files)}"
            )
        file = self._files[entry.shard]
        end = entry.offset + entry.size
        if not file.exists():
            raise CheckpointError(f"{file}, which holds {name!r}, is missing.")
        if file.stat().st_size < end:
            raise CheckpointError(
                f"{file} is truncated: {name!r} ends at byte {end}, the file has "
                f"{file.stat().st_size} bytes."
            )
        if not entry.size:
            return np.zeros(0, np.uint8)
        return np.memmap(file, np.uint8, "r", offset=entry.offset, shape=entry.size)

    def _check(self, name: str, entry: _Entry) -> None:
        if crc32c(self._bytes(name, entry)) != unmask(entry.checksum):
            raise self._damaged(name, entry)

    def _contradiction(self, text: str) -> CheckpointError:
        return CheckpointError(
            f"{self.prefix}.index contradicts itself: {text}. Take another checkpoint."
        )

    def _damaged(self, name: str, entry: _Entry) -> CheckpointError:
        return CheckpointError(
            f"{self._files[entry.shard]} is damaged: the checksum of {name!r} differs. "
            "Copy the file again, or take another checkpoint."
        )


_Slices = list[tuple[RowArray, tuple[slice, ...]]]
"""Slices of an array, and where they lie in it."""


def _check_slices(slices: _Slices) -> None:
    for part, _ in slices:
        part.check()


def _read_slices(
    slices: _Slices,
    shape: tuple[int, ...],
    dtype: np.dtype,
    start: int,
    num_rows: int,
) -> np.ndarray:
    """Returns a range of rows of an array that was saved in slices."""
    rows = np.zeros((num_rows, *shape[1:]), dtype)
    for part, (own, *columns) in slices:
        begin, end = max(start, own.start), min(start + num_rows, own.stop)
        if begin < end:
            values = part.read(begin - own.start, end - begin)
            rows[(slice(begin - start, end - start), *columns)] = values
    return rows


def _num_shards(header: bytes) -> int:
    """Returns the number of data files."""
    values = dict(fields(header))
    if values.get(2, 0):
        raise ValueError("it was written on a big-endian machine")
    return _integer(values.get(1, 1))


def _entry(message: bytes) -> _Entry:
    names = {1: "dtype", 3: "shard", 4: "offset", 5: "size", 6: "checksum"}
    values: dict[str, Any] = {}
    slices = []
    for number, value in fields(message):
        if number in names:
            values[names[number]] = _integer(value)
        elif number == 2:
            values["shape"] = tuple(
                _integer(dict(fields(_message(axis))).get(1, 0))
                for field, axis in fields(_message(value))
                if field == 2
            )
        elif number == 7:
            slices.append(
                tuple(
                    _extent(_message(extent))
                    for field, extent in fields(_message(value))
                    if field == 1
                )
            )
    return _Entry(**values, slices=tuple(slices))


def _extent(message: bytes) -> _Extent:
    values = dict(fields(message))
    return _integer(values.get(1, 0)), _integer(values.get(2, _FULL_EXTENT))


def _integer(value: Field) -> int:
    if not isinstance(value, int):
        raise ValueError("a field is no integer")
    return value


def _message(value: Field) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field is no message")
    return value


def _slice_key(name: bytes, extents: tuple[_Extent, ...]) -> bytes:
    """Returns the key of a slice: its parts in an encoding that keeps their order."""
    escapes = {0: b"\0\xff", 0xFF: b"\xff\0"}
    escaped = b"".join(escapes.get(byte, bytes([byte])) for byte in name)
    key = b"\0" + escaped + b"\0\1" + bytes([1, len(extents)])
    for number in (number for extent in extents for number in extent):
        if number < 0:  # Only the length of a whole axis.
            key += b"\x7f"
            continue
        # As many leading ones as bytes, then the number.
        size = number.bit_length() // 7 + 1
        key += (number | ((1 << size) - 1) << 7 * size).to_bytes(size, "big")
    return key


def _table_entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a sorted table.

    Raises:
      ValueError: if it is damaged.
    """
    footer = data[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or footer[-8:] != _MAGIC:
        raise ValueError("it does not end as an index does")
    position = 0
    for _ in range(2):  # An index of metadata, which is not used.
        _, position = varint(footer, position)
    for _, handle in _block_entries(_block(data, footer[position:])):
        yield from _block_entries(_block(data, handle))


def _block(data: bytes, handle: bytes) -> bytes:
    """Returns a block, given its offset and size."""
    offset, position = varint(handle, 0)
    size, _ = varint(handle, position)
    end = offset + size
    if end + 5 > len(data):
        raise ValueError(f"a block ends at byte {end + 5} of {len(data)}")
    checksum = int.from_bytes(data[end + 1 : end + 5], "little")
    if crc32c(data[offset : end + 1]) != unmask(checksum):
        raise ValueError(f"the checksum of the block at byte {offset} differs")
    if data[end]:
        raise ValueError("it is compressed, which TensorFlow does not do")
    return data[offset:end]


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields keys and values of a block; a key lacks what it shares with the last."""
    num_restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (num_restarts + 1)
    key, position = b"", 0
    while position < end:
        shared, position = varint(block, position)
        unshared, position = varint(block, position)
        size, position = varint(block, position)
        key = key[:shared] + block[position : position + unshared]
        position += unshared
        yield key, block[position : position + size]
        position += size
