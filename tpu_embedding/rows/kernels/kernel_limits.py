"""Limits of the kernels: rows that they cannot reach, and rules that have no room.

The plan chooses backends by them, without Pallas.
"""

import math
from typing import Final

from tpu_embedding.hardware import GIBIBYTE

TILE_LINES: Final = 8
"""Lines of a tile, the unit in which a TPU stores lines of more than 128 lanes."""

ID_ALIGNMENT: Final = 8
"""Kernels take ids in multiples of this: subcores move 32 bytes of ids at a time."""

MAX_ARRAYS: Final = 16
"""Maximum arrays that one kernel updates, so that a subcore holds some rows of each."""

_MIN_ROW_BYTES: Final = 32
"""Minimum size of a row. A SparseCore addresses 32 bytes at a time, so a write to a
shorter row would touch its neighbour (`dma_granule_size_bytes` in JAX's
`jax/_src/tpu_info.py`)."""

_MAX_ARRAY_BYTES: Final = 16 * GIBIBYTE
"""Maximum size of an array that a SparseCore addresses; XLA refuses larger ones."""

BUFFER_BYTES: Final = 64 * 1024
"""Maximum size of one row buffer. A subcore has at least 256 KiB of memory."""

UPDATE_BUFFERS_BYTES: Final = 192 * 1024
"""Maximum size of all buffers of an update: gradients, table and slot variables."""


def unreachable_reason(num_rows: int, dim: int, line_lanes: int | None) -> str | None:
    """Says why no kernel can read or change rows; None: kernels can.

    Args:
      num_rows: rows per device.
      dim: elements of a row, float32.
      line_lanes: lanes of the lines that rows are packed into; None: a line is a row.

    Example:
      >>> unreachable_reason(1000, 100, line_lanes=128)
      'rows of dim 100 do not fill lines of 128 lanes'
      >>> unreachable_reason(1000, 64, line_lanes=128) is None
      True
    """
    if line_lanes != 128:
        return "rows are not packed into lines of 128 lanes on this device"
    if 4 * dim < _MIN_ROW_BYTES:
        return (
            f"rows of dim {dim} are shorter than the {_MIN_ROW_BYTES} bytes that a "
            "SparseCore addresses"
        )
    if 128 % dim and dim % 128:
        return f"rows of dim {dim} do not fill lines of 128 lanes"
    num_bytes = 4 * (num_rows + TILE_LINES) * dim  # With the spare rows of a table.
    if num_bytes > _MAX_ARRAY_BYTES:
        return (
            f"{math.ceil(10 * num_bytes / GIBIBYTE) / 10} GiB per device are more than "
            f"the {_MAX_ARRAY_BYTES // GIBIBYTE} GiB that a SparseCore addresses"
        )
    return None


def no_room_reason(dim: int, num_arrays: int, num_row_scalars: int) -> str | None:
    """Says why a subcore has no room for whole rows, tile by tile; None: it has.

    Rules that sum over rows, or keep one value per row, need whole rows.

    Args:
      dim: elements of a row.
      num_arrays: arrays that are updated, the table and slot variables with rows.
      num_row_scalars: slot variables with one value per row.

    Example:
      >>> no_room_reason(4096, num_arrays=2, num_row_scalars=0)
      '8 rows of dim 4096 take 128 KiB, more than the 64 KiB buffer of a subcore'
    """
    row_bytes = 4 * TILE_LINES * dim
    if row_bytes > BUFFER_BYTES:
        return (
            f"{TILE_LINES} rows of dim {dim} take {-(-row_bytes // 1024)} KiB, more "
            f"than the {BUFFER_BYTES // 1024} KiB buffer of a subcore"
        )
    all_bytes = row_bytes * (1 + num_arrays) + 4 * TILE_LINES * num_row_scalars
    if all_bytes > UPDATE_BUFFERS_BYTES:
        return (
            f"{TILE_LINES} rows of dim {dim} of {num_arrays} arrays and of their "
            f"gradient take {-(-all_bytes // 1024)} KiB, more than the "
            f"{UPDATE_BUFFERS_BYTES // 1024} KiB buffers of a subcore"
        )
    return None
