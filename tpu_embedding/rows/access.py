"""Reads and changes rows of packed arrays: gather, add, replace, update. Per shard.

Each function works on the rows of one shard and communicates nothing.
`PackedRows.kernels` names the accesses that kernels make; XLA makes the others. Kernels
are imported where one is built, because they need Pallas.

A kernel moves wide lines in whole tiles, and writes the values of padding ids to a
spare row. Tables and slot variables have room for both (`with_room_for_kernels`).
Exchange buffers have none, and nothing adds to their rows by a kernel.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from tpu_embedding.rows.kernels.kernel_access import (
    KernelBackend,
    KernelBody,
    RowAccess,
)
from tpu_embedding.rows.kernels.kernel_limits import TILE_LINES
from tpu_embedding.rows.lane_places import (
    lines_to_add,
    places_of,
    select_lanes,
    shifts_of,
)
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    gather_in_bounds,
    join_columns,
    keep_rows,
    load_rows,
    pack_rows,
    round_up,
    store_rows,
    unpack_rows,
)

_KERNEL_ID_ALIGNMENT: Final = 128
"""Kernels take ids in multiples of this; padding fills them up."""

_VECTOR_STEPS: Final = {32: 3, 64: 1}
"""Row length to the operations per element that keep XLA:CPU from unrolling a copy."""

_MAX_LOST_ROUNDINGS: Final = 8
"""Rounding steps of a new value that `replace_rows` may lose; a moving average loses
one."""


def with_room_for_kernels(layout: RowLayout) -> RowLayout:
    """Adds the lines that kernels need to change rows: a spare row, in whole tiles."""
    num_lines = -(-(layout.num_rows + 1) // layout.rows_per_line)
    if layout.lanes != 128:
        num_lines = round_up(num_lines, TILE_LINES)
    used_lines = layout.resized(layout.num_rows).num_lines
    return dataclasses.replace(layout, spare_lines=num_lines - used_lines)


def gather_rows(packed: PackedRows, row_ids: Int[Array, " ids"]) -> Array:
    """Reads rows.

    Args:
      packed: the rows of this shard.
      row_ids: rows to read. Ids beyond the last row, padding among them, read the
        last row; their result must not be used.

    Returns:
      `[ids, *row_shape]`: narrow rows as float32, others in the array's dtype.
    """
    return unpack_rows(gather_packed(packed, row_ids))


def gather_packed(packed: PackedRows, row_ids: Int[Array, " ids"]) -> PackedRows:
    """Reads rows like `gather_rows`, and leaves them packed as the backend wrote them.

    Returns:
      The rows in `packed.buffer_layout(ids)`; narrow rows as float32.
    """
    layout, kernels = packed.layout, packed.kernels
    (num_ids,) = row_ids.shape
    result = packed.buffer_layout(num_ids)
    row_ids = jnp.minimum(row_ids, layout.num_rows - 1)
    backend = _kernel_backend(packed, "read")
    if backend is not None and num_ids > 0:
        from tpu_embedding.rows.kernels.row_kernels import read_rows

        row_ids = jnp.pad(row_ids, (0, -num_ids % _KERNEL_ID_ALIGNMENT))
        (lines,) = read_rows(_full_tiles(packed), row_ids, layout.dim, backend)
        lines = lines[: result.num_lines]
        return PackedRows(lines=lines, layout=result, kernels=kernels)
    rows = load_rows(_gather_stored(packed, row_ids), layout)
    return pack_rows(rows, result, kernels)


def gather_sums(
    packed: PackedRows,
    row_ids: Int[Array, " ids"],
    sizes: Sequence[int],
    valences: Sequence[int],
    backend: KernelBackend,
) -> list[Float[Array, "_ dim"]]:
    """Reads rows and sums them within a kernel, so each sum is written to HBM once.

    Args:
      packed: rows that a kernel reaches, one per line.
      row_ids: ids of one group after the other. Within a group come the first ids of
        all sums, then the second ids, and so on.
      sizes: number of sums of each group, a multiple of 8.
      valences: number of rows that each sum of a group adds.
      backend: runs the kernel.

    Returns:
      `[size, dim]` for each group.
    """
    from tpu_embedding.rows.kernels.row_kernels import read_rows

    layout = packed.layout
    assert layout.rows_per_line == 1
    return read_rows(
        _full_tiles(packed),
        jnp.minimum(row_ids, layout.num_rows - 1),
        layout.dim,
        backend,
        sizes=sizes,
        valences=valences,
    )


def add_to_rows(
    packed: PackedRows, row_ids: Int[Array, " ids"], values: Array
) -> PackedRows:
    """Adds to rows, in place where the caller donated them.

    All other rows keep their bits. XLA adds -0.0 to rows that share a line with a
    named row: the only float that changes nothing. (A device that flushes denormals
    to zero flushes those of such neighbours.)

    Args:
      packed: the rows of this shard.
      row_ids: rows to change, each at most once; ids beyond the last row are dropped.
      values: `[ids, *row_shape]`, or the lines of these.
    """
    assert packed.layout.narrow_dtype is None, "words are no numbers to add to"
    values = values.astype(packed.lines_dtype)
    backend = _kernel_backend(packed, "add")
    if backend is not None and row_ids.shape[0] > 0:
        return _add_by_kernel(packed, row_ids, values, backend)
    return _add_to_stored(packed, row_ids, values)


def replace_stored_rows(
    packed: PackedRows, row_ids: Int[Array, " ids"], stored: Int[Array, "ids lanes"]
) -> PackedRows:
    """Replaces narrow rows in place; other rows keep their bits.

    The difference between new and old bits is added, shifted to the bits of the row.
    Additions of int32 wrap around, so the result is exact, and rows in the same lanes
    keep theirs: `(new - old) << 16` added to `(old << 16) + other` carries nothing.

    Args:
      packed: the rows of this shard.
      row_ids: rows to change, each at most once; ids beyond the last row are dropped.
      stored: the new rows, from `encode_rows`.
    """
    layout = packed.layout
    old = _gather_stored(packed, jnp.minimum(row_ids, layout.num_rows - 1))
    difference = (stored - old) << shifts_of(row_ids, layout)[:, None]
    return _add_to_stored(packed, row_ids, difference)


def _add_to_stored(
    packed: PackedRows, row_ids: Int[Array, " ids"], values: Array
) -> PackedRows:
    """Adds to the lanes of rows by XLA's scatter."""
    layout = packed.layout
    is_used = row_ids < layout.num_rows
    # Lines beyond the last are dropped. Each gets its own number, so ids stay unique.
    # In a table of 2**31 lines the numbers wrap to negative ones: dropped as well.
    dropped = layout.num_lines + jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    line_ids = jnp.where(is_used, row_ids // layout.rows_per_line, dropped)
    if layout.column_arrays > 1:
        # XLA would compute each part on its own, and round otherwise than whole rows.
        values = jax.lax.optimization_barrier(values)
    parts = layout.split_columns(lines_to_add(row_ids, values, layout))
    return packed.with_arrays(
        [
            lines.at[line_ids].add(
                part,
                mode="drop",
                unique_indices=layout.rows_per_line == 1,
                wrap_negative_indices=False,
            )
            for lines, part in zip(packed.arrays, parts, strict=True)
        ]
    )


def add_repeatedly(
    packed: PackedRows, row_ids: Int[Array, " ids"], values: Array
) -> PackedRows:
    """Adds to rows of which some are named several times, in place.

    Args:
      packed: the rows.
      row_ids: in rising order; ids beyond the last row are dropped.
      values: `[ids, *row_shape]`.
    """
    layout = packed.layout
    is_used = row_ids < layout.num_rows
    line_ids = jnp.where(is_used, row_ids // layout.rows_per_line, layout.num_lines)
    lines = packed.lines.at[line_ids].add(
        lines_to_add(row_ids, values, layout),
        mode="drop",
        indices_are_sorted=True,
        wrap_negative_indices=False,
    )
    return dataclasses.replace(packed, lines=lines)


def replace_rows(
    packed: PackedRows, row_ids: Int[Array, " ids"], old: Array, new: Array
) -> PackedRows:
    """Replaces the values of rows by adding the difference, in place.

    A TPU runs additions on SparseCore, and packed rows can only be added to.
    `old + (new - old)` equals `new` up to rounding, unless a value drops by orders of
    magnitude, such as a slot after an outlier. In that case the remainder is added too.
    A value that no difference moves, such as NaN, is cleared first.

    Args:
      packed: the rows of this shard.
      row_ids: see `add_to_rows`.
      old: the present values, `[ids, *row_shape]`, or the lines of these.
      new: the new values, of the same shape.
    """
    if not jnp.issubdtype(new.dtype, jnp.floating):
        return add_to_rows(packed, row_ids, new - old)
    packed, old = _clear_stuck_values(packed, row_ids, old, new)
    difference = row_differences(old, new)
    packed = add_to_rows(packed, row_ids, difference)
    remainder = row_differences(old + difference, new)
    lost_fraction = _MAX_LOST_ROUNDINGS * float(jnp.finfo(new.dtype).eps)
    is_lost = jnp.abs(remainder) > lost_fraction * jnp.abs(new)
    is_lost = pack_rows(is_lost, packed.buffer_layout(row_ids.shape[0]))
    is_lost = keep_rows(is_lost, row_ids < packed.layout.num_rows)
    # A loop of at most one turn: XLA:TPU copies the rows for a conditional.
    _, packed = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros((), bool), add_to_rows(carry[1], row_ids, remainder)),
        (jnp.any(is_lost.lines), packed),
    )
    return packed


