"""Opens arrays by name: dicts, `.npz` files and directories of `.npy` files.

Files are mapped to memory, so only the rows that are read take memory. Members of a
compressed `.npz` file are the exception: each is decompressed as a whole.
"""

import contextlib
import functools
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    SourceTable,
    TableSource,
    array_of,
)

_CHECK_BYTES: Final = 2**22
"""Bytes that are compared with a checksum at a time."""


def tables_by_name(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    """Returns a source of arrays whose names are those of tables.

    An array `"movie/accumulators"` beside a table `"movie"` is its slot variable
    `accumulators`, under the name of this package, if it has as many rows.

    Args:
      arrays: by name.
      origin: format and path, for messages.

    Example:
      >>> arrays = {"movie": np.ones((5, 2)), "movie/accumulators": np.ones((5, 2))}
      >>> arrays = {name: array_of(array) for name, array in arrays.items()}
      >>> print(tables_by_name(arrays, "arrays"))
      arrays
        movie: float64[5, 2], accumulators float64[5, 2]
    """
    owners = {name: owner for name in arrays if (owner := _owner(name, arrays))}
    return TableSource(
        origin=origin,
        tables={
            name: SourceTable(
                values=array,
                slots={
                    slot[len(name) + 1 :]: arrays[slot]
                    for slot, owner in owners.items()
                    if owner == name
                },
            )
            for name, array in arrays.items()
            if name not in owners
        },
    )


def _owner(name: str, arrays: Mapping[str, RowArray]) -> str | None:
    """Returns the table that an array is a slot variable of."""
    parts = name.split("/")
    for length in range(len(parts) - 1, 0, -1):
        table = "/".join(parts[:length])
        if table in arrays and arrays[table].shape[:1] == arrays[name].shape[:1]:
            return table
    return None


def arrays_of_dict(values: Mapping[str, Any]) -> dict[str, RowArray]:
    """Returns the arrays of a dict: of tables, or of dicts of `values` and `slots`."""
    arrays = {}
    for name, value in values.items():
        if not isinstance(value, Mapping):
            arrays[name] = array_of(value)
            continue
        if "values" not in value:
            raise CheckpointError(
                f"The entry {name!r} must be an array, or a dict with the key 'values' "
                f"and perhaps 'slots', got a dict with the keys {sorted(value)}."
            )
        arrays[name] = array_of(value["values"])
        for slot, array in value.get("slots", {}).items():
            arrays[f"{name}/{slot}"] = array_of(array)
    return arrays


def arrays_of_npz(path: pathlib.Path) -> dict[str, RowArray]:
    """Returns the arrays of an `.npz` file.

    Raises:
      CheckpointError: if the file is damaged, or holds Python objects.
    """
    with _damage_found(path), zipfile.ZipFile(path) as file:
        members = [info for info in file.infolist() if info.filename[-4:] == ".npy"]
        return {
            info.filename.removesuffix(".npy"): _member(path, file, info)
            for info in members
        }


@contextlib.contextmanager
def _damage_found(path: pathlib.Path) -> Iterator[None]:
    """Raises `CheckpointError` for a file that cannot be read.

    Headers of NumPy's files are Python text, and zip files have many options. Damage
    makes their readers fail with errors of many types.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        text = str(error).partition("\n")[0]
        found = "cannot be read as a file of NumPy"
        if isinstance(error, zipfile.BadZipFile) and "CRC-32" in text:
            found = "is damaged"
        raise CheckpointError(
            f"{path} {found}: {type(error).__name__}: {text}; copy or write it again."
        ) from None


def _member(
    path: pathlib.Path, file: zipfile.ZipFile, info: zipfile.ZipInfo
) -> RowArray:
    with file.open(info) as member:
        version = np.lib.format.read_magic(member)
        read_header = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran, dtype = read_header(member)
        header_bytes = member.tell()
    if dtype.hasobject:
        raise CheckpointError(
            f"{path} holds Python objects in {info.filename!r}; save an array of "
            "numbers instead."
        )

    @functools.cache
    def load() -> np.ndarray:
        if info.compress_type != zipfile.ZIP_STORED:
            with np.load(path) as arrays:
                return arrays[info.filename.removesuffix(".npy")]
        offset = _data_offset(path, info) + header_bytes
        order = "F" if is_fortran else "C"
        return np.memmap(path, dtype, "r", offset=offset, shape=shape, order=order)

    def check() -> None:
        with (
            _damage_found(path),
            zipfile.ZipFile(path) as file,
            file.open(info) as member,
        ):
            while member.read(_CHECK_BYTES):
                pass

    return RowArray(shape, dtype, lambda start, n: load()[start : start + n], check)


def _data_offset(path: pathlib.Path, info: zipfile.ZipInfo) -> int:
    """Returns where the bytes of a member begin, behind its local header."""
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        lengths = np.frombuffer(file.read(4), "<u2")
    return info.header_offset + 30 + int(lengths.sum())


def arrays_of_npy_directory(path: pathlib.Path) -> dict[str, RowArray]:
    """Returns the arrays of the `.npy` files in a directory, by their relative paths.

    Raises:
      CheckpointError: if a file is damaged, or holds Python objects.
    """
    arrays = {}
    for file in sorted(path.rglob("*.npy")):
        name = file.relative_to(path).with_suffix("").as_posix()
        with _damage_found(file):
            arrays[name] = array_of(np.load(file, mmap_mode="r", allow_pickle=False))
    return arrays
