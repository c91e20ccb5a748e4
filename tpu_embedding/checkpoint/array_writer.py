"""Writes the leaves of a state for orbax: tables in natural row order, other arrays.

Orbax names the arrays of a tree, and an `ArrayWriter` writes them. Tables and slot
variables lie in the tree as `TableToSave`. The rows of a stack stream block by block
(`tables/row_stream.py`), so neither the devices nor the host hold a second copy of a
table. Every process writes the blocks of its own devices.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from tpu_embedding.checkpoint.arrays import (
    PendingWrites,
    array_spec,
    rows_per_chunk,
)
from tpu_embedding.checkpoint.records import ArrayRecord
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.row_stream import RowBlock, read_blocks
from tpu_embedding.tables.table_values import unstack_tables


@dataclasses.dataclass(frozen=True, eq=False)
class StackToSave:
    """The rows of a stacked table or slot variable.

    Attributes:
      packed: global rows.
      stack: the stack of the rows.
      plan: plan of the embedding layer.
      chosen: rows of each dynamic table to write, in the order of their ids.
    """

    packed: PackedRows
    stack: StackPlan
    plan: EmbeddingPlan
    chosen: Mapping[str, np.ndarray]

    def blocks(self) -> Iterator[RowBlock]:
        """Yields the blocks that this process writes. All processes iterate together.

        Of dynamic tables, each process has all rows on its host for that time.
        """
        if self.stack.vocabulary.ids_are_rows:
            for turn in read_blocks(self.packed, self.stack, self.plan):
                yield from turn
            return
        dtype = file_row(self.packed).dtype
        values = unstack_tables({self.stack.name: self.packed}, self.plan)
        if jax.process_index() == 0:
            for table, rows in self.chosen.items():
                of_ids = values[table][rows].astype(dtype, copy=False)
                yield RowBlock(table, 0, of_ids)


@dataclasses.dataclass(frozen=True, eq=False)
class TableToSave:
    """The rows of one table: a leaf of the tree that orbax saves.

    Attributes:
      table: name of the table in its stack.
      record: shape and type of the array.
      rows: the rows of the whole stack.
    """

    table: str
    record: ArrayRecord
    rows: StackToSave

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.record.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of its elements."""
        return np.dtype(file_row(self.rows.packed).dtype)

    @property
    def size(self) -> int:
        """Number of its elements."""
        return int(np.prod(self.shape))


class ArrayWriter(ocp.type_handlers.NumpyHandler):
    """Writes all leaves of a tree; plain orbax reads them as NumPy arrays."""

    _array_metadata_store: Final = None
    """Orbax looks for it, and warns without it."""

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        """Copies leaves to the host, and starts to write them.

        Returns once the rest of the rows fits in host memory; arrays of devices may
        then be donated.
        """
        del args
        created: list[ts.Future] = []
        writes = PendingWrites()
        streams: dict[StackToSave, dict[str, ts.TensorStore]] = {}
        for value, info in zip(values, infos, strict=True):
            spec = array_spec(info.path, value.dtype, value.shape, _chunk_shape(value))
            if jax.process_index() == 0:
                created.append(ts.open(spec, create=True))
            # Without a request to the file system.
            store = ts.open(spec | {"assume_metadata": True}).result()
            if isinstance(value, TableToSave):
                streams.setdefault(value.rows, {})[value.table] = store
                continue
            for index, part in _parts_of_process(value):
                writes.add(store[index], part)
        for rows, stores in streams.items():
            for table, start, block in rows.blocks():
                writes.add(stores[table][start : start + len(block)], block)
        return [*created, *writes.futures]


def _chunk_shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of a chunk, which no two processes write."""
    if isinstance(value, TableToSave):
        num_rows, *row_shape = value.shape
        return (rows_per_chunk(num_rows, row_shape, value.dtype), *row_shape)
    if isinstance(value, jax.Array):
        return value.sharding.shard_shape(value.shape)
    return value.shape


def _parts_of_process(value: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields the parts of an array that this process writes, as copies."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        for shard in value.addressable_shards:
            if shard.replica_id == 0:
                yield shard.index, np.array(shard.data)
    elif jax.process_index() == 0:
        # Of several processes, each one has a copy, such as a random key.
        yield (), np.array(value)


def pytree_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns an orbax handler that saves trees of arrays and `TableToSave`."""
    writer = ArrayWriter()
    types = (TableToSave, np.ndarray, jax.Array)
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_zarr3=True,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            *((kind, writer) for kind in types)
        ),
    )
