"""Places of rows within lines: reads rows off lines, and puts rows into lines."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from tpu_embedding.rows.packed_rows import RowLayout


def places_of(row_ids: Int[Array, " ids"], layout: RowLayout) -> Int[Array, " ids"]:
    """Returns the place of each row in its line."""
    return row_ids % layout.rows_per_line % layout.places_per_line


def shifts_of(row_ids: Int[Array, " ids"], layout: RowLayout) -> Int[Array, " ids"]:
    """Returns the position of the lowest bit of each row in its lanes."""
    if layout.rows_per_lane == 1:
        return jnp.zeros_like(row_ids)
    return row_ids % layout.rows_per_line // layout.places_per_line * 16


def select_lanes(
    lines: Shaped[Array, "ids lanes"],
    places: Int[Array, " ids"],
    places_per_line: int,
    dim: int,
) -> Array:
    """Selects from each line the row at its place, by halving the line.

    A selection, not a masked sum: the bits of the row stay the same, whatever its
    neighbours hold.
    """
    if places_per_line == 1:
        return lines[:, :dim]
    half = 1
    while 2 * half < places_per_line:
        half *= 2
    low = lines[:, : half * dim]
    high = lines[:, half * dim : places_per_line * dim]
    high = jnp.pad(high, ((0, 0), (0, low.shape[1] - high.shape[1])))
    is_high = places >= half
    chosen = jnp.where(is_high[:, None], high, low)
    return select_lanes(chosen, jnp.where(is_high, places - half, places), half, dim)


def lines_to_add(
    row_ids: Int[Array, " ids"], values: Array, layout: RowLayout
) -> Array:
    """Returns lines, or single values, that hold each value at the place of its row.

    A row of several lines has them one after the other.
    """
    if layout.is_flat:
        return values.reshape(row_ids.shape)
    values = values.reshape(row_ids.shape[0], -1)
    missing = layout.row_lanes - values.shape[1]
    if missing:
        neutral = _neutral(values.dtype)
        values = jnp.pad(values, ((0, 0), (0, missing)), constant_values=neutral)
    return _place_in_lines(values, places_of(row_ids, layout), layout)


def _neutral(dtype: Any) -> Any:
    """Returns the number that changes nothing when it is added."""
    return np.asarray(-0.0 if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)


def _place_in_lines(
    values: Array, places: Int[Array, " ids"], layout: RowLayout
) -> Array:
    """Puts each row at its place in a line that adds nothing to its other rows."""
    if layout.lines_per_row > 1:
        return values.reshape(-1, layout.lanes)
    neutral = _neutral(values.dtype)
    unused_lanes = layout.lanes - layout.places_per_line * layout.row_lanes
    copies = jnp.tile(values, (1, layout.places_per_line))
    lines = jnp.pad(copies, ((0, 0), (0, unused_lanes)))
    if layout.places_per_line == 1:
        return lines
    place_of_lane = jnp.arange(layout.lanes, dtype=jnp.int32) // layout.row_lanes
    return jnp.where(place_of_lane[None, :] == places[:, None], lines, neutral)
