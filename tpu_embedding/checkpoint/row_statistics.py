"""Statistics of the rows of a checkpoint: norms, and rows that were never touched.

The files are read chunk by chunk, without devices or a plan. Memory stays bounded: one
chunk, a histogram of norms, and one bit per row.
"""

import dataclasses
import os
from typing import Final

import numpy as np

from tpu_embedding.checkpoint.arrays import iterate_rows
from tpu_embedding.checkpoint.format import TableRecord, describe

_BIN_SHIFT: Final = 12
"""Bins of norms share the upper 20 bits of a float32: they are 2**-11 wide at most."""

_LARGEST: Final = np.finfo(np.float32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormHistogram:
    """The Euclidean norms of the rows of a table.

    Attributes:
      counts: int64 `[2**19]`, rows by the upper bits of their norm as a float32.
      minimum: smallest norm.
      maximum: largest norm. Rows with a NaN or an infinite value do not count.
    """

    counts: np.ndarray
    minimum: float
    maximum: float

    @property
    def median(self) -> float:
        """Median of the norms, to 3 digits."""
        below = np.searchsorted(np.cumsum(self.counts), (self.counts.sum() + 1) // 2)
        middle = np.asarray([below << _BIN_SHIFT | 1 << (_BIN_SHIFT - 1)], np.uint32)
        return min(max(float(middle.view(np.float32)[0]), self.minimum), self.maximum)

    def in_bins(self, edges: np.ndarray) -> np.ndarray:
        """Returns the rows between neighbouring edges, int64 `[edges - 1]`."""
        (used,) = np.nonzero(self.counts)
        norms = (used.astype(np.uint32) << _BIN_SHIFT).view(np.float32)
        # A bin starts below its smallest norm, and the first edge is a norm.
        norms = np.clip(norms, self.minimum, self.maximum)
        return np.histogram(norms, edges, weights=self.counts[used])[0].astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableStatistics:
    """Statistics of one table.

    Attributes:
      norms: norms of the rows; None if all values are NaN or infinite.
      num_not_finite: rows that hold a NaN or an infinite value.
      num_untouched: rows whose slot variables all hold their initial values; None if
        that cannot be told. A row that got gradients of zero only may be among them.
      why_not: reason why it cannot be told, or "".
    """

    norms: NormHistogram | None
    num_not_finite: int
    num_untouched: int | None
    why_not: str


def table_statistics(directory: str | os.PathLike[str], table: str) -> TableStatistics:
    """Reads a table and its slot variables, and summarises their rows.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.
      table: name of the table in the checkpoint.

    Raises:
      CheckpointError: if the table is not in the checkpoint, or a file is damaged.
    """
    norms, num_not_finite = _norms(directory, table)
    record = describe(directory).tables[table]
    slots = comparable_slots(record)
    num_untouched, why_not = None, ""
    if slots:
        num_untouched = _count_untouched(directory, table, record, slots)
    elif any(slot.chunk_rows is not None for slot in record.slots.values()):
        why_not = "initial values of its slot variables differ, or are not known"
    else:
        why_not = "it has no slot variables with rows"
    return TableStatistics(
        norms=norms,
        num_not_finite=num_not_finite,
        num_untouched=num_untouched,
        why_not=why_not,
    )


def comparable_slots(record: TableRecord) -> dict[str, float]:
    """Returns the initial value of each slot variable with rows; {} if one has none.

    A row may have moved in that one only.
    """
    slots = {k: x for k, x in record.slots.items() if x.chunk_rows is not None}
    values = {k: x.initial for k, x in slots.items() if x.initial is not None}
    return values if len(values) == len(slots) else {}


def row_norms(rows: np.ndarray) -> np.ndarray:
    """Returns the Euclidean norm of each row, float64 `[rows]`.

    Args:
      rows: `[rows, dim]` of any floating type.
    """
    wide = rows.astype(np.float64)
    return np.sqrt(np.einsum("ij,ij->i", wide, wide))


def _norms(
    directory: str | os.PathLike[str], table: str
) -> tuple[NormHistogram | None, int]:
    counts = np.zeros(2 ** (31 - _BIN_SHIFT), np.int64)
    minimum, maximum, num_not_finite = np.inf, -np.inf, 0
    for _, rows in iterate_rows(directory, table):
        norms = row_norms(rows)
        is_finite = np.isfinite(norms)
        num_not_finite += int(np.sum(~is_finite))
        norms = norms[is_finite]
        if not norms.size:
            continue
        minimum = min(minimum, float(norms.min()))
        maximum = max(maximum, float(norms.max()))
        bits = np.minimum(norms, _LARGEST).astype(np.float32).view(np.uint32)
        counts += np.bincount(bits >> _BIN_SHIFT, minlength=len(counts))
    if maximum < minimum:
        return None, num_not_finite
    histogram = NormHistogram(counts=counts, minimum=minimum, maximum=maximum)
    return histogram, num_not_finite


def _count_untouched(
    directory: str | os.PathLike[str],
    table: str,
    record: TableRecord,
    slots: dict[str, float],
) -> int:
    # One bit per row. Chunks of the slot variables have different numbers of rows.
    untouched = np.packbits(np.ones(record.vocabulary_size, bool))
    for slot, initial in slots.items():
        for start, rows in iterate_rows(directory, table, slot=slot):
            is_initial = rows == np.asarray(initial, rows.dtype)
            first, end = start // 8, -(-(start + len(rows)) // 8)
            window = np.unpackbits(untouched[first:end])
            at = start - 8 * first
            window[at : at + len(rows)] &= is_initial.reshape(len(rows), -1).all(axis=1)
            untouched[first:end] = np.packbits(window)
    return int(np.bitwise_count(untouched).sum())
