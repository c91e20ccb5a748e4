"""Computes the memory of packed rows and of passes over them; formats byte counts."""

from collections.abc import Sequence
from typing import Final

import jax

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.rows.packed_rows import LANE_BYTES, RowLayout, round_up

_MIN_SLAB_BYTES: Final = 2**16
_MAX_SLAB_BYTES: Final = 2**22
_SLABS_PER_TABLE: Final = 400
"""A pass holds about eight slabs of temporaries, at most 2 % of a table."""


def rows_bytes(layout: RowLayout, hardware: HardwareInfo, itemsize: int) -> int:
    """Returns the memory of one shard's packed rows, in bytes.

    The number of lines is rounded up to whole tiles of the hardware.
    """
    tile_rows = hardware.sublanes
    if layout.is_flat and layout.line_lanes is not None:
        tile_rows *= layout.line_lanes
    return round_up(layout.num_lines, tile_rows) * layout.lanes * itemsize


def array_sizes(
    layout: RowLayout, slots: Sequence[jax.ShapeDtypeStruct], hardware: HardwareInfo
) -> tuple[int, ...]:
    """Returns the memory of one shard's rows and of each slot variable, in bytes.

    Args:
      layout: packing of the table's rows.
      slots: row shape and dtype of each slot variable.
      hardware: kind of device.
    """
    return (
        rows_bytes(layout, hardware, LANE_BYTES),
        *(
            rows_bytes(layout.slot_layout(slot), hardware, slot.dtype.itemsize)
            for slot in slots
        ),
    )


def rows_per_slab(layout: RowLayout) -> int:
    """Returns the rows per block of a pass over all rows of a shard.

    A pass reads or writes some blocks at a time, and nothing larger. Rows take whole
    lines there, as XLA:TPU may lay out an array of short rows.

    Args:
      layout: packing of the rows of one shard.

    Returns:
      A number of rows that fill whole lines; at most all lines of the shard.
    """
    row_bytes = LANE_BYTES * round_up(layout.dim, layout.line_lanes or 1)
    shard_bytes = LANE_BYTES * layout.num_lines * layout.lanes
    slab_bytes = min(_MAX_SLAB_BYTES, shard_bytes // _SLABS_PER_TABLE)
    num_rows = max(_MIN_SLAB_BYTES, slab_bytes) // row_bytes
    num_rows = max(1, num_rows // layout.rows_per_line) * layout.rows_per_line
    return min(num_rows, layout.row_of(layout.num_lines))


def whole_table_init_bytes(num_rows: int, num_shards: int, layout: RowLayout) -> int:
    """Returns the memory of initial values that are computed for all rows at once.

    A device holds its share of the rows twice: before and after they are sent to their
    owners. Rows take whole lines there.

    Args:
      num_rows: rows of the table.
      num_shards: over which the rows are dealt.
      layout: packing of the rows of one shard.
    """
    row_bytes = LANE_BYTES * round_up(layout.dim, layout.line_lanes or 1)
    return 2 * -(-num_rows // num_shards) * row_bytes


def format_bytes(num_bytes: float) -> str:
    """Returns a number of bytes as text, with a binary unit.

    Example:
      >>> format_bytes(3 * 2**20)
      '3.00 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"


def format_table(rows: list[tuple[str, ...]], num_left_aligned: int = 1) -> str:
    """Returns rows of cells as lines of text with aligned columns.

    Args:
      rows: cells by row; the first row is the header. All rows have equal length.
      num_left_aligned: number of leading columns aligned left; the others are aligned
        right.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < num_left_aligned else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
