"""Opens arrays by name: dicts, `.npz` files and directories of `.npy` files.

`.npy` files are mapped to memory, so only the rows that are read take memory. An array
of an `.npz` file is read as a whole, which verifies its checksum. The one that was read
last stays in memory.
"""

import contextlib
import functools
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    SourceTable,
    TableSource,
    array_of,
)


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

    @functools.lru_cache(maxsize=1)
    def load(name: str) -> np.ndarray:
        with _damage_found(path), np.load(path) as arrays:
            return arrays[name]

    arrays = {}
    with _damage_found(path), zipfile.ZipFile(path) as file:
        for member in file.namelist():
            if member.endswith(".npy"):
                name = member.removesuffix(".npy")
                shape, dtype = _read_header(path, file, member)
                whole = functools.partial(load, name)
                arrays[name] = RowArray.whole(shape, dtype, whole)
    return arrays


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


def _read_header(
    path: pathlib.Path, file: zipfile.ZipFile, member: str
) -> tuple[tuple[int, ...], np.dtype]:
    with file.open(member) as array:
        version = np.lib.format.read_magic(array)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(array)
    if dtype.hasobject:
        raise CheckpointError(
            f"{path} holds Python objects in {member!r}; save an array of numbers "
            "instead."
        )
    return shape, dtype


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
