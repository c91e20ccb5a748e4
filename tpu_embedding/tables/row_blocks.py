"""Streams the rows of a stack to and from hosts, in natural order, block by block.

Rows of a table are dealt round-robin to devices, so no device holds a range of rows.
Checkpoints, exports and deltas want ranges. In each turn, every device serves one range
of at most `rows_per_block` rows. To read, all owners send it their lines of the range
in one all-to-all, and the host puts the rows into their order while it copies them. To
write, the host deals the rows into lines, one all-to-all brings the lines to their
owners, and these write them in place.

No step holds a whole table. In a turn, a device needs at most `MAX_DEVICE_BYTES` beside
its tables, and the host `HOST_BLOCKS` blocks of 10 to 20 MB per device of its own.

The programs get their ranges as arguments. One compilation serves all tables of a
stack, and all stacks whose rows lie alike.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, Shaped

from tpu_embedding.plan.check_rows import check_stack
from tpu_embedding.plan.on_mesh import on_shards
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.file_rows import file_row, of_file_rows, to_file_rows
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout, round_up
from tpu_embedding.tables.row_windows import (
    NO_WINDOW,
    RowRanges,
    Window,
    rows_per_window,
    windows_of,
)
from tpu_embedding.tables.row_windows import rows_per_block as rows_per_block

MAX_DEVICE_BYTES: Final = 256 * 2**20
"""Bound on the temporaries of a turn on each device."""

HOST_BLOCKS: Final = 6
"""Blocks that a process holds at a time for each of its devices."""

_TILE_ELEMENTS: Final = 1024
"""Elements of a tile of a TPU. Parts of whole tiles are sent without a copy."""

ReadRows = Callable[[str, int, int], np.ndarray]
"""Returns rows of a table: `(table, start, num_rows) -> [num_rows, *shape]`."""


class TableRows(NamedTuple):
    """A range of rows of a table or of one of its slot variables.

    Attributes:
      table: name of the table.
      start: first row.
      rows: `[num_rows, *shape]`, as `file_row` says.
    """

    table: str
    start: int
    rows: np.ndarray


def read_blocks(
    packed: PackedRows,
    stack: StackPlan,
    plan: EmbeddingPlan,
    tables: RowRanges | None = None,
) -> Iterator[list[TableRows]]:
    """Yields the rows of a stacked table or slot variable, block by block.

    A table's blocks start at multiples of `rows_per_block`. All processes must run the
    same turns. Each gets the blocks of its own devices only, and together they get
    every block once.

    Args:
      packed: global rows. They must stay as they are until the last turn.
      stack: the stack of the rows.
      plan: plan of the embedding layer.
      tables: tables to read, or ranges of their rows; None: all rows.

    Yields:
      The blocks of this process in a turn, possibly none.

    Raises:
      ValueError: if the rows were made for another plan, or `tables` names others.

    Example:
      >>> import jax
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> stacks = te.init_tables(plan, jax.random.key(0))
      >>> for blocks in read_blocks(stacks["stack_0"], plan.stacks[0], plan):
      ...     print([(block.table, block.start, block.rows.shape) for block in blocks])
      [('movie', 0, (10, 4))]
    """
    check_stack(packed, stack)
    exchange = _exchange_of(packed, stack, plan)
    windows = windows_of(packed, stack, tables)
    pending = None
    for turn in _batched(windows, exchange.num_devices):
        starts, _ = _bounds(turn, exchange.num_devices)
        received = _read(packed.lines, starts, exchange=exchange)
        if pending is not None:
            yield list(_blocks_of_turn(*pending, exchange, packed))
        pending = turn, received
    if pending is not None:
        yield list(_blocks_of_turn(*pending, exchange, packed))


def write_blocks(
    packed: PackedRows,
    stack: StackPlan,
    plan: EmbeddingPlan,
    read: ReadRows,
    tables: RowRanges | None = None,
) -> PackedRows:
    """Replaces rows of a stacked table or slot variable, block by block, in place.

    All processes must call it together.

    Args:
      packed: global rows; donated, so that only the result can be used.
      stack: the stack of the rows.
      plan: plan of the embedding layer.
      read: returns rows as `file_row` says. It is called in another thread, for the
        blocks of this process only. A block never crosses a multiple of
        `rows_per_block` rows.
      tables: tables to write, or ranges of their rows; None: all rows.

    Raises:
      ValueError: if the rows were made for another plan, or `tables` names others; or
        if `read` returns rows of another shape or dtype. The rows are lost then.
    """
    check_stack(packed, stack)
    exchange = _exchange_of(packed, stack, plan)
    turns = _batched(windows_of(packed, stack, tables), exchange.num_shards)
    shape = exchange.parts_shape
    sharding = plan.rows_sharding(stack)
    indices = sharding.addressable_devices_indices_map(shape)
    size = shape[0] // exchange.num_shards
    shard_of = {
        device: (index[0].start or 0) // size
        for device, index in indices.items()
        if index is not None
    }

    def parts_of(turn: Sequence[Window]) -> dict[int, np.ndarray]:
        return {
            shard: _parts_of_window(
                turn[shard] if shard < len(turn) else NO_WINDOW, exchange, packed, read
            )
            for shard in sorted(set(shard_of.values()))
        }

    lines = packed.lines
    with ThreadPoolExecutor(1) as reader:
        pending = reader.submit(parts_of, turns[0]) if turns else None
        for i, turn in enumerate(turns):
            assert pending is not None
            parts = pending.result()
            if i + 1 < len(turns):
                pending = reader.submit(parts_of, turns[i + 1])
            arrays = [jax.device_put(parts[s], d) for d, s in shard_of.items()]
            sent = jax.make_array_from_single_device_arrays(shape, sharding, arrays)
            bounds = _bounds(turn, exchange.num_shards)
            lines = _write(lines, sent, *bounds, exchange=exchange)
            # At most one turn waits in the queue of a device.
            jax.block_until_ready(lines)
    return dataclasses.replace(packed, lines=lines)


def lower_programs(
    packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> dict[str, jax.stages.Lowered]:
    """Returns the programs of a turn, to compile ahead of time.

    Args:
      packed: shapes of the global rows, with their sharding.
      stack: the stack of the rows.
      plan: plan of the embedding layer.

    Returns:
      The programs `"read_blocks"` and `"write_blocks"`.
    """
    exchange = _exchange_of(packed, stack, plan)
    bounds = _bounds((), exchange.num_shards)
    parts = jax.ShapeDtypeStruct(
        exchange.parts_shape, packed.lines.dtype, sharding=plan.rows_sharding(stack)
    )
    starts, _ = _bounds((), exchange.num_devices)
    return {
        "read_blocks": _read.lower(packed.lines, starts, exchange=exchange),
        "write_blocks": _write.lower(packed.lines, parts, *bounds, exchange=exchange),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exchange:
    """Facts of the exchange of lines between owners and the devices that serve ranges.

    Attributes:
      mesh: devices of the plan.
      shard_axes: see `StackPlan`.
      replica_axes: see `StackPlan`.
      num_shards: see `StackPlan`.
      num_replicas: see `StackPlan`.
      layout: packing of the rows, without the tables that they belong to.
      window_rows: maximum rows of a range.
      plan: for the mesh.
      stack: any stack with these facts.
    """

    mesh: Mesh
    shard_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    num_shards: int
    num_replicas: int
    layout: RowLayout
    window_rows: int
    plan: EmbeddingPlan = dataclasses.field(compare=False, repr=False)
    stack: StackPlan = dataclasses.field(compare=False, repr=False)

    @property
    def num_devices(self) -> int:
        """Devices that hold the rows, copies included."""
        return self.num_shards * self.num_replicas

    @property
    def parts_shape(self) -> tuple[int, ...]:
        """Shape of the lines that all shards get to write, one part per owner each."""
        num_lines = self.num_shards**2 * self.part_lines
        return (num_lines, *self.layout.lines_shape[1:])

    @property
    def part_lines(self) -> int:
        """Lines that one owner sends of one range, in whole tiles."""
        layout = self.layout
        rows = -(-self.window_rows // self.num_shards) + layout.rows_per_line - 1
        num_lines = -(-rows // layout.rows_per_line)
        tile_lines = max(8, _TILE_ELEMENTS // layout.lanes)
        return min(round_up(num_lines, tile_lines), layout.num_lines)

    def first_row(self, shard: Any, start: Any) -> Any:
        """Returns the first local row of a shard at or behind a row of the stack."""
        return (start + (self.num_shards - 1 - shard)) // self.num_shards

    def first_line(self, shard: Any, start: Any) -> Any:
        """Returns the first line that a shard sends of the range from `start` on."""
        line = self.first_row(shard, start) // self.layout.rows_per_line
        last = self.layout.num_lines - self.part_lines
        return min(line, last) if isinstance(line, int) else jnp.minimum(line, last)

    def rows_of_part(self, shard: int, window: Window) -> tuple[slice, slice]:
        """Returns the rows of a shard: their range in its part, and in the window."""
        begin = self.first_row(shard, window.start)
        end = self.first_row(shard, window.start + window.num_rows)
        base = self.first_line(shard, window.start) * self.layout.rows_per_line
        first = begin * self.num_shards + shard - window.start
        return slice(begin - base, end - base), slice(first, None, self.num_shards)


def _exchange_of(
    packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> _Exchange:
    return _Exchange(
        mesh=plan.mesh,
        shard_axes=stack.shard_axes,
        replica_axes=stack.replica_axes,
        num_shards=stack.num_shards,
        num_replicas=stack.num_replicas,
        layout=dataclasses.replace(packed.layout, contents=None),
        window_rows=min(rows_per_window(packed), stack.num_rows),
        plan=plan,
        stack=stack,
    )


def _batched(windows: Sequence[Window], size: int) -> list[Sequence[Window]]:
    return [windows[i : i + size] for i in range(0, len(windows), size)]


def _bounds(turn: Sequence[Window], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and number of rows of the window of each device."""
    filled = [*turn, *[NO_WINDOW] * (size - len(turn))]
    starts = np.asarray([window.start for window in filled], np.int32)
    return starts, np.asarray([window.num_rows for window in filled], np.int32)