def row_differences(old: Array, new: Array) -> Array:
    """Returns `new - old`, and 0 for equal infinities, whose difference is NaN."""
    return jnp.where(new == old, jnp.zeros((), new.dtype), new - old)


def _clear_stuck_values(
    packed: PackedRows, row_ids: Int[Array, " ids"], old: Array, new: Array
) -> tuple[PackedRows, Array]:
    """Sets values to zero that adding a difference cannot replace, in place.

    These are NaN and infinite values, and those whose difference overflows. No line may
    be set twice at once. So the rows at one place of all lines are cleared together,
    one place after the other. If nothing is stuck, no line is read.

    Args:
      packed: the rows of this shard.
      row_ids: see `add_to_rows`.
      old: the present values, see `replace_rows`.
      new: the new values.

    Returns:
      The rows, and their present values.
    """
    layout = packed.layout
    is_stuck = ~jnp.isfinite(row_differences(old, new)) & ~jnp.isnan(new)
    old = jnp.where(is_stuck, jnp.zeros((), old.dtype), old)
    stuck = pack_rows(is_stuck, packed.buffer_layout(row_ids.shape[0]))
    stuck = keep_rows(stuck, row_ids < layout.num_rows)
    dropped = layout.num_lines + jnp.arange(row_ids.shape[0], dtype=jnp.int32)

    def clear(place: Array, packed: PackedRows) -> PackedRows:
        is_due = (row_ids < layout.num_rows) & (row_ids % layout.rows_per_line == place)
        line_ids = jnp.where(is_due, row_ids // layout.rows_per_line, 0)
        lines = join_columns([gather_in_bounds(x, line_ids) for x in packed.arrays])
        is_stuck = lines_to_add(row_ids, unpack_rows(stuck).astype(lines.dtype), layout)
        lines = jnp.where(is_stuck > 0, jnp.zeros((), lines.dtype), lines)
        line_ids = jnp.where(is_due, line_ids, dropped)
        return _set_lines(packed, line_ids, lines)

    num_turns = jnp.where(jnp.any(stuck.lines), layout.rows_per_line, 0)
    return jax.lax.fori_loop(0, num_turns, clear, packed), old


def update_packed(
    body: KernelBody,
    arrays: Sequence[PackedRows],
    row_ids: Int[Array, " ids"],
    gradients: PackedRows,
    scalars: Sequence[Array],
    row_scalars: Sequence[Float[Array, " ids"]],
) -> tuple[list[PackedRows], list[Array]]:
    """Runs an optimizer rule on rows within one kernel, in place.

    All other rows keep their bits.

    Args:
      body: the part of the rule that runs on rows; see `update_rows`.
      arrays: the table and its slot variables. Kernels reach them all.
      row_ids: see `add_to_rows`.
      gradients: one for each id; ids beyond the last row may have any.
      scalars: float32 values that belong to no row, such as the learning rate.
      row_scalars: per array of one value per row: the values of the rows of the ids.

    Returns:
      The arrays with new rows, and the new `row_scalars`.
    """
    from tpu_embedding.rows.kernels.row_kernels import update_rows

    layout, kernels = arrays[0].layout, arrays[0].kernels
    (num_ids,) = row_ids.shape
    if num_ids == 0:
        return list(arrays), list(row_scalars)
    assert kernels is not None
    row_ids, lines = _pad_for_kernel(layout, row_ids, gradients)
    missing = row_ids.shape[0] - num_ids
    changed, new_row_scalars = update_rows(
        body,
        [packed.lines for packed in arrays],
        row_ids,
        lines,
        layout.dim,
        scalars,
        kernels.backend,
        row_scalars=[jnp.pad(value, (0, missing)) for value in row_scalars],
    )
    return (
        [
            dataclasses.replace(packed, lines=lines)
            for packed, lines in zip(arrays, changed, strict=True)
        ],
        [value[:num_ids] for value in new_row_scalars],
    )


def _kernel_backend(packed: PackedRows, access: RowAccess) -> KernelBackend | None:
    """Returns the backend of the kernel that makes an access; None: XLA makes it."""
    kernels = packed.kernels
    return kernels.backend if kernels and access in kernels.accesses else None


def _add_by_kernel(
    packed: PackedRows,
    row_ids: Int[Array, " ids"],
    values: Array,
    backend: KernelBackend,
) -> PackedRows:
    """Adds as `add_to_rows` does; ids beyond the last row add to the spare row."""
    from tpu_embedding.rows.kernels.row_kernels import add_rows

    layout = packed.layout
    additions = pack_rows(values, packed.buffer_layout(row_ids.shape[0]))
    row_ids, lines = _pad_for_kernel(layout, row_ids, additions)
    lines = add_rows(packed.lines, row_ids, lines, layout.dim, backend)
    return dataclasses.replace(packed, lines=lines)


def _pad_for_kernel(
    layout: RowLayout, row_ids: Int[Array, " ids"], values: PackedRows
) -> tuple[Int[Array, " padded_ids"], Array]:
    """Pads ids and the lines of their values to the multiple that kernels take.

    Padding ids name the spare row.
    """
    has_spare_row = layout.num_lines * layout.rows_per_line > layout.num_rows
    assert has_spare_row, "a kernel would write padding to a row"
    missing = -row_ids.shape[0] % _KERNEL_ID_ALIGNMENT
    row_ids = jnp.minimum(row_ids, layout.num_rows)
    row_ids = jnp.pad(row_ids, (0, missing), constant_values=layout.num_rows)
    num_lines = layout.buffer_layout(row_ids.shape[0], is_packed=True).num_lines
    missing_lines = num_lines - values.lines.shape[0]
    return row_ids, jnp.pad(values.lines, ((0, missing_lines), (0, 0)))


def _full_tiles(packed: PackedRows) -> Array:
    """Pads wide lines to whole tiles, which a kernel moves."""
    if packed.layout.lanes <= 128:
        return packed.lines
    missing = -packed.lines.shape[0] % TILE_LINES
    return jnp.pad(packed.lines, ((0, missing), (0, 0)))


def _gather_stored(
    packed: PackedRows, row_ids: Int[Array, " ids"]
) -> Shaped[Array, "ids _"]:
    """Reads rows as they are stored, by XLA; all ids must be in bounds."""
    layout = packed.layout
    line_ids = row_ids // layout.rows_per_line
    lines = join_columns([gather_in_bounds(x, line_ids) for x in packed.arrays])
    if layout.lanes in _VECTOR_STEPS and lines.dtype == jnp.float32:
        lines = jax.lax.platform_dependent(lines, cpu=_in_vectors, default=lambda x: x)
    if layout.is_flat:
        rows = lines[:, None]
    else:
        places = places_of(row_ids, layout)
        rows = select_lanes(lines, places, layout.places_per_line, layout.row_lanes)
    if layout.rows_per_lane == 1:
        return rows
    return (rows >> shifts_of(row_ids, layout)[:, None]) & 0xFFFF


def _in_vectors(lines: Float[Array, "ids lanes"]) -> Float[Array, "ids lanes"]:
    """Bounds the bits of gathered rows by those of all int32, which changes none.

    XLA:CPU (jax 0.12) unrolls the copy of a row of up to 64 floats to single elements.
    So many instructions per row leave few reads of memory in flight. A loop with enough
    operations per element is not unrolled: it reads and writes vectors, in a third of
    the time. The barrier hides the bounds from XLA. Rows of 24 or 48 floats gain
    nothing, shorter ones take longer, and longer ones are copied in vectors anyway.
    """
    int32 = jnp.iinfo(jnp.int32)
    low, high = jax.lax.optimization_barrier(
        (jnp.int32(int32.min), jnp.int32(int32.max))
    )
    words = jax.lax.bitcast_convert_type(lines, jnp.int32)
    for step in range(_VECTOR_STEPS[lines.shape[1]]):
        words = jnp.minimum(words, high) if step % 2 else jnp.maximum(words, low)
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def set_rows(
    packed: PackedRows, row_ids: Int[Array, " ids"], values: Array
) -> PackedRows:
    """Sets rows to given values, in place where the caller donated them.

    Rows that share a line are set by two additions: of the negated old value, which
    leaves exactly 0, and of the new value. NaN and infinite values are cleared first.

    Args:
      packed: the rows of this shard.
      row_ids: rows to set, each at most once; ids beyond the last row are dropped.
      values: `[ids, *row_shape]`; narrow rows are rounded to nearest.
    """
    layout = packed.layout
    (num_ids,) = row_ids.shape
    if layout.narrow_dtype is not None:
        stored = store_rows(values.reshape(num_ids, layout.dim), layout)
        return replace_stored_rows(packed, row_ids, stored)
    if layout.rows_per_line > 1:
        old = gather_rows(packed, row_ids)
        if jnp.issubdtype(old.dtype, jnp.floating):
            zeros = jnp.zeros_like(old)
            packed, old = _clear_stuck_values(packed, row_ids, old, zeros)
        return add_to_rows(add_to_rows(packed, row_ids, -old), row_ids, values)
    values = values.reshape(num_ids, layout.dim).astype(packed.lines_dtype)
    lines = values[:, 0] if layout.is_flat else _in_whole_lines(values, layout)
    line_ids = jnp.where(row_ids < layout.num_rows, row_ids, layout.num_lines)
    return _set_lines(packed, line_ids, lines)


def _set_lines(packed: PackedRows, line_ids: Array, lines: Array) -> PackedRows:
    """Sets lines, each at most once; those beyond the last are dropped."""
    parts = packed.layout.split_columns(lines)
    return packed.with_arrays(
        [
            array.at[line_ids].set(part, mode="drop", wrap_negative_indices=False)
            for array, part in zip(packed.arrays, parts, strict=True)
        ]
    )


def _in_whole_lines(values: Array, layout: RowLayout) -> Array:
    """Fills rows up to the lanes of a line."""
    return jnp.pad(values, ((0, 0), (0, layout.lanes - layout.dim)))
