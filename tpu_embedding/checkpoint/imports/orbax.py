"""Reads arrays in Orbax checkpoints by path, without the pytree that was saved.

An item's `_METADATA` file lists its leaves. Tensorstore reads each leaf's zarr array by
row range, from the array's own directory or from a shared database (OCDBT).
"""

import json
import math
import pathlib
from typing import Any, Final

import numpy as np
import tensorstore as ts

from tpu_embedding.checkpoint.imports.source import RowArray, max_bytes_of_files
from tpu_embedding.checkpoint.records import CheckpointError

LeafPath = tuple[str, ...]
"""Dict keys and field names that lead to a leaf."""

_METADATA: Final = "_METADATA"
_ROWS_PER_CHECK: Final = 2**16

_CONTEXT: Final = {"cache_pool": {"total_bytes_limit": 2**29}}
"""Caches decoded chunks, because several row ranges may need parts of one chunk."""


def arrays_of_checkpoint(path: pathlib.Path) -> dict[LeafPath, RowArray]:
    """Opens all arrays except scalars, by leaf path.

    `path` is an item, a step, or the directory of a CheckpointManager, whose latest
    step is read. If a step has several items, each path starts with the item's name.
    """
    if (path / _METADATA).is_file():
        return _arrays_of_item(path)
    steps = [d for d in path.glob("*") if d.name.isdigit() and d.is_dir()]
    path = max(steps, key=lambda step: int(step.name), default=path)
    items = [file.parent for file in sorted(path.glob(f"*/{_METADATA}"))]
    return {
        leaf if len(items) == 1 else (item.name, *leaf): array
        for item in items
        for leaf, array in _arrays_of_item(item).items()
    }


def _arrays_of_item(item: pathlib.Path) -> dict[LeafPath, RowArray]:
    file = item / _METADATA
    try:
        metadata = json.loads(file.read_text())
        leaves = {
            tuple(str(key["key"]) for key in leaf["key_metadata"]): leaf[
                "value_metadata"
            ]["value_type"]
            for leaf in metadata["tree_metadata"].values()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}.") from None
    # Older checkpoints don't have this entry, and hold zarr 2 arrays.
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    num_bytes = sum(x.stat().st_size for x in item.rglob("*") if x.is_file())
    arrays = {
        path: _open(item, path, driver, max_bytes_of_files(num_bytes))
        for path, kind in leaves.items()
        if kind in ("jax.Array", "np.ndarray")
    }
    return {path: array for path, array in arrays.items() if array.shape}


def _open(
    item: pathlib.Path, path: LeafPath, driver: str, max_chunk_bytes: int
) -> RowArray:
    name = ".".join(path)
    directory = item.resolve().as_posix()
    # A URL wouldn't work, because tensorstore would decode percent signs in it.
    files: dict[str, Any] = {"driver": "file", "path": f"{directory}/"}
    if (item / "manifest.ocdbt").is_file():
        kvstore = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
    else:
        kvstore = files | {"path": f"{directory}/{name}/"}
    spec = {"driver": driver, "kvstore": kvstore, "context": _CONTEXT}

    def result_of(future: ts.Future) -> Any:
        try:
            return future.result()
        except (ValueError, OSError) as error:
            text = str(error).partition(" [")[0].partition("\n")[0]
            raise CheckpointError(
                f"The array {name!r} of {item} cannot be read: {text} Copy the "
                "checkpoint again or use an earlier one."
            ) from None

    store = result_of(ts.open(spec, open=True))
    shape = tuple(store.shape)
    # Tensorstore allocates a whole chunk to read one row, and the metadata may declare
    # any chunk size.
    chunk_shape = store.chunk_layout.read_chunk.shape or shape
    if math.prod(chunk_shape) * store.dtype.numpy_dtype.itemsize > max_chunk_bytes:
        raise CheckpointError(
            f"The array {name!r} of {item} declares chunks of shape {chunk_shape}, but "
            "its files are too small for that. Copy the checkpoint again."
        )

    def read(start: int, num_rows: int) -> np.ndarray:
        return np.asarray(result_of(store[start : start + num_rows].read()))

    def check() -> None:
        # Read in parts, so that a table larger than memory can be checked.
        for start in range(0, shape[0], _ROWS_PER_CHECK):
            read(start, min(_ROWS_PER_CHECK, shape[0] - start))

    return RowArray(shape, np.dtype(store.dtype.numpy_dtype), read, check)