def _blocks_of_turn(
    turn: Sequence[Window],
    received: jax.Array,
    exchange: _Exchange,
    packed: PackedRows,
) -> Iterator[TableRows]:
    """Yields the blocks that this process's devices received."""
    size = received.shape[0] // exchange.num_devices
    for shard in received.addressable_shards:
        device = (shard.index[0].start or 0) // size
        if device >= len(turn):
            continue
        window = turn[device]
        rows = _rows_of_window(np.asarray(shard.data), window, exchange)
        begin = 0
        for table, start, num_rows in window.pieces:
            yield TableRows(table, start, rows[begin : begin + num_rows])
            begin += num_rows


def _rows_of_window(
    lines: np.ndarray, window: Window, exchange: _Exchange
) -> np.ndarray:
    """Returns the rows of a window in their order, from the lines of all owners."""
    rows = to_file_rows(lines, exchange.layout)
    parts = rows.reshape(exchange.num_shards, -1, *rows.shape[1:])
    if exchange.num_shards == 1:
        of_part, _ = exchange.rows_of_part(0, window)
        return parts[0, of_part]
    result = np.empty((window.num_rows, *rows.shape[1:]), rows.dtype)
    for shard, part in enumerate(parts):
        of_part, of_window = exchange.rows_of_part(shard, window)
        result[of_window] = part[of_part]
    return result


