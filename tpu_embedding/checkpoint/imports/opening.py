"""Opens a source of tables, and finds its format."""

import pathlib
from collections.abc import Mapping
from typing import Any, Final

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports import (
    dynamicemb,
    keras,
    own,
    stacked_orbax,
    tensorflow,
    torchrec,
)
from tpu_embedding.checkpoint.imports.arrays import (
    arrays_of_dict,
    arrays_of_npy_directory,
    arrays_of_npz,
    tables_by_name,
)
from tpu_embedding.checkpoint.imports.orbax import arrays_of_item, find_items
from tpu_embedding.checkpoint.imports.safetensors import arrays_of_safetensors
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    TableSource,
)
from tpu_embedding.paths import local_path

_TORCH: Final = (
    "looks like a file of torch.save, which is read by PyTorch only. Convert it "
    "there:\n"
    "  state = torch.load({name!r}, map_location='cpu')\n"
    "  safetensors.torch.save_file({{k: v.contiguous() for k, v in state.items()}}, "
    "'state.safetensors')"
)
_HDF5: Final = (
    "looks like weights of Keras in HDF5, whose variables have numbers in place of "
    "names. Save the tables by name where Keras is installed:\n"
    "  np.savez('tables.npz', movie=model.get_layer('movie').get_weights()[0])"
)
_OTHER_SUFFIXES: Final = {
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".bin": _TORCH,
    ".h5": _HDF5,
    ".hdf5": _HDF5,
    ".keras": _HDF5,
}
"""Files that need another program, with the way out."""


def open_tables(source: str | pathlib.Path | Mapping[str, Any]) -> TableSource:
    """Opens the tables of a foreign file or checkpoint; reads names and shapes only.

    Args:
      source: a dict of arrays by table name, a file or a directory:

        * `.npz`, `.safetensors`, or a directory of `.npy` or `.safetensors` files:
          arrays by table name, `"table/slot"` for slot variables, or a state dict of
          TorchRec, with the ids of its managed collision modules;
        * a directory that dynamicemb dumped: files of keys, values and scores;
        * a TensorFlow checkpoint: its prefix, a directory of checkpoints, or that of a
          SavedModel. TensorFlow reads it, from the extra `tf`;
        * an orbax checkpoint: directory of a CheckpointManager, whose latest step is
          read, of a step, or of an item. Those of jax-tpu-embedding are unstacked if
          they have an `embedding_spec`; see `open_stacked_tables` for others;
        * a checkpoint of `te.save`, or the latest one of a run, to give ids to the rows
          of a table. `te.restore` reads it otherwise.

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
        return _named_tables(arrays_of_dict(source), "arrays")
    if "://" in str(source):
        raise CheckpointError(
            f"Tables are read from local files, got {source}; copy it to this machine."
        )
    try:
        return _open(local_path(source))
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}.") from error


def _open(path: pathlib.Path) -> TableSource:
    if prefix := tensorflow.find_prefix(path):
        return tensorflow.tables_of_checkpoint(prefix)
    if checkpoint := own.find_checkpoint(path):
        return own.tables_of_checkpoint(checkpoint)
    if path.is_dir() and (items := find_items(path)):
        return _tables_of_orbax(path, items)
    if path.is_dir() and (dumps := dynamicemb.find_dumps(path)):
        return dynamicemb.tables_of_dumps(path, dumps)
    return _named_tables(_arrays_of_path(path), str(path))


def _named_tables(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    if torchrec.is_state_dict(arrays):
        return torchrec.tables_of_state_dict(arrays, f"TorchRec state dict {origin}")
    return tables_by_name(arrays, origin)


def _tables_of_orbax(
    path: pathlib.Path, items: Mapping[str, pathlib.Path]
) -> TableSource:
    if file := stacked_orbax.spec_file(path):
        return stacked_orbax.tables_of_specs(path, file)
    arrays = {
        leaf if len(items) == 1 else (name, *leaf): array
        for name, item in items.items()
        for leaf, array in arrays_of_item(item).items()
    }
    if stacked_orbax.has_keras_stacks(arrays):
        raise CheckpointError(
            f"{path} has stacks of keras-rs, and does not say how tables lie in them. "
            "Open it with te.checkpoint.open_stacked_tables, which takes the tables "
            "and the number of SparseCores."
        )
    return keras.tables_of_state(arrays, f"orbax checkpoint {path}")


def _arrays_of_path(path: pathlib.Path) -> dict[str, RowArray]:
    if not path.exists():
        raise CheckpointError(f"There is no file or directory {path}.")
    if path.is_dir():
        arrays = arrays_of_npy_directory(path)
        for file in sorted(path.rglob("*.safetensors")):
            new = arrays_of_safetensors(file)
            both = sorted(new.keys() & arrays.keys())
            if both:
                raise CheckpointError(
                    f"{path} has several arrays of the names {both}; open one of its "
                    "files instead."
                )
            arrays |= new
        if arrays:
            return arrays
    elif path.suffix == ".npz":
        return arrays_of_npz(path)
    elif path.suffix == ".safetensors":
        return arrays_of_safetensors(path)
    elif path.suffix in _OTHER_SUFFIXES:
        way_out = _OTHER_SUFFIXES[path.suffix].format(name=path.name)
        raise CheckpointError(f"{path} {way_out}")
    raise CheckpointError(
        f"The format of {path} is unknown. It must be an .npz or .safetensors file, a "
        "directory of .npy or .safetensors files, or a checkpoint of TensorFlow or "
        "orbax."
    )
