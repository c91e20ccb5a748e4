"""Lays out records, which join the bits of a table row and of its slot variables."""

import math

import jax
import numpy as np

from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows


def rows_of_record(stack: StackPlan) -> list[jax.ShapeDtypeStruct]:
    """Lists the file rows that a record joins, the table row first."""
    lines = jax.ShapeDtypeStruct((), stack.layout.stored_dtype)
    return [file_row(PackedRows(lines=lines, layout=stack.layout)), *stack.slots]


def columns_of(stack: StackPlan) -> list[slice]:
    """Finds the words that each file row takes in a record.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(
      ...     te.FeatureConfig(table=table), optimizer=te.optimizers.adagrad(0.1))
      >>> columns_of(plan.stacks[0])
      [slice(0, 4, None), slice(4, 8, None)]
    """
    num_words = [-(-_num_bytes(row) // 4) for row in rows_of_record(stack)]
    ends = np.cumsum(num_words).tolist()
    return list(map(slice, [0, *ends], ends))


def words_of_file_rows(rows: np.ndarray) -> np.ndarray:
    """Casts file rows `[rows, *shape]` to words, uint32 `[rows, words]`."""
    # If there are zero rows, NumPy can't infer their size, so pass it.
    flat = np.ascontiguousarray(rows).reshape(len(rows), math.prod(rows.shape[1:]))
    flat = flat.view(np.uint8)
    return np.pad(flat, ((0, 0), (0, -flat.shape[1] % 4))).view(np.uint32)


def file_rows_of_words(words: np.ndarray, row: jax.ShapeDtypeStruct) -> np.ndarray:
    """Inverts `words_of_file_rows`."""
    flat = np.ascontiguousarray(words).view(np.uint8)[:, : _num_bytes(row)]
    return np.ascontiguousarray(flat).view(row.dtype).reshape(len(words), *row.shape)


def _num_bytes(row: jax.ShapeDtypeStruct) -> int:
    return math.prod(row.shape) * row.dtype.itemsize