def _parts_of_window(
    window: Window, exchange: _Exchange, packed: PackedRows, read: ReadRows
) -> np.ndarray:
    """Returns the lines that each owner gets of the rows of a window."""
    row, layout = file_row(packed), exchange.layout
    part_rows = exchange.part_lines * layout.rows_per_line
    parts = np.zeros((exchange.num_shards, part_rows, *row.shape), row.dtype)
    blocks = [_checked(read(*piece), piece, row) for piece in window.pieces]
    if blocks:
        rows = np.concatenate(blocks) if len(blocks) > 1 else blocks[0]
        for shard, part in enumerate(parts):
            of_part, of_window = exchange.rows_of_part(shard, window)
            part[of_part] = rows[of_window]
    return of_file_rows(parts.reshape(-1, *row.shape), layout)


def _checked(
    rows: Any, piece: tuple[str, int, int], row: jax.ShapeDtypeStruct
) -> np.ndarray:
    """Refuses rows that are none of the table."""
    table, start, num_rows = piece
    shape = (num_rows, *row.shape)
    found = getattr(rows, "shape", None), getattr(rows, "dtype", None)
    if found != (shape, row.dtype):
        raise ValueError(
            f"read must return an array of shape {shape} and dtype {row.dtype} for "
            f"rows {start} to {start + num_rows} of table {table!r}, got shape "
            f"{found[0]} and dtype {found[1]}."
        )
    return rows


