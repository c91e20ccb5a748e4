"""Finds tables in TensorFlow checkpoints of TPUEmbedding and of the TFRS layer.

Checkpoint keys are paths of Python objects, such as `model/emb/_tpu_embedding/movie`.
Each table is a variable with the table's name. On newer TPUs, each stack of tables is
such a variable. TensorFlow's slot variables are its siblings, such as
`movie/accumulators`. Slot variables of Keras optimizers, which TFRS uses, are nested
below the variable.
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
"""Value and Keras slots of each variable, by the names of the objects on its path."""


def find_prefix(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the prefix of the checkpoint at a path, or None without a checkpoint.

    Args:
      path: prefix of a checkpoint, its index file, a directory of checkpoints, or a
        SavedModel's directory. A directory of checkpoints gives the latest prefix.
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
            # An absolute path is valid only on the machine that wrote the checkpoint.
            return path / pathlib.PurePath(latest.group(1)).name
    return None


def tables_of_checkpoint(prefix: pathlib.Path) -> TableSource:
    """Opens a checkpoint.

    All two-dimensional variables count as tables, even in dense layers. Tables have the
    names of their variables. If a name is not unique, the names of its parent objects
    precede it, separated by `/`.

    Args:
      prefix: path of the checkpoint's index file, without `.index`.

    Raises:
      CheckpointError: if TensorFlow is missing, or the checkpoint is damaged.
    """
    variables = _variables(_arrays(prefix))
    tables: dict[_Path, SourceTable] = {}
    for path, variable in variables.items():
        *parent, name = path
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
    """Returns the arrays by key, without scalars and strings.

    TensorFlow reads whole arrays and verifies their checksums. The array read last is
    cached, because its rows are requested block by block.
    """
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
        # TensorFlow turns some statuses into Python errors.
        except (tf.errors.OpError, IndexError, ValueError) as error:
            raise CheckpointError(
                f"TensorFlow cannot read the checkpoint {prefix}: {error}. Copy its "
                "files again or use another checkpoint."
            ) from None

    reader = call(tf.train.load_checkpoint, str(prefix))
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
    """Returns the variables by path, with their Keras optimizers' slot variables."""
    values, slots = {}, collections.defaultdict(dict)
    for key, array in arrays.items():
        owner, _, slot = key.removesuffix(_VALUE).partition(_SLOT)
        if slot:
            slots[_path_of(owner)][_path_of(slot)[-1]] = array
        else:
            values[_path_of(owner)] = array
    return {k: SourceTable(values=x, slots=slots[k]) for k, x in values.items()}


def _path_of(key: str) -> _Path:
    """Returns the names in a path. In names, `.S` escapes a slash and `..` a dot."""
    replaced = {"..": ".", ".S": "/"}
    return tuple(
        re.sub(r"\.[.S]", lambda match: replaced[match.group()], name)
        for name in key.split("/")
    )


def _slots_of(path: _Path, variables: _Variables) -> Mapping[str, RowArray]:
    """Returns a variable's Keras slots, or else its siblings named `name/slot`."""
    *parent, name = path
    return variables[path].slots or {
        other[-1].removeprefix(f"{name}/"): variable.values
        for other, variable in variables.items()
        if other[:-1] == tuple(parent) and other[-1].startswith(f"{name}/")
    }
