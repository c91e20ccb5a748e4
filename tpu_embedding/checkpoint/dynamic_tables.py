"""The ids of dynamic tables in a checkpoint, and their places after a restore.

A dynamic table lies in the files as its ids, rising, and their rows in that order; a
learned default row comes last. Beside each id stands its natural row: the bucket times
64, plus the place in it. A table of as many buckets gives each id that place again, on
any number of devices. In another table, the ids of a bucket that its policy evicts last
come first, and those beyond its 64 places are left out.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Final

import jax
import numpy as np

from tpu_embedding.checkpoint.records import DIRECTORY_ARRAY, ArrayRecord
from tpu_embedding.checkpoint.split_state import LayerState
from tpu_embedding.dynamic import (
    SLOTS_PER_BUCKET,
    Dynamic,
    Eviction,
    LeastFrequentlyUsed,
)
from tpu_embedding.functional.dynamic_ids import on_host, rows_in_directory
from tpu_embedding.plan.dynamic_rows import DynamicTablePlan, dynamic_tables
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.id_directory import LINE_LANES, IdDirectory, directory_name
from tpu_embedding.rows.id_mixing import NO_ID, mix_ids, multiply_high
from tpu_embedding.types import Ids64

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedIds:
    """The saved ids of a table and their places; all but `arrays` `[ids]`.

    Attributes:
      arrays: arrays of the directory by their name in the files.
      kept: position in the files of each id that has a place.
      buckets: bucket of each of these.
      lanes: place of each of these in its bucket.
      sources: row in the files for each row of the table, `[rows]`; -1: none.
    """

    arrays: Mapping[str, np.ndarray]
    kept: np.ndarray
    buckets: np.ndarray
    lanes: np.ndarray
    sources: np.ndarray


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
    members = dynamic_tables(stack)
    found = rows_in_directory(directory, stack)
    init_keys = on_host(directory.init_keys).reshape(stack.num_shards, -1, 2)[0]
    result = {}
    for i, member in enumerate(members):
        rows = found[member.table.name]
        arrays = {
            IDS: rows.ids,
            NATURAL_ROWS: rows.natural_rows,
            LAST_USED: rows.last_used,
            COUNTS: rows.counts,
            CLOCK: clock,
            INIT_KEY: init_keys[i],
        }
        if sketch is not None:
            arrays[SKETCH] = _lines_of(sketch, member)
        last = [] if member.default_row is None else [member.default_row]
        result[member.table.name] = SavedIds(
            arrays=arrays, rows=np.append(rows.rows, np.asarray(last, np.int64))
        )
    return result


def place_ids(
    arrays: Mapping[str, np.ndarray],
    capacity: int | None,
    member: DynamicTablePlan,
) -> PlacedIds:
    """Returns the places of saved ids in a table.

    Args:
      arrays: arrays of the directory by their name in the files.
      capacity: capacity of the saved table; None: the ids had no places.
      member: the table.
    """
    num_ids = len(arrays[IDS])
    buckets_before = capacity and Dynamic(capacity=capacity).num_buckets
    if buckets_before == member.num_buckets:
        kept = np.arange(num_ids)
        buckets, lanes = np.divmod(arrays[NATURAL_ROWS], SLOTS_PER_BUCKET)
    else:
        kept, buckets, lanes = _placed_anew(arrays, member)
    shards, of_shard = np.divmod(buckets, member.buckets_per_shard)
    rows = (SLOTS_PER_BUCKET * of_shard + lanes) * member.num_shards + shards
    sources = np.full(member.table.num_rows, -1, np.int64)
    sources[rows] = kept
    if member.default_row is not None:
        sources[member.default_row] = num_ids
    return PlacedIds(
        arrays=arrays, kept=kept, buckets=buckets, lanes=lanes, sources=sources
    )


def _placed_anew(
    arrays: Mapping[str, np.ndarray], member: DynamicTablePlan
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the ids that have a place, their buckets and lanes.

    In a bucket, the ids that the policy evicts last come first.
    """
    first, second = _mixed(arrays[IDS])
    buckets = multiply_high(first, member.num_buckets).astype(np.int64)
    value, next_value = _values(arrays, member.dynamic.evict)
    order = np.lexsort((second, first, ~next_value, ~value, buckets))
    buckets = buckets[order]
    lanes = np.arange(len(order)) - np.searchsorted(buckets, buckets)
    fits = lanes < SLOTS_PER_BUCKET
    return order[fits], buckets[fits], lanes[fits]


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


