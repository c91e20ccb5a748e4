"""Decides whether the columns of a table lie in several arrays.

A SparseCore is said to take arrays up to `max_offloaded_bytes`; what a chip does with a
larger one was not tried. A stack above that is split by tables, which leaves single
tables that are larger. Their lines are cut into parts of `_LANES` lanes, and the parts
of the same columns lie in an array of their own. Slot variables as wide as a float32
table are cut alike. Rows are joined where they are read, and cut where they are written
(`rows/packed_rows.py`). So the exchange, the optimizer's rule and all files see whole
rows.
"""

import dataclasses
from typing import Final

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan import memory
from tpu_embedding.rows.packed_rows import LANE_BYTES, RowLayout

_LANES: Final = 128
"""Lanes of each array: the fewest that XLA:TPU stores row by row."""


def with_column_arrays(layout: RowLayout, hardware: HardwareInfo) -> RowLayout:
    """Returns the layout whose arrays are within the limit, if there is one.

    Args:
      layout: packing of the rows of one shard, in one array that XLA reads.
      hardware: kind of device.
    """
    if fits_in_one_array(layout, hardware):
        return layout
    if whole_lines_reason(layout, hardware) is not None:
        return layout
    return dataclasses.replace(layout, column_arrays=layout.lanes // _LANES)


def fits_in_one_array(
    layout: RowLayout, hardware: HardwareInfo, itemsize: int = LANE_BYTES
) -> bool:
    """Returns True if whole lines are within the limit, or there is none.

    Args:
      layout: packing of the rows of one shard.
      hardware: kind of device.
      itemsize: bytes of a lane.
    """
    limit = hardware.max_offloaded_bytes
    return limit is None or memory.rows_bytes(layout, hardware, itemsize) <= limit


def whole_lines_reason(layout: RowLayout, hardware: HardwareInfo) -> str | None:
    """Says why lines that are too large for one array stay whole; None: they do not.

    Args:
      layout: packing of the rows of one shard, in one array.
      hardware: kind of device.
    """
    if layout.narrow_dtype is not None:
        return f"rows of {layout.narrow_dtype} are never cut"
    if layout.dim % _LANES or layout.dim <= _LANES:
        return f"its dim, {layout.dim}, is no multiple of {_LANES} above {_LANES}"
    part = dataclasses.replace(layout, row_shape=(_LANES,))
    if not fits_in_one_array(part, hardware):
        num_bytes = memory.rows_bytes(part, hardware, LANE_BYTES)
        return f"even {_LANES} columns take {memory.format_bytes(num_bytes)}"
    return None
