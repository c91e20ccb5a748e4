"""Finds tables in TensorFlow checkpoints, written by TPUEmbedding or the TFRS layer.

Keys are object paths, such as `model/emb/_tpu_embedding/movie`. Each table, or each
stack on newer TPUs, is a variable. TPUEmbedding saves slots as siblings of the variable
(`movie/accumulators`). Keras optimizers, which TFRS uses, save slots below the
variable. The tests use files from TensorFlow 2.21.
"""

import collections
import functools
import importlib
import importlib.util
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable, TableSource
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.tables.slot_values import shortest_names

_VALUE: Final = "/.ATTRIBUTES/VARIABLE_VALUE"
_SLOT: Final = "/.OPTIMIZER_SLOT/"

_Path = tuple[str, ...]
_Variables = Mapping[_Path, SourceTable]
"""Values and Keras slots by variable path. A path is a tuple of object names."""


def find_prefix(path: pathlib.Path) -> pathlib.Path | None:
    """Finds a checkpoint's prefix, or returns None.

    `path` is the prefix itself, its index file, the directory of a SavedModel, or a
    directory of checkpoints. In the last case, the latest prefix is found.
    """
    if path.suffix == ".index":
        path = path.with_suffix("")
    if path.with_name(path.name + ".index").is_file():
        return path
    if (path / "variables" / "variables.index").is_file():
        return path / "variables" / "variables"
    state = path / "checkpoint"
    if state.is_file():
        latest = re.search(r'^model_checkpoint_path: "(.*)"', state.read_text(), re.M)
        if latest:
            # Only the path's last part is used. An absolute path is valid only on the
            # machine that wrote the checkpoint, and no path may lead out of the
            # directory.
            return path / pathlib.PurePath(latest.group(1)).name
    return None


def tables_of_checkpoint(prefix: pathlib.Path) -> TableSource:
    """Opens a checkpoint, and names its tables by the shortest unique paths."""
    # Nothing in the file marks tables, so every matrix counts as a table, even a dense
    # kernel. The user selects tables by name.
    variables = _variables(_arrays(prefix))
    tables: dict[_Path, SourceTable] = {}
    for path, variable in variables.items():
        *parent, name = path
        # Table names may contain slashes, so `movie/accumulators` is a slot only if
        # there is a variable `movie`.
        starts = (name[:i] for i, c in enumerate(name) if c == "/")
        is_slot = any((*parent, start) in variables for start in starts)
        if len(variable.values.shape) == 2 and not is_slot:
            slots = _slots_of(path, variables)
            tables[path] = SourceTable(values=variable.values, slots=slots)
    names = shortest_names(list(tables))
    return TableSource(
        origin=f"TensorFlow checkpoint {prefix}",
        tables=dict(zip(names, tables.values(), strict=True)),
    )


def _arrays(prefix: pathlib.Path) -> dict[str, RowArray]:
    """Lists arrays by key, without scalars and strings."""
    if importlib.util.find_spec("tensorflow") is None:
        raise CheckpointError(
            f"Reading the TensorFlow checkpoint {prefix} needs tensorflow 2.18 or "
            "later. Run pip install '.[tf]' in a clone of the repository, or convert "
            "the checkpoint on a machine that has TensorFlow: call "
            "te.checkpoint.import_tables and te.save there, and te.restore here."
        )
    tf: Any = importlib.import_module("tensorflow")

    def call(function: Any, argument: str) -> Any:
        try:
            return function(argument)
        # TensorFlow turns some statuses into plain Python errors.
        except (tf.errors.OpError, IndexError, ValueError) as error:
            raise CheckpointError(
                f"TensorFlow cannot read the checkpoint {prefix}: {error}. Copy its "
                "files again or use another checkpoint."
            ) from None

    reader = call(tf.train.load_checkpoint, str(prefix))
    # TensorFlow reads and verifies only whole arrays, but rows are requested block by
    # block. So the array that was read last stays in memory.
    last = functools.lru_cache(maxsize=1)(functools.partial(call, reader.get_tensor))

    def array_of(key: str, shape: Any, dtype: Any) -> RowArray:
        return RowArray(
            tuple(shape),
            np.dtype(dtype.as_numpy_dtype),
            lambda start, num_rows: last(key)[start : start + num_rows],
            lambda: last(key),
        )

    dtypes = reader.get_variable_to_dtype_map()
    shapes = reader.get_variable_to_shape_map()
    return {
        key: array_of(key, shape, dtypes[key])
        for key, shape in shapes.items()
        if shape and dtypes[key] != tf.string
    }


def _variables(arrays: Mapping[str, RowArray]) -> _Variables:
    """Groups arrays into variables with Keras slots."""
    values, slots = {}, collections.defaultdict(dict)
    for key, array in arrays.items():
        owner, _, slot = key.removesuffix(_VALUE).partition(_SLOT)
        if slot:
            slots[_path_of(owner)][_path_of(slot)[-1]] = array
        else:
            values[_path_of(owner)] = array
    return {k: SourceTable(values=x, slots=slots[k]) for k, x in values.items()}


def _path_of(key: str) -> _Path:
    # TensorFlow escapes a slash in a name as `.S`, and a dot as two dots.
    replaced = {"..": ".", ".S": "/"}
    return tuple(
        re.sub(r"\.[.S]", lambda match: replaced[match.group()], name)
        for name in key.split("/")
    )


def _slots_of(path: _Path, variables: _Variables) -> Mapping[str, RowArray]:
    """Finds a variable's Keras slots. If it has none, finds siblings `name/slot`."""
    *parent, name = path
    return variables[path].slots or {
        other[-1].removeprefix(f"{name}/"): variable.values
        for other, variable in variables.items()
        if other[:-1] == tuple(parent) and other[-1].startswith(f"{name}/")
    }
