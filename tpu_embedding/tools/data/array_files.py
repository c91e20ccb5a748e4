"""Arrays in files of NumPy, mapped into memory: `.npy`, and `.npz` without compression.

Nothing is read but the headers, until rows are asked for. NumPy itself maps only
`.npy` files. A member of a `.npz` file, which is a zip archive, is mapped here at its
place in the archive.
"""

import contextlib
import dataclasses
import math
import pathlib
import struct
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final, Literal

import numpy as np

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.block_order import take_runs
from tpu_embedding.tools.data.mapped_file import MappedFile

_HEADER_READERS: Final = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

# PKWARE's APPNOTE.TXT, section 4.3.7: a local file header has 30 bytes, the last two
# numbers of which are the lengths of the name and the extra field after it.
_LOCAL_HEADER: Final = struct.Struct("<26xHH")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedArray:
    """An array in a file. It can be pickled: the copy maps the file anew.

    Attributes:
      name: path of the file, and the name within an archive, for errors.
      file: the mapped file.
      offset: place of the first byte in the file.
      dtype: dtype of the array.
      shape: shape of the array.
      order: `"C"`, or `"F"` if columns are consecutive in the file.
    """

    name: str
    file: MappedFile
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]

    def take(self, runs: Sequence[slice]) -> np.ndarray:
        """Returns a copy of runs of rows, in native byte order."""
        view = self.file.view(self.offset, self.dtype, self.shape, self.order)
        taken = take_runs(view, runs)
        self.file.note_read(taken.nbytes)
        return taken


def open_npy(path: pathlib.Path) -> MappedArray:
    """Maps a `.npy` file.

    Raises:
      DataError: if it is missing, truncated, or no array of numbers.
    """
    with _damage_of(path), path.open("rb") as file:
        mapped = MappedFile(path)
        return _map(str(path), file, mapped, mapped.num_bytes)


def open_npz(path: pathlib.Path) -> dict[str, MappedArray]:
    """Maps the members of a `.npz` file that `numpy.savez` wrote.

    Checksums of the archive are not compared, because that would read all of it.

    Raises:
      DataError: if the file is missing, truncated or damaged, or has compressed
        members.
    """
    arrays = {}
    with _damage_of(path), zipfile.ZipFile(path) as archive, path.open("rb") as file:
        mapped = MappedFile(path)
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            owner = f"{path}, array {name!r}"
            if member.compress_type != zipfile.ZIP_STORED:
                raise DataError(
                    f"{owner}, is compressed, so its rows cannot be read one by one; "
                    "write the file anew with numpy.savez in place of "
                    "savez_compressed."
                )
            file.seek(member.header_offset)
            lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            start = member.header_offset + _LOCAL_HEADER.size + sum(lengths)
            file.seek(start)
            arrays[name] = _map(owner, file, mapped, start + member.file_size)
    return arrays


def _map(name: str, file: BinaryIO, mapped: MappedFile, end: int) -> MappedArray:
    """Maps an array of numbers.

    Args:
      name: see `MappedArray`.
      file: at the header of the array.
      mapped: the same file.
      end: place behind the last byte of the array.
    """
    version = np.lib.format.read_magic(file)
    if version not in _HEADER_READERS:
        raise ValueError(f"version {version} of the format is not supported")
    shape, is_fortran, dtype = _HEADER_READERS[version](file)
    if dtype.kind not in "iuf":
        raise DataError(f"{name} must hold numbers, got dtype {dtype}.")
    needed = file.tell() + math.prod(shape) * dtype.itemsize
    if needed > end:
        raise DataError(
            f"{name} is truncated: {dtype} of shape {list(shape)} ends at byte "
            f"{needed:,}, the data end at byte {end:,}; fetch or write the file again."
        )
    return MappedArray(
        name=name,
        file=mapped,
        offset=file.tell(),
        dtype=dtype,
        shape=shape,
        order="F" if is_fortran else "C",
    )


@contextlib.contextmanager
def _damage_of(path: pathlib.Path) -> Iterator[None]:
    """Raises errors of a file that cannot be read as a `DataError`."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing.") from error
    except (OSError, EOFError, ValueError, struct.error, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} is damaged or no file of NumPy: {error}; fetch or write it again."
        ) from error
