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

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import RowArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedTable:
    """A table's place in a stack.

    Attributes:
      name: of the table.
      stack_name: of the stack.
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


def read_stacked(stack: RowArray, table: StackedTable, origin: str) -> RowArray:
    """Returns the rows of a table, in their own order and without padding.

    Args:
      stack: table or slot variable of the whole stack, `[rows, dim]` or `[rows]`.
      table: its place.
      origin: of the stack, for messages.

    Raises:
      CheckpointError: if the stack cannot hold the table there.
    """
    num_rows, *row_shape = stack.shape
    rows_per_shard, rest = divmod(num_rows, table.num_shards)
    last_row = table.row_offset + (table.vocabulary_size - 1) // table.num_shards
    if rest or last_row >= rows_per_shard or (row_shape and row_shape[0] < table.dim):
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
