"""Opens arrays by name: dicts, what `np.load` returns, and files of `.safetensors`.

The files are mapped to memory, so only the rows that are read take memory.
"""

import pathlib
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.safetensors import map_tensors
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    SourceTable,
    TableSource,
    array_of,
)

_MAX_EXPANSION: Final = 10
_SMALL_BYTES: Final = 200 * 2**20
"""An archive may need this much memory, whatever its size."""


def tables_by_name(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    """Returns a source of arrays whose names are those of tables.

    An array `"movie/accumulators"` beside a table `"movie"` is its slot variable
    `accumulators`, if it has as many rows.

    Args:
      arrays: by name.
      origin: format and path, for messages.

    Example:
      >>> import numpy as np
      >>> arrays = {"movie": np.ones((5, 2)), "movie/accumulators": np.ones((5, 2))}
      >>> arrays = {name: array_of(array) for name, array in arrays.items()}
      >>> print(tables_by_name(arrays, "arrays"))
      arrays
        movie: float64[5, 2], accumulators float64[5, 2]
    """
    slots: dict[str, dict[str, RowArray]] = {name: {} for name in arrays}
    for name in sorted(arrays):
        table, _, slot = name.rpartition("/")
        if table in slots and arrays[table].shape[:1] == arrays[name].shape[:1]:
            slots.pop(name)
            slots[table][slot] = arrays[name]
    return TableSource(
        origin=origin,
        tables={
            name: SourceTable(values=arrays[name], slots=found)
            for name, found in slots.items()
        },
    )


def arrays_of_mapping(source: Mapping[str, Any]) -> dict[str, RowArray]:
    """Returns the arrays of a dict, or of an `.npz` archive that `np.load` opened.

    Raises:
      CheckpointError: if an archive is damaged, or would need far more memory than it
        has bytes, as a small file of compressed zeros does.
    """
    if not isinstance(source, np.lib.npyio.NpzFile):
        return {name: array_of(values) for name, values in source.items()}
    archive: Any = source.zip
    path, members = archive.filename or "the .npz archive", archive.infolist()
    num_bytes = sum(member.file_size for member in members)
    packed_bytes = sum(member.compress_size for member in members)
    if num_bytes > _MAX_EXPANSION * packed_bytes + _SMALL_BYTES:
        raise CheckpointError(
            f"The arrays of {path} must need at most {_MAX_EXPANSION} times the bytes "
            f"of the file, got {num_bytes} for {packed_bytes}; write them with "
            "np.savez, which doesn't compress."
        )
    try:
        return {name: array_of(values) for name, values in source.items()}
    except (
        EOFError,
        MemoryError,
        OSError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise CheckpointError(
            f"{path} cannot be read: {str(error)[:300]}; write or copy it again."
        ) from None


def arrays_of_path(path: pathlib.Path) -> dict[str, RowArray]:
    """Returns the tensors of a safetensors file, or of all such files in a directory.

    Raises:
      CheckpointError: if there is none, or it is damaged.
    """
    if not path.exists():
        raise CheckpointError(f"There is no file or directory {path}.")
    inside = path.rglob("*") if path.is_dir() else [path]
    files = sorted(file for file in inside if file.suffix == ".safetensors")
    arrays: dict[str, RowArray] = {}
    for file in files:
        found = map_tensors(file)
        if both := sorted(found.keys() & arrays.keys()):
            raise CheckpointError(
                f"{path} has several arrays of the names {both}; open one of its files "
                "instead."
            )
        arrays |= {key: array_of(array) for key, array in found.items()}
    if not arrays:
        raise CheckpointError(
            f"The format of {path} is unknown. It must be a .safetensors file, a "
            "directory of them, or a checkpoint of TensorFlow or orbax. Open files of "
            "NumPy by np.load, and pass their arrays. Convert files of torch.save by "
            "safetensors.torch.save_file, and those of Keras by np.savez."
        )
    return arrays
