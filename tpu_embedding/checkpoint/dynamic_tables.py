"""The ids of dynamic tables in a checkpoint, and their places after a restore.

A file of a dynamic table has its ids, rising, and their rows in that order. A learned
default row comes last. Each id has its natural row next to it: the bucket times 64,
plus the place in it. A table of as many buckets gives each id that place again, on any
number of devices. In another table, the ids of a bucket that its policy evicts last
come first, and ids beyond its 64 places are left out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

import jax
import numpy as np

from tpu_embedding.checkpoint.records import DIRECTORY_ARRAY, ArrayRecord
from tpu_embedding.checkpoint.split_state import LayerState
from tpu_embedding.dynamic.directory import (
    LINE_LANES,
    DynamicTablePlan,
    IdDirectory,
    directory_name,
    dynamic_tables,
)
from tpu_embedding.dynamic.ids_64 import NO_ID, Ids64, mix_ids
from tpu_embedding.dynamic.ids_on_host import (
    PlacedIds,
    on_host,
    place_ids,
    rows_in_directory,
    with_placed_ids,
)
from tpu_embedding.dynamic.vocabulary import Dynamic, Eviction, LeastFrequentlyUsed
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.row_stream import ReadTableRows, write_blocks

IDS: Final = f"{DIRECTORY_ARRAY}ids"
NATURAL_ROWS: Final = f"{DIRECTORY_ARRAY}natural_rows"
LAST_USED: Final = f"{DIRECTORY_ARRAY}last_used"
COUNTS: Final = f"{DIRECTORY_ARRAY}counts"
CLOCK: Final = f"{DIRECTORY_ARRAY}clock"
INIT_KEY: Final = f"{DIRECTORY_ARRAY}init_key"
SKETCH: Final = f"{DIRECTORY_ARRAY}sketch"
ID_ARRAYS: Final = (IDS, NATURAL_ROWS, LAST_USED, COUNTS, CLOCK, INIT_KEY, SKETCH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedIds:
    """The ids of a dynamic table, to be written.

    Attributes:
      arrays: arrays of the directory by their name in the files.
      rows: row of the table for each row of the files.
    """

    arrays: Mapping[str, np.ndarray]
    rows: np.ndarray


def directory_records(saved: SavedIds) -> dict[str, ArrayRecord]:
    """Returns the description of each array of a directory."""
    return {
        name: ArrayRecord(
            shape=array.shape,
            dtype=array.dtype.name,
            has_rows=name in (IDS, NATURAL_ROWS, LAST_USED, COUNTS),
        )
        for name, array in saved.arrays.items()
    }


def saved_ids(layer: LayerState, stack: StackPlan) -> dict[str, SavedIds]:
    """Returns the ids of each table of a dynamic stack. All processes call it together.

    The whole directory is on the host for that time.
    """
    directory = layer.tables[directory_name(stack.name)]
    sketch = None if directory.sketch is None else on_host(directory.sketch)
    clock = on_host(directory.clock)[0]
    rows_by_table = rows_in_directory(directory, stack)
    init_keys = on_host(directory.init_keys).reshape(stack.num_shards, -1, 2)[0]
    result = {}
    for i, member in enumerate(dynamic_tables(stack)):
        rows = rows_by_table[member.table.name]
        arrays = {
            IDS: rows.ids,
            NATURAL_ROWS: rows.natural_rows,
            LAST_USED: rows.last_used,
            COUNTS: rows.counts,
            CLOCK: clock,
            INIT_KEY: init_keys[i],
        }
        if sketch is not None:
            # The lines of the table's buckets, in their natural order.
            first, size = member.first_bucket, member.buckets_per_shard
            lines = sketch.reshape(member.num_shards, -1, LINE_LANES)
            lines = lines[:, first : first + size].reshape(-1, LINE_LANES)
            arrays[SKETCH] = lines[: member.num_buckets]
        saved_rows = rows.rows
        if member.default_row is not None:
            saved_rows = np.append(saved_rows, np.int64(member.default_row))
        result[member.table.name] = SavedIds(arrays=arrays, rows=saved_rows)
    return result


def place_saved_ids(
    arrays: Mapping[str, np.ndarray],
    capacity: int | None,
    member: DynamicTablePlan,
) -> PlacedIds:
    """Returns the places of saved ids in a table.

    In a bucket of a table of another capacity, the ids that the policy evicts last come
    first.

    Args:
      arrays: arrays of the directory by their name in the files.
      capacity: capacity of the saved table, or None if its ids had no places.
      member: the table.

    Returns:
      The places. Their `sources` are rows of the files, also for the default row.
    """
    ids, natural_rows, sketch = (
        arrays[IDS],
        arrays.get(NATURAL_ROWS),
        arrays.get(SKETCH),
    )
    order = np.arange(len(ids))
    if (capacity and Dynamic(capacity=capacity).num_buckets) != member.num_buckets:
        natural_rows = sketch = None
        value, next_value = _values(arrays, member.dynamic.evict)
        words = Ids64.of_array(ids)
        first, second = mix_ids(np.asarray(words.high), np.asarray(words.low))
        order = np.lexsort((second, first, ~next_value, ~value))
    placed = place_ids(ids[order], member, natural_rows)
    kept = order[placed.kept]
    sources = np.full(member.table.num_rows, -1, np.int64)
    sources[: len(placed.sources)] = np.append(order, -1)[placed.sources]
    if member.default_row is not None:
        sources[member.default_row] = len(ids)
    return dataclasses.replace(
        placed,
        sources=sources,
        kept=kept,
        last_used=arrays[LAST_USED][kept],
        counts=arrays[COUNTS][kept],
        init_key=arrays[INIT_KEY],
        sketch=sketch,
    )


def _values(
    arrays: Mapping[str, np.ndarray], evict: Eviction | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what ids are worth to a policy, and what decides among equals."""
    last_used, counts = arrays[LAST_USED], arrays[COUNTS]
    if not isinstance(evict, LeastFrequentlyUsed):
        return last_used, counts
    if evict.half_life is not None:
        # Until the last use of the table: the clock counts steps, but the caller's
        # `now` may count hours.
        age = last_used.max(initial=0) - last_used
        counts = counts >> np.minimum(age // np.uint32(evict.half_life), 31)
    return counts, last_used


def write_table_rows(
    packed: PackedRows,
    stack: StackPlan,
    plan: EmbeddingPlan,
    read: ReadTableRows,
    num_rows: Mapping[str, int],
    placed: Mapping[str, PlacedIds],
) -> PackedRows:
    """Replaces the rows of some tables of a stack, or of a slot variable, in place.

    All processes call it together. The rows of a dynamic table are on the host as a
    whole, one table after the other.

    Args:
      packed: global rows; donated.
      stack: the stack of the rows.
      plan: plan of the layer.
      read: returns rows of a table in the order of its file.
      num_rows: rows in the file of each table to write.
      placed: name of a table to the places of its ids, if their order differs here.
    """
    ranges = {
        table: (0, size) for table, size in num_rows.items() if table not in placed
    }
    if ranges:
        packed = write_blocks(packed, stack, plan, read, ranges)
    for table in [name for name in num_rows if name in placed]:
        rows, sources = read(table, 0, num_rows[table]), placed[table].sources

        def gather(_: str, start: int, size: int, rows=rows, sources=sources):
            block = sources[start : start + size]
            gathered = np.zeros((len(block), *rows.shape[1:]), rows.dtype)
            gathered[block >= 0] = rows[block[block >= 0]]  # -1 is a place without id.
            return gathered

        packed = write_blocks(packed, stack, plan, gather, {table: (0, len(sources))})
    return packed


def restored_directory(
    layer: LayerState,
    stack: StackPlan,
    placed: Mapping[str, PlacedIds],
    clocks: Mapping[str, int],
) -> IdDirectory:
    """Returns the directory of a stack with the saved ids of some tables.

    The clock is the latest one of the saved tables and of the tables that stay.

    Args:
      layer: layer of the stack: arrays, or their shapes.
      stack: the stack.
      placed: name of a table to its saved ids.
      clocks: name of a table to its saved clock.
    """
    old = layer.tables[directory_name(stack.name)]
    if isinstance(old.keys, jax.ShapeDtypeStruct):
        old = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), old)
        old.keys[:] = NO_ID
    latest = max(clocks.values(), default=0)
    if len(clocks) < len(stack.tables):
        latest = max(latest, int(on_host(old.clock).max()))
    return with_placed_ids(old, placed, stack, layer.plan, clock=latest)
