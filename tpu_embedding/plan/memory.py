"""Computes the memory of packed rows, and formats byte counts and tables of text."""

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.rows.packed_rows import RowLayout, round_up


def rows_bytes(layout: RowLayout, hardware: HardwareInfo, itemsize: int) -> int:
    """Returns the memory of one shard's packed rows, in bytes.

    The number of lines is rounded up to whole tiles of the hardware.
    """
    tile_rows = hardware.sublanes
    if layout.is_flat and layout.tile_lanes is not None:
        tile_rows *= layout.tile_lanes
    return round_up(layout.num_lines, tile_rows) * layout.lanes_per_line * itemsize


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
      rows: cells by row; the first row is the header. All rows have the same number of
        cells.
      num_left_aligned: number of leading columns to align left. The rest align right.
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
