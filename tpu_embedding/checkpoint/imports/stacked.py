"""Reads tables from the stacked arrays that SparseCore libraries save.

TensorFlow, jax-tpu-embedding and keras-rs stack tables alike. A stack has one shard per
SparseCore, and its shards follow each other. Of a table, they hold

    row i    in shard    (i + rotation) % num_shards
             at row      row_offset + i // num_shards

So rows `i`, `i + num_shards`, ... of a table are neighbours in the stack. A range of
rows takes one read per shard.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.orbax import arrays_of_checkpoint
from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable, TableSource
from tpu_embedding.config import TableConfig
from tpu_embedding.paths import local_path

_ROW_ALIGNMENT: Final = 8
"""Rows that a table takes in each shard are a multiple of this number."""

_KERAS_TABLE: Final = re.compile(r"var:(.+):table(?::slot:(.+))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedTable:
    """A table's place in a stack.

    Attributes:
      vocabulary_size: rows without padding.
      dim: columns without padding.
      num_shards: SparseCores of all devices.
      row_offset: first row of the table in each shard.
      rotation: shard that has row 0.
    """

    vocabulary_size: int
    dim: int
    num_shards: int
    row_offset: int
    rotation: int


def open_stacked_tables(
    path: str | pathlib.Path,
    tables: Sequence[TableConfig],
    *,
    stacks: Mapping[str, Sequence[str]],
    num_sparse_cores: int,
    rotation: int,
) -> TableSource:
    """Opens the stacked tables of an orbax checkpoint of keras-rs or jax-tpu-embedding.

    The checkpoint does not say how they were stacked, and no shape tells the rotation:
    compare some rows with those of the trained model.

    Args:
      path: directory of a CheckpointManager, whose latest step is read, of a step, or
        of an item. keras-rs names stacks `var:STACK:table`; jax-tpu-embedding has
        `STACK/table`.
      tables: configs of the tables; their names, rows and dims must be those that the
        checkpoint was trained with.
      stacks: stack name to the names of its tables, in the order of their rows.
      num_sparse_cores: SparseCores of all devices that trained the checkpoint.
      rotation: shards between row 0 of a table and row 0 of the one before it in the
        stack: the number of SparseCores of one device, 2 or 4 by generation.

    Returns:
      The tables; see `open_tables`.

    Raises:
      CheckpointError: if the checkpoint is damaged, or its stacks do not fit.
    """
    origin = f"stacked checkpoint {path}"
    found = _stacks_of(arrays_of_checkpoint(local_path(path)))
    configs = {str(table.name): table for table in tables}
    result: dict[str, SourceTable] = {}
    for stack_name, names in stacks.items():
        if stack_name not in found or not configs.keys() >= set(names):
            raise CheckpointError(
                f"Stack {stack_name!r} of {list(names)} must be one of {sorted(found)} "
                f"of {path}, and tables must have its tables, got {sorted(configs)}."
            )
        row_offset = 0
        for i, name in enumerate(names):
            place = StackedTable(
                vocabulary_size=configs[name].max_rows,
                dim=configs[name].dim,
                num_shards=num_sparse_cores,
                row_offset=row_offset,
                rotation=i * rotation % num_sparse_cores,
            )
            result[name] = table_of_stack(found[stack_name], place, f"{origin}: {name}")
            row_offset += rows_in_shard(place.vocabulary_size, num_sparse_cores)
        if found[stack_name].values.shape[0] != row_offset * num_sparse_cores:
            raise CheckpointError(
                f"Stack {stack_name!r} of {path} has "
                f"{found[stack_name].values.shape[0]} rows, but its tables "
                f"{list(names)} take {row_offset * num_sparse_cores} on "
                f"{num_sparse_cores} SparseCores. Check num_sparse_cores, and the "
                "vocabulary sizes of the tables."
            )
    return TableSource(origin=origin, tables=result)


def _stacks_of(arrays: Mapping[tuple[str, ...], RowArray]) -> dict[str, SourceTable]:
    """Returns the stacks of a checkpoint by name, with their slot variables."""
    tables: dict[str, RowArray] = {}
    slots: dict[str, dict[str, RowArray]] = {}
    for leaf, array in arrays.items():
        if match := _KERAS_TABLE.fullmatch(leaf[-1]):
            if match[2] is None:
                tables[match[1]] = array
            else:
                slots.setdefault(match[1], {})[match[2]] = array
        elif len(leaf) > 1 and leaf[-1] == "table":
            tables[leaf[-2]] = array
        elif len(leaf) > 2 and leaf[-2] == "slot":
            slots.setdefault(leaf[-3], {})[leaf[-1]] = array
    return {
        name: SourceTable(values=array, slots=slots.get(name, {}))
        for name, array in tables.items()
    }


def rows_in_shard(vocabulary_size: int, num_shards: int) -> int:
    """Returns the rows that a table takes in each shard, padding included.

    Example:
      >>> rows_in_shard(100, 8)
      16
    """
    group = _ROW_ALIGNMENT * num_shards
    return -(-vocabulary_size // group) * _ROW_ALIGNMENT


def table_of_stack(stack: SourceTable, place: StackedTable, owner: str) -> SourceTable:
    """Returns a table of a stack and its slot variables, in their order of rows.

    Args:
      stack: the stack.
      place: the table in it.
      owner: names the table in errors.

    Raises:
      CheckpointError: if the stack cannot hold the table there.
    """
    return SourceTable(
        values=_read_stacked(stack.values, place, owner),
        slots={k: _read_stacked(slot, place, owner) for k, slot in stack.slots.items()},
    )


def _read_stacked(stack: RowArray, place: StackedTable, owner: str) -> RowArray:
    num_rows, *row_shape = stack.shape
    num_shards = max(1, place.num_shards)
    rows_per_shard, rest = divmod(num_rows, num_shards)
    last_row = place.row_offset + (place.vocabulary_size - 1) // num_shards
    is_narrow = bool(row_shape) and row_shape[0] < place.dim
    if place.num_shards < 1 or rest or last_row >= rows_per_shard or is_narrow:
        raise CheckpointError(
            f"{owner}: a stack of shape {list(stack.shape)} cannot hold {place}."
        )
    return RowArray(
        (place.vocabulary_size, *([place.dim] if row_shape else [])),
        stack.dtype,
        functools.partial(_read, stack, place, rows_per_shard),
        stack.check,
    )


def _read(
    stack: RowArray, place: StackedTable, rows_per_shard: int, start: int, num_rows: int
) -> np.ndarray:
    columns: Any = slice(None) if len(stack.shape) == 1 else (..., slice(place.dim))
    row_shape = () if len(stack.shape) == 1 else (place.dim,)
    rows = np.empty((num_rows, *row_shape), stack.dtype)
    for first in range(min(place.num_shards, num_rows)):
        row = start + first
        shard = (row + place.rotation) % place.num_shards
        position = place.row_offset + row // place.num_shards
        part = rows[first :: place.num_shards]
        found = stack.read(shard * rows_per_shard + position, len(part))
        part[...] = found[columns]
    return rows
