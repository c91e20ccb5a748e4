"""Places imported rows of a dynamic table: each id in its bucket, its row beside it."""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from tpu_embedding.checkpoint.dynamic_tables import (
    CLOCK,
    COUNTS,
    IDS,
    INIT_KEY,
    LAST_USED,
    place_ids,
)
from tpu_embedding.checkpoint.imports.match import MatchedTable
from tpu_embedding.checkpoint.imports.source import RowArray
from tpu_embedding.dynamic import SLOTS_PER_BUCKET
from tpu_embedding.plan.dynamic_rows import DynamicTablePlan


def place_table(
    match: MatchedTable,
    member: DynamicTablePlan,
    clock: int,
    init_key: np.ndarray,
    new_slots: Mapping[str, tuple[tuple[int, ...], float]],
) -> MatchedTable:
    """Returns the rows of a source in the order of a dynamic table, and its ids.

    Rows of the table without an id are zeros; they start as new with their id. In a
    full bucket, the ids stay that the policy evicts last.

    Args:
      match: rows and ids of the source.
      member: the table of the model.
      clock: clock of the model. Ids whose last use the source does not know count as
        used then.
      init_key: random key of the rows of later ids, uint32 `[2]`.
      new_slots: row shape and initial value of slot variables; those that are not
        imported start anew.
    """
    given = match.ids
    assert given is not None, "match_tables refuses rows without ids"
    num_ids, clock = len(given.ids), max(clock, given.clock)
    unknown_use = np.full(num_ids, clock, np.uint32)
    unknown_count = np.ones(num_ids, np.uint32)
    arrays = {
        IDS: given.ids,
        LAST_USED: unknown_use if given.last_used is None else given.last_used,
        COUNTS: unknown_count if given.counts is None else given.counts,
        CLOCK: np.uint32(clock),
        INIT_KEY: init_key,
    }
    placed = place_ids(arrays, None, member)
    # Without the default row, which is the last one.
    num_rows = member.buckets_per_shard * SLOTS_PER_BUCKET * member.num_shards
    sources = placed.sources[:num_rows]
    slots = {
        name: _constant_rows(num_rows, *of_row)
        for name, of_row in new_slots.items()
        if name not in match.slots
    }
    for name, array in match.slots.items():
        slots[name] = _gathered(array, sources)
    return dataclasses.replace(
        match,
        values=_gathered(match.values, sources),
        slots=slots,
        num_rows=num_rows,
        placed=placed,
    )


def _gathered(array: RowArray, sources: np.ndarray) -> RowArray:
    """Returns rows in another order; the whole array is on the host once one is read.

    Args:
      array: rows of the source.
      sources: row of the source for each row of the result; -1: zeros.
    """
    whole = functools.cache(lambda: array.read(0, array.shape[0]))

    def read(start: int, num_rows: int) -> np.ndarray:
        chosen = sources[start : start + num_rows]
        rows = np.zeros((num_rows, *array.shape[1:]), array.dtype)
        rows[chosen >= 0] = whole()[chosen[chosen >= 0]]
        return rows

    shape = (len(sources), *array.shape[1:])
    return RowArray(shape, array.dtype, read, array.check)


def _constant_rows(num_rows: int, row_shape: tuple[int, ...], value: float) -> RowArray:
    return RowArray(
        (num_rows, *row_shape),
        np.dtype(np.float32),
        lambda start, n: np.full((n, *row_shape), value, np.float32),
    )
