"""Opens a source of tables, and finds its format."""

import pathlib
from collections.abc import Mapping
from typing import Any

from tpu_embedding.checkpoint.imports import tensorflow
from tpu_embedding.checkpoint.imports.named_arrays import (
    arrays_of_mapping,
    arrays_of_path,
    is_state_dict,
    tables_by_name,
    tables_of_dump,
    tables_of_state_dict,
)
from tpu_embedding.checkpoint.imports.orbax import arrays_of_checkpoint
from tpu_embedding.checkpoint.imports.source import RowArray, TableSource
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.paths import local_path


def open_tables(source: str | pathlib.Path | Mapping[str, Any]) -> TableSource:
    """Opens the tables of a foreign file or checkpoint.

    Args:
      source: a dict of arrays, such as `np.load` returns of an `.npz` file; or a file
        or directory:

        * `.safetensors`, or a directory of such files: arrays by table name,
          `"table/slot"` for slot variables, or a state dict of TorchRec;
        * a directory that dynamicemb dumped: files of keys and values;
        * a TensorFlow checkpoint: its prefix, a directory of checkpoints, or that of a
          SavedModel. TensorFlow reads it, from the extra `tf`;
        * an orbax checkpoint: directory of a CheckpointManager, whose latest step is
          read, of a step, or of an item. Tables have the paths of their arrays.

        See `open_stacked_tables` for tables that were saved in stacks.

    Returns:
      The tables; `print` shows them, `import_tables` writes them to a model.

    Raises:
      CheckpointError: if nothing is there, or it is damaged.

    Example:
      >>> import numpy as np
      >>> print(open_tables({"movie": np.zeros((10, 4), np.float32)}))
      arrays
        movie: float32[10, 4]
    """
    if isinstance(source, Mapping):
        return _named_tables(arrays_of_mapping(source), "arrays")
    try:
        return _open(local_path(source))
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}.") from error


def _open(path: pathlib.Path) -> TableSource:
    if prefix := tensorflow.find_prefix(path):
        return tensorflow.tables_of_checkpoint(prefix)
    if path.is_dir() and (arrays := arrays_of_checkpoint(path)):
        named = {"/".join(leaf): array for leaf, array in arrays.items()}
        return tables_by_name(named, f"orbax checkpoint {path}")
    if path.is_dir() and (dump := tables_of_dump(path)):
        return dump
    return _named_tables(arrays_of_path(path), str(path))


def _named_tables(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    if is_state_dict(arrays):
        return tables_of_state_dict(arrays, f"TorchRec state dict {origin}")
    return tables_by_name(arrays, origin)
