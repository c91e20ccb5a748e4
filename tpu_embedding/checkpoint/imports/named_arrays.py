"""Opens arrays by name: dicts, `.npz`, and directories of `.npy` and `.safetensors`.

`.npy` and `.safetensors` files are mapped to memory, so only the rows that are read
take memory. The arrays of an `.npz` file are read as a whole.
"""

import pathlib
from collections.abc import Mapping

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.safetensors import map_tensors
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    SourceTable,
    TableSource,
    array_of,
)


def tables_by_name(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    """Returns a source of arrays whose names are those of tables.

    An array `"movie/accumulators"` beside a table `"movie"` is its slot variable
    `accumulators`, if it has as many rows.

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


def arrays_of_path(path: pathlib.Path) -> dict[str, RowArray]:
    """Returns the arrays of a file, or of all files in a directory by their paths.

    Raises:
      CheckpointError: if there is none, it is damaged, or it holds Python objects.
    """
    if not path.exists():
        raise CheckpointError(f"There is no file or directory {path}.")
    base, files = path.parent, [path]
    if path.is_dir():
        base, files = path, sorted(x for x in path.rglob("*") if x.is_file())
    arrays: dict[str, RowArray] = {}
    for file in files:
        name = file.relative_to(base).with_suffix("").as_posix()
        found = _arrays_of_file(file, name)
        if both := sorted(found.keys() & arrays.keys()):
            raise CheckpointError(
                f"{path} has several arrays of the names {both}; open one of its files "
                "instead."
            )
        arrays |= {key: array_of(array) for key, array in found.items()}
    if not arrays:
        raise CheckpointError(
            f"The format of {path} is unknown. It must be an .npz or .safetensors "
            "file, a directory of .npy or .safetensors files, or a checkpoint of "
            "TensorFlow or orbax. Convert files of torch.save by "
            "safetensors.torch.save_file, and those of Keras by np.savez."
        )
    return arrays


def _arrays_of_file(file: pathlib.Path, name: str) -> dict[str, np.ndarray]:
    if file.suffix == ".safetensors":
        return map_tensors(file)
    try:
        if file.suffix == ".npy":
            return {name: np.load(file, mmap_mode="r", allow_pickle=False)}
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
    except Exception as error:  # NumPy and zipfile have errors of many types.
        raise CheckpointError(
            f"{file} cannot be read as a file of NumPy: {error}; copy or write it "
            "again."
        ) from None
    return {}
