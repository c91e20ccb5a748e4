"""Cuts tables into blocks of rows, and moves their lines between devices.

A block is a range of rows in one table, which a file stores as one chunk. A window is
what one device serves in a turn of `row_stream.py`: one block, or neighboring blocks
from small tables. The ranges are arguments of `read_lines` and `write_lines`, so all
stacks that are packed alike share these compiled programs.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout, round_up

_MIN_BLOCK_BYTES: Final = 10 * 2**20
"""Smaller blocks don't help, because a request takes as long as reading 10 MB."""


class Block(NamedTuple):
    """A block, which begins at `start` in its table and at `position` in its window."""

    table: str
    start: int
    num_rows: int
    position: int


@dataclasses.dataclass(frozen=True)
class Window:
    """A range of stack rows that one device serves in a turn.

    `num_rows` includes unused rows between two tables.
    """

    start: int = 0
    num_rows: int = 0
    blocks: tuple[Block, ...] = ()


NO_WINDOW: Final = Window()


def rows_per_block(row_bytes: int) -> int:
    """Finds the row count, a power of two, that takes 10 to 20 MB in a file.

    Example:
      >>> rows_per_block(row_bytes=128)
      131072
    """
    num_rows = -(-_MIN_BLOCK_BYTES // max(1, row_bytes))
    return 1 << (num_rows - 1).bit_length()


def rows_per_window(packed: PackedRows) -> int:
    row = file_row(packed)
    return rows_per_block(math.prod(row.shape) * row.dtype.itemsize)


def windows_of(
    packed: PackedRows, stack: StackPlan, num_rows: Mapping[str, int] | None
) -> list[Window]:
    """Cuts the first `num_rows` rows of each table, or all rows, into windows."""
    size = rows_per_window(packed)
    windows: list[Window] = []
    end_of_last_table = 0
    for table in stack.tables:
        end = table.num_rows if num_rows is None else num_rows.get(table.name, 0)
        assert end <= table.num_rows
        for begin in range(0, end, size):
            block = Block(table.name, begin, min(size, end - begin), 0)
            start = table.row_offset + begin
            last = windows[-1] if windows else NO_WINDOW
            position = start - last.start
            # A window is one range of the stack, so a table can join it only if the
            # window reaches the end of the previous table.
            follows = begin == 0 and last.start + last.num_rows == end_of_last_table
            if last.blocks and follows and position + block.num_rows <= size:
                blocks = *last.blocks, block._replace(position=position)
                windows[-1] = Window(last.start, position + block.num_rows, blocks)
            else:
                windows.append(Window(start, block.num_rows, (block,)))
        end_of_last_table = table.row_offset + table.num_rows
    return windows


_TILE_ELEMENTS: Final = 1024
"""Elements of a TPU tile. Parts that consist of whole tiles are sent without a copy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineExchange:
    """The facts about a stack that the exchange programs need."""

    sharding: NamedSharding
    # The layout lacks contents, so that other tables can use the same program.
    layout: RowLayout
    # Shape and dtype of a row in a file.
    row: jax.ShapeDtypeStruct
    window_rows: int
    # These aren't compared, so that stacks with equal packing share programs. The mesh
    # is compared as a part of `sharding`.
    plan: EmbeddingPlan = dataclasses.field(compare=False, repr=False)
    stack: StackPlan = dataclasses.field(compare=False, repr=False)

    @property
    def num_shards(self) -> int:
        return self.stack.num_shards

    @property
    def num_parts(self) -> int:
        """Parts per window. Part `p` is from bank `p % banks` in shard `p // banks`."""
        return self.num_shards * self.layout.banks

    @property
    def received_sharding(self) -> NamedSharding:
        axes = (*self.stack.replica_axes, *self.stack.shard_axes)
        return NamedSharding(self.plan.mesh, PartitionSpec(axes))

    @property
    def parts_shape(self) -> tuple[int, ...]:
        """Global shape of the `parts` that `write_lines` receives."""
        num_lines = self.num_shards * self.num_parts * self.part_lines
        return (num_lines, *self.layout.lines_shape[1:])

    @property
    def part_lines(self) -> int:
        layout = self.layout
        # A part may begin and end within a line.
        rows = -(-self.window_rows // self.num_parts) + layout.rows_per_line - 1
        num_lines = -(-rows // layout.rows_per_line) * layout.lines_per_row
        tile_lines = max(8, _TILE_ELEMENTS // layout.lanes_per_line)
        return min(round_up(num_lines, tile_lines), layout.num_lines)

    def first_row(self, part: Any, start: Any) -> Any:
        """Finds a part's first local row that is at or after a stack row."""
        banks = self.layout.banks
        return self.stack.first_local_row(start, part // banks, part % banks)

    def first_line(self, part: Any, start: Any) -> Any:
        """Finds the first line of a part, for a window that begins at `start`."""
        line = self.layout.line_of(self.first_row(part, start))
        # At the end of the shard, a part of static size has to begin earlier.
        last = self.layout.num_lines - self.part_lines
        return min(line, last) if isinstance(line, int) else jnp.minimum(line, last)

    @property
    def dealt_shape(self) -> tuple[int, ...]:
        part_rows = self.layout.row_of(self.part_lines)
        return (self.num_parts, part_rows, *self.row.shape)

    def rows_of_part(self, part: int, window: Window) -> tuple[slice, slice]:
        """Finds the rows that a part shares with a window, as slices of both.

        The first slice counts rows from the part's `first_line`.
        """
        begin = self.first_row(part, window.start)
        end = self.first_row(part, window.start + window.num_rows)
        base = self.layout.row_of(self.first_line(part, window.start))
        # In the stack, all rows of a part have the same remainder modulo `num_parts`.
        banks = self.layout.banks
        remainder = part % banks * self.num_shards + part // banks
        first = (remainder - window.start) % self.num_parts
        return slice(begin - base, end - base), slice(first, None, self.num_parts)


def line_exchange(
    packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> LineExchange:
    return LineExchange(
        sharding=plan.rows_sharding(stack),
        layout=dataclasses.replace(packed.layout, contents=None),
        row=file_row(packed),
        window_rows=min(rows_per_window(packed), stack.num_rows),
        plan=plan,
        stack=stack,
    )


@functools.partial(jax.jit, static_argnames="exchange")
def read_lines(
    lines: Shaped[Array, "lines *lane"],
    starts: Int[Any, " devices"],
    *,
    exchange: LineExchange,
) -> Shaped[Array, "parts *lane"]:
    """Sends every device the lines for its window, `part_lines` per part.

    Shapes are global. `starts` has the first stack row of each window.
    """
    size, banks = exchange.part_lines, exchange.layout.banks

    def read(lines: Array, starts: Array) -> Array:
        first_part = _index(exchange.stack.shard_axes) * banks
        # Each copy of the rows serves its own windows, so copies share the work.
        group = _index(exchange.stack.replica_axes) * exchange.num_shards

        def add_parts(i: Any, parts: Array) -> Array:
            for bank in range(banks):
                line = exchange.first_line(first_part + bank, starts[group + i])
                part = jax.lax.dynamic_slice_in_dim(lines, line, size)
                begin = (i * banks + bank) * size
                parts = jax.lax.dynamic_update_slice_in_dim(parts, part, begin, axis=0)
            return parts

        shape = (exchange.num_parts * size, *lines.shape[1:])
        parts = jnp.zeros(shape, lines.dtype)
        parts = jax.lax.fori_loop(0, exchange.num_shards, add_parts, parts)
        return _exchanged(parts, exchange)

    return on_shards(
        read,
        exchange.plan,
        in_specs=(exchange.stack.rows_spec, PartitionSpec()),
        out_specs=exchange.received_sharding.spec,
    )(lines, starts)


@functools.partial(jax.jit, static_argnames="exchange", donate_argnums=0)
def write_lines(
    lines: Shaped[Array, "lines *lane"],
    parts: Shaped[Array, "parts *lane"],
    starts: Int[Any, " windows"],
    sizes: Int[Any, " windows"],
    *,
    exchange: LineExchange,
) -> Shaped[Array, "lines *lane"]:
    """Writes one window per shard, or a single window, in place.

    Shapes are global. The rows of a single window must already be at their owners.
    """
    size = exchange.part_lines

    def write(lines: Array, parts: Array, starts: Array, sizes: Array) -> Array:
        banks = exchange.layout.banks
        first_part = _index(exchange.stack.shard_axes) * banks
        if len(starts) > 1:
            parts = _exchanged(parts, exchange)

        def write_part(i: Any, lines: Array) -> Array:
            window, part = i // banks, first_part + i % banks
            line = exchange.first_line(part, starts[window])
            first_row = exchange.layout.row_of(line)
            begin, end = (
                exchange.first_row(part, row) - first_row
                for row in (starts[window], starts[window] + sizes[window])
            )
            # Lines at the ends also hold rows outside of the window. In `parts`, these
            # rows have arbitrary values.
            old = jax.lax.dynamic_slice_in_dim(lines, line, size)
            new = jax.lax.dynamic_slice_in_dim(parts, i * size, size)
            new = _merged(old, new, begin, end, exchange.layout)
            return jax.lax.dynamic_update_slice_in_dim(lines, new, line, axis=0)

        return jax.lax.fori_loop(0, len(starts) * banks, write_part, lines)

    spec = exchange.stack.rows_spec
    return on_shards(
        write,
        exchange.plan,
        in_specs=(spec, spec, PartitionSpec(), PartitionSpec()),
        out_specs=spec,
    )(lines, parts, starts, sizes)


def _index(axes: tuple[str, ...]) -> Any:
    return jax.lax.axis_index(axes) if axes else 0


def _exchanged(parts: Array, exchange: LineExchange) -> Array:
    """Cuts one shard's parts into equal pieces, and sends piece `i` to shard `i`."""
    if exchange.num_shards == 1:
        return parts
    return jax.lax.all_to_all(
        parts, exchange.stack.shard_axes, split_axis=0, concat_axis=0, tiled=True
    )


def _merged(old: Array, new: Array, begin: Any, end: Any, layout: RowLayout) -> Array:
    """Replaces rows `begin` to `end` of the old lines with rows of the new lines."""
    line = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0)
    first_row = layout.row_of(line)
    lane = 0 if layout.is_flat else jax.lax.broadcasted_iota(jnp.int32, old.shape, 1)
    group = lane // layout.lanes_per_row
    is_used = group < layout.groups_per_line

    def is_new(half: int) -> Any:
        row = first_row + half * layout.groups_per_line + group
        return is_used & (row >= begin) & (row < end)

    if layout.rows_per_lane == 1:
        return jnp.where(is_new(0), new, old)
    # Each lane holds 16-bit elements of two rows, and maybe only one row is new.
    lower = jnp.where(is_new(0), new, old) & 0xFFFF
    upper = jnp.where(is_new(1), new, old) & ~0xFFFF
    return lower | upper
