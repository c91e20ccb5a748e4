"""The ids of dynamic tables in a checkpoint, and their places after a restore.

A dynamic table is in the files as its ids, rising, and their rows in that order; a
learned default row comes last. Beside each id stands its natural row: the bucket times
64, plus the place in it. A table of as many buckets gives each id that place again, on
any number of devices. In another table, the ids of a bucket that its policy evicts last
come first, and those beyond its 64 places are left out.
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
from tpu_embedding.plan.plan import StackPlan

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
      capacity: capacity of the saved table; None: the ids had no places.
      member: the table.

    Returns:
      The places. Their `sources` are rows of the files, also for the default row.
    """
    ids, natural_rows, sketch = (arrays.get(x) for x in (IDS, NATURAL_ROWS, SKETCH))
    assert ids is not None
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


def rows_of_sources(rows: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Returns `rows[sources]`, with zeros where the source is -1: no id."""
    found = np.zeros((len(sources), *rows.shape[1:]), rows.dtype)
    found[sources >= 0] = rows[sources[sources >= 0]]
    return found


def restored_directory(
    layer: LayerState,
    stack: StackPlan,
    placed: Mapping[str, PlacedIds],
    clocks: Mapping[str, int],
) -> IdDirectory:
    """Returns the directory of a stack with the saved ids of some tables.

    The clock is the latest of those of the saved tables and of the tables that stay.

    Args:
      layer: layer of the stack: arrays, or their shapes.
      stack: the stack.
      placed: name of a table to its saved ids.
      clocks: name of a table to its saved clock.
    """
    now = layer.tables[directory_name(stack.name)]
    if isinstance(now.keys, jax.ShapeDtypeStruct):
        now = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), now)
        now.keys[:] = NO_ID
    found = [clocks[table.name] for table in stack.tables if table.name in clocks]
    if len(found) < len(stack.tables):
        found.append(int(on_host(now.clock).max()))
    return with_placed_ids(now, placed, stack, layer.plan, clock=max(found))


def _lines_of(lines: np.ndarray, member: DynamicTablePlan) -> np.ndarray:
    """Returns the lines of the buckets of a table, in their natural order."""
    first = member.first_bucket
    of_shards = lines.reshape(member.num_shards, -1, LINE_LANES)
    of_table = of_shards[:, first : first + member.buckets_per_shard]
    return of_table.reshape(-1, LINE_LANES)[: member.num_buckets]