@functools.partial(jax.jit, static_argnames="exchange")
def _read(
    lines: Shaped[Array, "lines *lane"],
    starts: Int[Any, " devices"],
    *,
    exchange: _Exchange,
) -> Shaped[Array, "parts *lane"]:
    """Sends the lines of one window to each device. Global.

    Args:
      lines: of all shards.
      starts: first row of the window of each device.
      exchange: static facts.

    Returns:
      For each device, one part of `part_lines` lines from each owner.
    """
    size = exchange.part_lines

    def read(lines: Array, starts: Array) -> Array:
        shard = _index(exchange.shard_axes)
        # All copies of the rows serve windows of their own.
        group = _index(exchange.replica_axes) * exchange.num_shards

        def add_part(i: Any, parts: Array) -> Array:
            line = exchange.first_line(shard, starts[group + i])
            part = jax.lax.dynamic_slice_in_dim(lines, line, size)
            return jax.lax.dynamic_update_slice_in_dim(parts, part, i * size, axis=0)

        shape = (exchange.num_shards * size, *lines.shape[1:])
        return _exchanged(
            jax.lax.fori_loop(
                0, exchange.num_shards, add_part, jnp.zeros(shape, lines.dtype)
            ),
            exchange,
        )

    axes = (*exchange.replica_axes, *exchange.shard_axes)
    return on_shards(
        read,
        exchange.plan,
        in_specs=(exchange.stack.rows_spec, PartitionSpec()),
        out_specs=PartitionSpec(axes),
    )(lines, starts)


@functools.partial(jax.jit, static_argnames="exchange", donate_argnums=0)
def _write(
    lines: Shaped[Array, "lines *lane"],
    parts: Shaped[Array, "parts *lane"],
    starts: Int[Any, " shards"],
    sizes: Int[Any, " shards"],
    *,
    exchange: _Exchange,
) -> Shaped[Array, "lines *lane"]:
    """Writes the rows of one window per shard in place. Global.

    Args:
      lines: of all shards.
      parts: for each shard, the new lines of its window by owner.
      starts: first row of the window of each shard.
      sizes: number of rows of each window.
      exchange: static facts.
    """
    size = exchange.part_lines

    def write(lines: Array, parts: Array, starts: Array, sizes: Array) -> Array:
        shard = _index(exchange.shard_axes)
        parts = _exchanged(parts, exchange)

        def write_part(i: Any, lines: Array) -> Array:
            line = exchange.first_line(shard, starts[i])
            first_row = line * exchange.layout.rows_per_line
            begin, end = (
                exchange.first_row(shard, row) - first_row
                for row in (starts[i], starts[i] + sizes[i])
            )
            old = jax.lax.dynamic_slice_in_dim(lines, line, size)
            new = jax.lax.dynamic_slice_in_dim(parts, i * size, size)
            new = _merged(old, new, begin, end, exchange.layout)
            return jax.lax.dynamic_update_slice_in_dim(lines, new, line, axis=0)

        return jax.lax.fori_loop(0, exchange.num_shards, write_part, lines)

    spec = exchange.stack.rows_spec
    return on_shards(
        write,
        exchange.plan,
        in_specs=(spec, spec, PartitionSpec(), PartitionSpec()),
        out_specs=spec,
    )(lines, parts, starts, sizes)


def _index(axes: tuple[str, ...]) -> Any:
    return jax.lax.axis_index(axes) if axes else 0


def _exchanged(parts: Array, exchange: _Exchange) -> Array:
    """Sends part `i` to shard `i`, and returns the parts from all shards. Per shard."""
    if exchange.num_shards == 1:
        return parts
    return jax.lax.all_to_all(
        parts, exchange.shard_axes, split_axis=0, concat_axis=0, tiled=True
    )


def _merged(old: Array, new: Array, begin: Any, end: Any, layout: RowLayout) -> Array:
    """Takes rows `begin` to `end` from the new lines, all others from the old ones."""
    line = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0)
    lane = 0 if layout.is_flat else jax.lax.broadcasted_iota(jnp.int32, old.shape, 1)
    place = lane // layout.row_lanes
    is_used = place < layout.rows_abreast

    def is_new(part_of_lane: int) -> Any:
        row = line * layout.rows_per_line + part_of_lane * layout.rows_abreast + place
        return is_used & (row >= begin) & (row < end)

    if layout.rows_per_lane == 1:
        return jnp.where(is_new(0), new, old)
    lower = jnp.where(is_new(0), new, old) & 0xFFFF
    upper = jnp.where(is_new(1), new, old) & ~0xFFFF
    return lower | upper
