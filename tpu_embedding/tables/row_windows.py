"""Cuts the tables of a stack into blocks of rows, and groups these into windows.

A block is a range of consecutive rows of one table; files hold one block per chunk. A
window is what one device reads or writes in a turn of `row_stream.py`: one block, or
neighbouring blocks of several small tables.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows

_MIN_BLOCK_BYTES: Final = 10 * 2**20
"""A reader of a file needs no smaller part: a request takes as long as 10 MB."""

RowRanges = Mapping[str, tuple[int, int]]
"""Table name to the first row and the end of a range of its rows."""


@dataclasses.dataclass(frozen=True)
class Window:
    """A range of rows of the stack that one device serves in a turn.

    Attributes:
      start: first row in the stack.
      pieces: table, first row and number of rows of the blocks in the range.
    """

    start: int
    pieces: tuple[tuple[str, int, int], ...]

    @property
    def num_rows(self) -> int:
        """Rows of all pieces."""
        return sum(num_rows for _, _, num_rows in self.pieces)


NO_WINDOW: Final = Window(0, ())


def rows_per_block(row_bytes: int) -> int:
    """Returns the rows of a block: a power of two that takes 10 to 20 MB.

    Args:
      row_bytes: bytes of a row in a file.

    Example:
      >>> rows_per_block(row_bytes=128)
      131072
    """
    num_rows = -(-_MIN_BLOCK_BYTES // max(1, row_bytes))
    return 1 << (num_rows - 1).bit_length()


def rows_per_window(packed: PackedRows) -> int:
    """Returns the rows of a block of a stacked table or slot variable."""
    row = file_row(packed)
    return rows_per_block(math.prod(row.shape) * row.dtype.itemsize)


def windows_of(
    packed: PackedRows, stack: StackPlan, ranges: RowRanges | None
) -> list[Window]:
    """Returns the ranges that cover the rows; blocks of small tables share one."""
    if ranges is None:
        ranges = {table.name: (0, table.num_rows) for table in stack.tables}
    _check_ranges(ranges, stack)
    size = rows_per_window(packed)
    windows: list[Window] = []
    for table in stack.tables:
        begin, end = ranges.get(table.name, (0, 0))
        while begin < end:
            num_rows = min(end, (begin // size + 1) * size) - begin
            piece = (table.name, begin, num_rows)
            position = table.row_offset + begin
            last = windows[-1] if windows else NO_WINDOW
            if (
                last.pieces
                and last.start + last.num_rows == position
                and last.num_rows + num_rows <= size
            ):
                windows[-1] = Window(last.start, (*last.pieces, piece))
            else:
                windows.append(Window(position, (piece,)))
            begin += num_rows
    return windows


def _check_ranges(ranges: RowRanges, stack: StackPlan) -> None:
    """Refuses tables of other stacks, and rows that a table lacks."""
    sizes = {table.name: table.num_rows for table in stack.tables}
    unknown = sorted(set(ranges) - set(sizes))
    if unknown:
        raise ValueError(
            f"ranges must name tables of stack {stack.name!r}, {sorted(sizes)}, got "
            f"{unknown}; pass the stack of these tables."
        )
    for name, (begin, end) in ranges.items():
        if not 0 <= begin <= end <= sizes[name]:
            raise ValueError(
                f"ranges must hold rows between 0 and {sizes[name]} for table "
                f"{name!r}, got {begin} to {end}."
            )
