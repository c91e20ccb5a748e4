"""Computes how much memory packed rows take, and formats figures for reports."""

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.rows.packed_rows import RowLayout, round_up


def rows_bytes(layout: RowLayout, hardware: HardwareInfo, itemsize: int) -> int:
    """Counts the bytes that one shard takes on a device, padded to whole tiles."""
    tile_rows = hardware.sublanes
    # A TPU also stores a flat array in whole two-dimensional tiles.
    if layout.is_flat and layout.tile_lanes is not None:
        tile_rows *= layout.tile_lanes
    return round_up(layout.num_lines, tile_rows) * layout.lanes_per_line * itemsize


def format_bytes(num_bytes: float) -> str:
    """Formats a byte count with a binary unit.

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
    """Aligns cells in columns: the first few to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < num_left_aligned else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
