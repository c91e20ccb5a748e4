"""Reads arrays of orbax checkpoints by their paths, without knowing their pytree.

The file `_METADATA` of a checkpoint item lists its leaves. Their arrays are in zarr,
either in directories of their own or in one database (OCDBT), which tensorstore reads.

Arrays are cut into chunks that may be as large as a device's share, and are compressed.
A range of rows could therefore cost reading everything. So each array is copied once,
chunk by chunk, to a temporary file that is mapped to memory. This also finds what
cannot be read before the model changes.
"""

import functools
import json
import pathlib
import tempfile
from typing import Any, Final

import numpy as np
import tensorstore as ts

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import RowArray

LeafPath = tuple[str, ...]
"""Keys of the dicts and fields around a leaf."""

_METADATA: Final = "_METADATA"

_MAX_BYTES_IN_MEMORY: Final = 2**24
"""Larger arrays are copied to a file."""


def find_items(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the checkpoint items that a path means, by name.

    Args:
      path: directory of an item, of a step with its items, or of a CheckpointManager,
        whose latest step is meant.
    """
    if (path / _METADATA).is_file():
        return {path.name: path}
    steps = [d for d in path.glob("*") if d.name.isdigit() and d.is_dir()]
    if steps:
        path = max(steps, key=lambda step: int(step.name))
    return {
        item.name: item
        for item in sorted(path.glob("*"))
        if (item / _METADATA).is_file()
    }


def arrays_of_item(item: pathlib.Path) -> dict[LeafPath, RowArray]:
    """Returns the arrays of an item that have rows, by path.

    Raises:
      CheckpointError: if the item is damaged or incomplete.
    """
    file = item / _METADATA
    try:
        metadata = json.loads(file.read_text())
        leaves = {
            tuple(str(key["key"]) for key in leaf["key_metadata"]): leaf[
                "value_metadata"
            ]
            for leaf in metadata["tree_metadata"].values()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}.") from None
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    arrays = {}
    for path, leaf in leaves.items():
        if leaf.get("value_type") in ("jax.Array", "np.ndarray"):
            array = _open(item, path, driver)
            if array.shape:
                arrays[path] = array
    return arrays


def _open(item: pathlib.Path, path: LeafPath, driver: str) -> RowArray:
    """Opens one array; reads its shape and dtype only."""
    name = ".".join(path)
    directory = item.resolve().as_posix()
    # As a URL, tensorstore would decode a percent sign.
    files: dict[str, Any] = {"driver": "file", "path": f"{directory}/"}
    if (item / "manifest.ocdbt").is_file():
        kvstore = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
    else:
        kvstore = files | {"path": f"{directory}/{name}/"}
    try:
        store = ts.open({"driver": driver, "kvstore": kvstore}, open=True).result()
    except (ValueError, OSError) as error:
        raise _unreadable(item, name, error) from None

    @functools.cache
    def load() -> np.ndarray:
        try:
            return _copy(store)
        except (ValueError, OSError) as error:
            raise _unreadable(item, name, error) from None

    dtype = np.dtype(store.dtype.numpy_dtype)
    return RowArray.whole(tuple(store.shape), dtype, load)


def _copy(store: ts.TensorStore) -> np.ndarray:
    """Reads an array chunk by chunk to memory, or to a temporary file."""
    dtype = np.dtype(store.dtype.numpy_dtype)
    shape = tuple(store.shape)
    if dtype.itemsize * int(np.prod(shape)) <= _MAX_BYTES_IN_MEMORY:
        return np.asarray(store.read().result())
    with tempfile.TemporaryFile() as file:
        array = np.memmap(file, dtype, "w+", shape=shape)
    chunk_shape = store.chunk_layout.read_chunk.shape or shape
    num_rows = max(1, chunk_shape[0] or 1)
    for start in range(0, shape[0], num_rows):
        end = min(start + num_rows, shape[0])
        # Without a copy between the decoded chunk and the file.
        target = ts.array(array[start:end]).translate_to[start]
        target.write(store[start:end]).result()
    return array


def _unreadable(item: pathlib.Path, name: str, error: Exception) -> CheckpointError:
    text = str(error).partition(" [")[0].partition("\n")[0]
    return CheckpointError(
        f"The array {name!r} of {item} cannot be read: {text} Copy the checkpoint "
        "again, or take another one."
    )