def warn_of_ids_left_out(placed: Mapping[str, PlacedIds]) -> None:
    """Warns if the tables have no place for some of the saved ids."""
    left_out = {
        table: f"{len(saved.arrays[IDS]) - len(saved.kept)} of {len(saved.arrays[IDS])}"
        for table, saved in placed.items()
        if len(saved.kept) < len(saved.arrays[IDS])
    }
    if left_out:
        found = ", ".join(f"{x} of table {table!r}" for table, x in left_out.items())
        warnings.warn(
            "Ids of the checkpoint whose buckets are full are left out, the least "
            f"valuable first: {found}. A capacity that is a multiple of the saved one "
            "keeps all ids.",
            stacklevel=2,
        )


def restored_directory(
    layer: LayerState, stack: StackPlan, placed: Mapping[str, PlacedIds]
) -> IdDirectory:
    """Returns the directory of a stack with the saved ids of some tables.

    The clock is the latest of those of the saved tables and of the tables that stay.

    Args:
      layer: layer of the stack: arrays, or their shapes.
      stack: the stack.
      placed: name of a table to its saved ids.
    """
    now = layer.tables[directory_name(stack.name)]
    if isinstance(now.keys, jax.ShapeDtypeStruct):
        directory = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), now)
        directory.keys[:] = NO_ID
    else:
        directory = jax.tree.map(lambda x: np.array(on_host(x)), now)
    members = dynamic_tables(stack)
    shards, tables = stack.num_shards, len(members)
    keys, scores = (
        x.reshape(shards, -1, 2, SLOTS_PER_BUCKET)
        for x in (directory.keys, directory.scores)
    )
    used_rows = directory.used_rows.reshape(shards, tables)
    init_keys = directory.init_keys.reshape(shards, tables, 2)
    clocks = (
        [] if placed.keys() == {x.table.name for x in members} else [*directory.clock]
    )
    for i, member in enumerate(members):
        if member.table.name not in placed:
            continue
        saved = placed[member.table.name]
        arrays, size = saved.arrays, member.buckets_per_shard
        of_table = slice(member.first_bucket, member.first_bucket + size)
        keys[:, of_table], scores[:, of_table] = NO_ID, 0
        shard, of_shard = np.divmod(saved.buckets, size)
        line = shard, of_shard + member.first_bucket
        first, second = _mixed(arrays[IDS][saved.kept])
        keys[*line, 0, saved.lanes], keys[*line, 1, saved.lanes] = first, second
        scores[*line, 0, saved.lanes] = arrays[LAST_USED][saved.kept]
        scores[*line, 1, saved.lanes] = arrays[COUNTS][saved.kept]
        used_rows[:, i] = np.bincount(shard, minlength=shards)
        init_keys[:, i] = arrays[INIT_KEY]
        clocks.append(arrays[CLOCK])
        if directory.sketch is not None:
            _set_sketch(directory.sketch, arrays.get(SKETCH), member)
    directory.clock[:] = max(clocks)
    sharding = layer.plan.rows_sharding(stack)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__),
        directory,
    )


def _set_sketch(
    sketch: np.ndarray, saved: np.ndarray | None, member: DynamicTablePlan
) -> None:
    """Sets the counts of unknown ids; those of another number of buckets start anew."""
    lines = sketch.reshape(member.num_shards, -1, LINE_LANES)
    size = member.buckets_per_shard
    new = np.zeros((member.num_shards * size, LINE_LANES), np.uint32)
    if saved is not None and len(saved) == member.num_buckets:
        new[: len(saved)] = saved
    of_table = slice(member.first_bucket, member.first_bucket + size)
    lines[:, of_table] = new.reshape(member.num_shards, size, LINE_LANES)


def _lines_of(lines: np.ndarray, member: DynamicTablePlan) -> np.ndarray:
    """Returns the lines of the buckets of a table, in their natural order."""
    first = member.first_bucket
    of_shards = lines.reshape(member.num_shards, -1, LINE_LANES)
    of_table = of_shards[:, first : first + member.buckets_per_shard]
    return of_table.reshape(-1, LINE_LANES)[: member.num_buckets]


def _mixed(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    words = Ids64.of_array(ids)
    return mix_ids(np.asarray(words.high), np.asarray(words.low))
