"""The ids of dynamic tables in a checkpoint: load, ages and uses, without the model.

The ids of a table and what is known of them are on the host for that time: 24 bytes for
each id.
"""

import dataclasses
import os
from typing import Final

import numpy as np

from tpu_embedding.checkpoint.arrays import read_table
from tpu_embedding.checkpoint.dynamic_tables import (
    CLOCK,
    COUNTS,
    IDS,
    LAST_USED,
    NATURAL_ROWS,
)
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.format import describe
from tpu_embedding.dynamic import SLOTS_PER_BUCKET, Dynamic
from tpu_embedding.rows.id_mixing import mix_ids, multiply_high
from tpu_embedding.types import Ids64

QUANTILES: Final = (0.0, 0.5, 0.9, 1.0)
"""Shares of the ids below the ages and uses of `IdStatistics`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdStatistics:
    """Statistics of the ids of a dynamic table.

    Attributes:
      capacity: rows that its config asks for.
      num_places: rows for ids: the capacity, rounded up to whole buckets.
      num_ids: ids that have a row.
      num_buckets: buckets of 64 places.
      num_full_buckets: buckets without an empty place.
      clock: step of the checkpoint.
      ages: clock units since the last use, at `QUANTILES` of the ids; None without ids.
        They count from the clock, or from the last use of all if it is later.
      uses: steps that used an id, at `QUANTILES` of the ids; None without ids.
    """

    capacity: int
    num_places: int
    num_ids: int
    num_buckets: int
    num_full_buckets: int
    clock: int
    ages: tuple[int, ...] | None
    uses: tuple[int, ...] | None

    @property
    def load(self) -> float:
        """Share of the places that ids have."""
        return self.num_ids / self.num_places


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundId:
    """The place of an id in a dynamic table of a checkpoint.

    Attributes:
      id: the id as uint64.
      bucket: bucket that the id belongs to, whether or not it is there.
      ids_in_bucket: ids that have a place in the bucket.
      place: place in the bucket; None: the id is unknown, as are the following.
      row: row of the id in the files.
      last_used: clock of the last use.
      age: clock units since then, as in `IdStatistics`.
      count: steps that used it.
    """

    id: int
    bucket: int
    ids_in_bucket: int
    place: int | None = None
    row: int | None = None
    last_used: int | None = None
    age: int | None = None
    count: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdChanges:
    """The ids that a dynamic table has won and lost between two checkpoints.

    Attributes:
      num_inserted: ids that only the later checkpoint has.
      num_evicted: ids that only the earlier checkpoint has.
      num_kept: ids of both.
    """

    num_inserted: int
    num_evicted: int
    num_kept: int


def id_statistics(directory: str | os.PathLike[str], table: str) -> IdStatistics:
    """Reads the ids of a dynamic table, and summarises them.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.
      table: name of the table in the checkpoint.

    Raises:
      CheckpointError: if the checkpoint has no such table, or a file is damaged.
    """
    dynamic = _dynamic(directory, table)
    buckets = read_table(directory, table, slot=NATURAL_ROWS) // SLOTS_PER_BUCKET
    in_buckets = np.bincount(buckets, minlength=dynamic.num_buckets)
    uses = read_table(directory, table, slot=COUNTS)
    return IdStatistics(
        capacity=dynamic.capacity,
        num_places=dynamic.num_places,
        num_ids=len(buckets),
        num_buckets=dynamic.num_buckets,
        num_full_buckets=int(np.sum(in_buckets == SLOTS_PER_BUCKET)),
        clock=int(read_table(directory, table, slot=CLOCK)),
        ages=_quantiles(_ages(directory, table)),
        uses=_quantiles(uses),
    )


def find_id(directory: str | os.PathLike[str], table: str, word: np.uint64) -> FoundId:
    """Returns where an id lies in a dynamic table.

    Args:
      directory: see `id_statistics`.
      table: name of the table in the checkpoint.
      word: the id.

    Raises:
      CheckpointError: see `id_statistics`.
    """
    dynamic = _dynamic(directory, table)
    words = Ids64.of_array(np.asarray([word]))
    first, _ = mix_ids(np.asarray(words.high), np.asarray(words.low))
    bucket = int(multiply_high(first, dynamic.num_buckets)[0])
    natural_rows = read_table(directory, table, slot=NATURAL_ROWS)
    found = FoundId(
        id=int(word),
        bucket=bucket,
        ids_in_bucket=int(np.sum(natural_rows // SLOTS_PER_BUCKET == bucket)),
    )
    # Ids rise in the files.
    ids = read_table(directory, table, slot=IDS)
    row = int(np.searchsorted(ids, word))
    if row == len(ids) or ids[row] != word:
        return found
    return dataclasses.replace(
        found,
        place=int(natural_rows[row]) % SLOTS_PER_BUCKET,
        row=row,
        last_used=int(read_table(directory, table, slot=LAST_USED)[row]),
        age=int(_ages(directory, table)[row]),
        count=int(read_table(directory, table, slot=COUNTS)[row]),
    )


def id_changes(
    earlier: str | os.PathLike[str], later: str | os.PathLike[str], table: str
) -> IdChanges:
    """Compares the ids of a dynamic table in two checkpoints.

    An id that was evicted and inserted again in between counts as kept.

    Args:
      earlier: directory of a checkpoint; see `id_statistics`.
      later: directory of another one.
      table: name of the table in both.

    Raises:
      CheckpointError: see `id_statistics`.
    """
    before, now = (read_table(x, table, slot=IDS) for x in (earlier, later))
    num_kept = len(np.intersect1d(before, now, assume_unique=True))
    return IdChanges(
        num_inserted=len(now) - num_kept,
        num_evicted=len(before) - num_kept,
        num_kept=num_kept,
    )


def _dynamic(directory: str | os.PathLike[str], table: str) -> Dynamic:
    tables = describe(directory).tables
    record = tables[table].dynamic if table in tables else None
    if record is None:
        names = [name for name, x in tables.items() if x.dynamic is not None]
        raise CheckpointError(
            f"The checkpoint {directory} has no dynamic table {table!r}, only {names}."
        )
    return Dynamic(capacity=record["capacity"])


def _ages(directory: str | os.PathLike[str], table: str) -> np.ndarray:
    last_used = read_table(directory, table, slot=LAST_USED).astype(np.int64)
    clock = int(read_table(directory, table, slot=CLOCK))
    # The caller's clock may run ahead of the count of steps.
    return max(clock, int(last_used.max(initial=0))) - last_used


def _quantiles(values: np.ndarray) -> tuple[int, ...] | None:
    if not values.size:
        return None
    found = np.quantile(values, QUANTILES, method="inverted_cdf")
    return tuple(int(x) for x in found)
