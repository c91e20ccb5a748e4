"""Finds the tables in TensorFlow checkpoints of TPUEmbedding and of the layer of TFRS.

Keys of a checkpoint are paths of Python objects: `model/emb/_tpu_embedding/movie`. A
table is the variable of its name. Slot variables of TensorFlow are siblings, such as
`movie/accumulators`; those of Keras optimizers, which TFRS uses, hang below the
variable. On chips with SparseCores, a variable is a whole stack, and a message beside
it tells how the tables lie in it.
"""

import collections
import importlib
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Final

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    RuleSlots,
    SourceTable,
    TableSource,
)
from tpu_embedding.checkpoint.imports.sparse_core import StackedTable, read_stacked
from tpu_embedding.checkpoint.imports.tensorflow_reader import TensorFlowReader

_VALUE: Final = "/.ATTRIBUTES/VARIABLE_VALUE"
_SLOT: Final = "/.OPTIMIZER_SLOT/"
_LAYOUTS: Final = "_sparse_core_table_layouts"
_TFRS_LAYER: Final = "_tpu_embedding"
_KERAS_TABLE: Final = "embeddings"

_RULES: Final = (
    RuleSlots(rule="adagrad", names={"accumulators": "accumulators"}),
    RuleSlots(
        rule="adagrad_momentum",
        names={"accumulators": "accumulators", "momenta": "momenta"},
    ),
    RuleSlots(
        rule="ftrl", names={"accumulators": "accumulators", "linears": "linears"}
    ),
    RuleSlots(rule="adam", names={"momenta": "momenta", "velocities": "velocities"}),
    # Names of the Keras optimizers.
    RuleSlots(rule="adagrad", names={"accumulators": "accumulator"}),
    RuleSlots(rule="ftrl", names={"accumulators": "accumulator", "linears": "linear"}),
    RuleSlots(rule="adam", names={"momenta": "m", "velocities": "v"}),
)


_Variables = Mapping[tuple[str, ...], SourceTable]
"""The names of the objects that lead to a variable, to its value, with the slot
variables of a Keras optimizer."""


def find_prefix(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the prefix of the checkpoint that a path means, or None.

    Args:
      path: prefix, index file, directory of checkpoints, whose latest one is meant, or
        directory of a SavedModel.
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
            # An absolute path is that of the machine that wrote the checkpoint.
            return path / pathlib.PurePath(latest.group(1)).name
    return None


def tables_of_checkpoint(prefix: pathlib.Path) -> TableSource:
    """Opens a checkpoint.

    Tables have the names of their variables; where two have one name, the names of the
    objects before it are put in front, with `/` between.

    Args:
      prefix: path of its index, without `.index`.

    Raises:
      CheckpointError: if TensorFlow is missing, or the checkpoint is damaged or has no
        tables.
    """
    reader = TensorFlowReader(prefix)
    origin = f"TensorFlow checkpoint {prefix}"
    variables = _variables(reader.arrays())
    stacked = [
        key.removesuffix(_VALUE)
        for key in reader.keys()
        if key.removesuffix(_VALUE).split("/")[-1] == _LAYOUTS
    ]
    tables: dict[tuple[str, ...], SourceTable] = {}
    for key in stacked:
        parent = _path_of(key)[:-1]
        for layout in _layouts(reader.read(key + _VALUE), origin):
            tables[*parent, layout.name] = _stacked_table(
                layout, parent, variables, origin
            )
    if not stacked:
        tables = _plain_tables(variables)
    if not tables:
        raise CheckpointError(f"{origin} has no tables: no variables of two axes.")
    return TableSource(origin=origin, tables=_named(tables), rules=_RULES)


def _variables(arrays: Mapping[str, RowArray]) -> _Variables:
    """Returns the variables by path, with the slot variables of Keras optimizers."""
    values, slots = {}, collections.defaultdict(dict)
    for key, array in arrays.items():
        owner, _, slot = key.removesuffix(_VALUE).partition(_SLOT)
        if slot:
            slots[_path_of(owner)][_path_of(slot)[-1]] = array
        else:
            values[_path_of(owner)] = array
    return {
        path: SourceTable(values=array, slots=slots[path])
        for path, array in values.items()
    }


def _path_of(key: str) -> tuple[str, ...]:
    """Returns the names of a path. In a name, `.S` is a slash, and `..` a dot."""
    replaced = {"..": ".", ".S": "/"}
    return tuple(
        re.sub(r"\.[.S]", lambda match: replaced[match.group()], name)
        for name in key.split("/")
    )


def _slots_of(path: tuple[str, ...], variables: _Variables) -> Mapping[str, RowArray]:
    """Returns the slot variables of a variable; those beside it are `name/slot`."""
    *parent, name = path
    return variables[path].slots or {
        other[-1].removeprefix(f"{name}/"): variable.values
        for other, variable in variables.items()
        if other[:-1] == tuple(parent) and other[-1].startswith(f"{name}/")
    }


def _plain_tables(variables: _Variables) -> dict[tuple[str, ...], SourceTable]:
    """Returns the tables that are variables of their own."""
    is_tfrs = any(_TFRS_LAYER in path for path in variables)
    tables = {}
    for path, variable in variables.items():
        *parent, name = path
        is_slot = any(
            (*parent, name[:i]) in variables for i, c in enumerate(name) if c == "/"
        )
        is_other = is_tfrs and _TFRS_LAYER not in path and name != _KERAS_TABLE
        if len(variable.values.shape) == 2 and not is_slot and not is_other:
            slots = _slots_of(path, variables)
            tables[path] = SourceTable(values=variable.values, slots=slots)
    return tables


def _stacked_table(
    layout: StackedTable,
    parent: tuple[str, ...],
    variables: _Variables,
    origin: str,
) -> SourceTable:
    path = (*parent, layout.stack_name)
    if path not in variables:
        raise CheckpointError(
            f"{origin} lacks the stack {layout.stack_name!r} of table {layout.name!r}."
        )
    return SourceTable(
        values=read_stacked(variables[path].values, layout, origin),
        slots={
            name: read_stacked(slot, layout, origin)
            for name, slot in _slots_of(path, variables).items()
        },
    )


def _named(
    tables: Mapping[tuple[str, ...], SourceTable],
) -> dict[str, SourceTable]:
    """Returns the tables by the shortest end of their paths that no other has."""
    named = {}
    for path, table in tables.items():
        length = 1
        while sum(other[-length:] == path[-length:] for other in tables) > 1:
            length += 1
        named["/".join(path[-length:])] = table
    return named


def _layouts(message: bytes, origin: str) -> list[StackedTable]:
    """Returns the tables of a message `SparseCoreTableLayouts`."""
    messages: Any = importlib.import_module(
        "tensorflow.core.tpu.kernels.sparse_core_layout_pb2"
    )
    try:
        return [
            StackedTable(
                name=table.table_name,
                stack_name=table.stacked_table_name,
                vocabulary_size=table.unsharded_shape[0],
                dim=table.unsharded_shape[1],
                num_shards=table.num_sparse_cores,
                row_offset=table.sparse_core_shard_row_offset,
                rotation=table.sparse_core_shard_rotation,
            )
            for table in messages.SparseCoreTableLayouts.FromString(message).tables
        ]
    except Exception as error:  # Protocol buffers have an error of their own.
        raise CheckpointError(
            f"{origin}: the layouts of its stacks cannot be read: {error}."
        ) from error
