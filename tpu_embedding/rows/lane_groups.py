"""Reads rows off lines, and puts rows into lines.

A line consists of *lane groups*: neighbouring lanes that hold a row, or two of 16 bits
each per element.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from tpu_embedding.rows.packed_rows import RowLayout


def lane_groups_of(
    row_ids: Int[Array, " ids"], layout: RowLayout
) -> Int[Array, " ids"]:
    """Returns the lane group of each row within its line."""
    return row_ids % layout.rows_per_line % layout.groups_per_line


def shifts_of(row_ids: Int[Array, " ids"], layout: RowLayout) -> Int[Array, " ids"]:
    """Returns the position of the lowest bit of each row in its lanes."""
    if layout.rows_per_lane == 1:
        return jnp.zeros_like(row_ids)
    return row_ids % layout.rows_per_line // layout.groups_per_line * 16


def select_lanes(
    lines: Shaped[Array, "ids lanes"],
    groups: Int[Array, " ids"],
    groups_per_line: int,
    dim: int,
) -> Array:
    """Selects from each line the row of a lane group, by halving the line.

    A selection, not a masked sum: the bits of the row stay the same, whatever its
    neighbours hold.
    """
    if groups_per_line == 1:
        return lines[:, :dim]
    half = 1
    while 2 * half < groups_per_line:
        half *= 2
    low = lines[:, : half * dim]
    high = lines[:, half * dim : groups_per_line * dim]
    high = jnp.pad(high, ((0, 0), (0, low.shape[1] - high.shape[1])))
    is_high = groups >= half
    chosen = jnp.where(is_high[:, None], high, low)
    return select_lanes(chosen, jnp.where(is_high, groups - half, groups), half, dim)


def lines_to_add(
    row_ids: Int[Array, " ids"], values: Array, layout: RowLayout
) -> Array:
    """Returns lines, or single values, that hold each value in the lanes of its row.

    A row of several lines has them one after the other.
    """
    if layout.is_flat:
        return values.reshape(row_ids.shape)
    values = values.reshape(row_ids.shape[0], -1)
    missing = layout.row_lanes - values.shape[1]
    if missing:
        neutral = _neutral(values.dtype)
        values = jnp.pad(values, ((0, 0), (0, missing)), constant_values=neutral)
    return _lines_with(values, lane_groups_of(row_ids, layout), layout)


def _neutral(dtype: Any) -> Any:
    """Returns the number that changes nothing when it is added."""
    return np.asarray(-0.0 if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)


def _lines_with(values: Array, groups: Int[Array, " ids"], layout: RowLayout) -> Array:
    """Returns lines with each row in its lane group, which add nothing to others."""
    if layout.lines_per_row > 1:
        return values.reshape(-1, layout.lanes)
    neutral = _neutral(values.dtype)
    unused_lanes = layout.lanes - layout.groups_per_line * layout.row_lanes
    copies = jnp.tile(values, (1, layout.groups_per_line))
    lines = jnp.pad(copies, ((0, 0), (0, unused_lanes)))
    if layout.groups_per_line == 1:
        return lines
    group_of_lane = jnp.arange(layout.lanes, dtype=jnp.int32) // layout.row_lanes
    return jnp.where(group_of_lane[None, :] == groups[:, None], lines, neutral)
