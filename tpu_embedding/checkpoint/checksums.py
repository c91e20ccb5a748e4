"""Checksums of the files of an array, and the names of its chunks.

A chunk ends with the CRC-32C of its values. Readers compare the two, which finds a
flipped bit, but not a chunk of another checkpoint. So `state.json` repeats these
checksums. They are read back from the files, since computing them again from the values
would cost a pass over the checkpoint.
"""

import functools
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
from etils import epath

METADATA_FILE: Final = "zarr.json"
"""File of an array that holds its shape, its type and the shape of its chunks."""

MAX_METADATA_BYTES: Final = 2**16

CRC_BYTES: Final = 4
"""Bytes of the CRC-32C at the end of a chunk."""

_THREADS: Final = 8


class Chunk(NamedTuple):
    """One chunk of an array.

    Attributes:
      number: position among all chunks, in row-major order.
      name: path of its file in the array's directory.
    """

    number: int
    name: str


def chunks_of(
    shape: Sequence[int], chunk_shape: Sequence[int], index: Any = ()
) -> Iterator[Chunk]:
    """Yields the chunks that hold a part of an array.

    Args:
      shape: shape of the array.
      chunk_shape: shape of a chunk.
      index: slices with step 1, or row ids `[n]`; `()` is the whole array.

    Example:
      >>> [chunk.name for chunk in chunks_of((10, 4), (4, 4), slice(3, 9))]
      ['c/0/0', 'c/1/0', 'c/2/0']
    """
    parts = index if isinstance(index, tuple) else (index,)
    parts += (slice(None),) * (len(shape) - len(parts))
    grid = [-(-size // chunk) for size, chunk in zip(shape, chunk_shape, strict=True)]
    needed: list[Sequence[int]] = []
    for part, size, chunk in zip(parts, shape, chunk_shape, strict=True):
        if isinstance(part, slice):
            start, stop, _ = part.indices(size)
            needed.append(
                range(start // chunk, -(-stop // chunk) if stop > start else 0)
            )
        else:
            needed.append(np.unique(part // chunk).tolist())
    for position in _product(needed):
        number = 0
        for i, size in zip(position, grid, strict=True):
            number = number * size + i
        yield Chunk(number, "/".join(["c", *map(str, position)]))


def _product(axes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yields the positions of a grid; `itertools.product` would copy the axes first.

    A forged size makes an axis that does not fit in memory.
    """
    if not axes:
        yield ()
    elif all(axes):
        for i in axes[0]:
            for rest in _product(axes[1:]):
                yield (i, *rest)


def chunk_size_and_crc(root: epath.Path, name: str) -> tuple[int, str]:
    """Returns the bytes of a chunk's file, and the CRC-32C at its end.

    Args:
      root: directory of the checkpoint.
      name: path of the file in it.

    Raises:
      ValueError: if it is not a file of the checkpoint.
    """
    _check_is_file(root, name)
    with (root / name).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - CRC_BYTES))
        return size, file.read(CRC_BYTES).hex()


def read_small_file(root: epath.Path, name: str, max_bytes: int) -> bytes:
    """Returns the contents of a file.

    Args:
      root: directory of the checkpoint.
      name: path of the file in it.
      max_bytes: bound on its size.

    Raises:
      ValueError: if it is not a file of the checkpoint, or too large.
    """
    _check_is_file(root, name)
    with (root / name).open("rb") as file:
        contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise ValueError(f"{name} has more than {max_bytes} bytes")
    return contents


def _check_is_file(root: epath.Path, name: str) -> None:
    """Raises ValueError for a pipe, a device, or a link, which may lead anywhere."""
    if "://" in os.fspath(root):
        return
    path = os.fspath(root)
    for part in name.split("/"):
        path = f"{path}/{part}"
        if os.path.islink(path):
            raise ValueError(f"{name} is a symbolic link, or in one")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{name} is not a file")


def metadata_checksum(metadata: bytes) -> str:
    """Returns the CRC-32 of an array's metadata."""
    return f"{zlib.crc32(metadata):08x}"


def array_checksums(root: epath.Path, names: Sequence[str]) -> dict[str, str]:
    """Returns the checksums of the files of arrays: of the metadata and of all chunks.

    Args:
      root: directory of the state.
      names: names of the arrays.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        checksums = {}
        for name in names:
            file = f"{name}/{METADATA_FILE}"
            metadata = read_small_file(root, file, MAX_METADATA_BYTES)
            values = json.loads(metadata)
            chunk_shape = values["chunk_grid"]["configuration"]["chunk_shape"]
            chunks = chunks_of(values["shape"], chunk_shape)
            files = [f"{name}/{chunk.name}" for chunk in chunks]
            found = threads.map(functools.partial(chunk_size_and_crc, root), files)
            crcs = [crc for _, crc in found]
            checksums[name] = "".join([metadata_checksum(metadata), *crcs])
        return checksums


def checksum_at(checksums: str, position: int) -> str:
    """Returns one checksum: 0 is the metadata's, and `i + 1` is chunk i's."""
    width = 2 * CRC_BYTES
    return checksums[width * position : width * (position + 1)]
