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
from collections.abc import Sequence
from typing import Final

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import RowArray
from tpu_embedding.config import TableConfig

_ROW_ALIGNMENT: Final = 8
"""Rows that a table takes in each shard are a multiple of this number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedTable:
    """A table's place in a stack.

    Attributes:
      name: the table's name.
      stack_name: the stack's name.
      vocabulary_size: rows without padding.
      dim: columns without padding.
      num_shards: SparseCores of all devices.
      row_offset: first row of the table in each shard.
      rotation: shard that has row 0.
    """

    name: str
    stack_name: str
    vocabulary_size: int
    dim: int
    num_shards: int
    row_offset: int
    rotation: int


def stack_in_order(
    stack_name: str,
    tables: Sequence[TableConfig],
    *,
    num_sparse_cores: int,
    sparse_cores_per_device: int,
) -> list[StackedTable]:
    """Returns the places of tables that are stacked in this order.

    Each table has whole groups of 8 rows in each shard. Its first row is as many shards
    behind that of the table before it as a device has SparseCores.

    Args:
      stack_name: the stack's name.
      tables: in the order of their rows.
      num_sparse_cores: SparseCores on all devices together.
      sparse_cores_per_device: SparseCores on one device.

    Example:
      >>> from tpu_embedding.config import TableConfig
      >>> a = TableConfig(vocabulary_size=100, dim=8, name="a")
      >>> b = TableConfig(vocabulary_size=37, dim=8, name="b")
      >>> _, place = stack_in_order(
      ...     "a_b", [a, b], num_sparse_cores=8, sparse_cores_per_device=4
      ... )
      >>> place.row_offset, place.rotation
      (16, 4)
    """
    places, row_offset = [], 0
    for i, table in enumerate(tables):
        assert table.name is not None
        places.append(
            StackedTable(
                name=table.name,
                stack_name=stack_name,
                vocabulary_size=table.max_rows,
                dim=table.dim,
                num_shards=num_sparse_cores,
                row_offset=row_offset,
                rotation=i * sparse_cores_per_device % num_sparse_cores,
            )
        )
        row_offset += rows_in_shard(table.max_rows, num_sparse_cores)
    return places


def rows_in_shard(vocabulary_size: int, num_shards: int) -> int:
    """Returns the rows that a table takes in each shard, padding included."""
    group = _ROW_ALIGNMENT * num_shards
    return -(-vocabulary_size // group) * _ROW_ALIGNMENT


def read_stacked(stack: RowArray, table: StackedTable, origin: str) -> RowArray:
    """Returns the rows of a table, in their own order and without padding.

    Args:
      stack: table or slot variable of the whole stack, `[rows, dim]` or `[rows]`.
      table: place of the table in the stack.
      origin: names the source of the stack in errors.

    Raises:
      CheckpointError: if the stack cannot hold the table there.
    """
    num_rows, *row_shape = stack.shape
    rows_per_shard, rest = divmod(num_rows, max(1, table.num_shards))
    last_row = table.row_offset + (table.vocabulary_size - 1) // max(
        1, table.num_shards
    )
    if (
        table.num_shards < 1
        or rest
        or last_row >= rows_per_shard
        or (row_shape and row_shape[0] < table.dim)
    ):
        raise CheckpointError(
            f"{origin}: stack {table.stack_name!r} of shape {list(stack.shape)} cannot "
            f"hold table {table.name!r} of {table.vocabulary_size} rows and dim "
            f"{table.dim} from row {table.row_offset} of {table.num_shards} shards on."
        )
    return RowArray(
        (table.vocabulary_size, *([table.dim] if row_shape else [])),
        stack.dtype,
        functools.partial(_read, stack, table, rows_per_shard),
        stack.check,
    )


def _read(
    stack: RowArray,
    table: StackedTable,
    rows_per_shard: int,
    start: int,
    num_rows: int,
) -> np.ndarray:
    is_matrix = len(stack.shape) == 2
    rows = np.empty((num_rows, *([table.dim] if is_matrix else [])), stack.dtype)
    for first in range(min(table.num_shards, num_rows)):
        row = start + first
        shard = (row + table.rotation) % table.num_shards
        position = table.row_offset + row // table.num_shards
        part = rows[first :: table.num_shards]
        found = stack.read(shard * rows_per_shard + position, len(part))
        part[...] = found[:, : table.dim] if is_matrix else found
    return rows
