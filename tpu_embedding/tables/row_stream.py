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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from tpu_embedding.plan.check_rows import check_stack
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.file_rows import file_row, of_file_rows, to_file_rows
from tpu_embedding.rows.packed_rows import PackedRows, join_columns
from tpu_embedding.tables.line_exchange import (
    LineExchange,
    Receivers,
    line_exchange,
    read_lines,
    write_lines,
)
from tpu_embedding.tables.row_windows import (
    NO_WINDOW,
    RowRanges,
    Window,
    windows_of,
)
from tpu_embedding.tables.row_windows import rows_per_block as rows_per_block

MAX_DEVICE_BYTES: Final = 256 * 2**20
"""Bound on the temporaries of a turn on each device."""

HOST_BLOCKS: Final = 6
"""Blocks that a process holds at a time for each of its devices."""

ReadTableRows = Callable[[str, int, int], np.ndarray]
"""Returns rows of a table: `(table, start, num_rows) -> [num_rows, *shape]`."""


class RowBlock(NamedTuple):
    """A block of consecutive rows of a table or of one of its slot variables.

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
    receivers: Receivers = "one",
) -> Iterator[list[RowBlock]]:
    """Yields the rows of a stacked table or slot variable, block by block.

    A table's blocks start at multiples of `rows_per_block`. All processes must run the
    same turns.

    Args:
      packed: global rows. They must stay as they are until the last turn.
      stack: the stack of the rows.
      plan: plan of the embedding layer.
      tables: tables to read, or ranges of their rows; None: all rows.
      receivers: `"one"` gives each block to one process only. `"all"` gives it to all
        of them, and takes more turns.

    Yields:
      The blocks of this process in a turn, possibly none.

    Raises:
      ValueError: if the rows were made for another plan, or `tables` names others.

    Example:
      >>> import jax
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> stacks = te.functional.init_tables(plan, jax.random.key(0))
      >>> for blocks in read_blocks(stacks["stack_0"], plan.stacks[0], plan):
      ...     print([(block.table, block.start, block.rows.shape) for block in blocks])
      [('movie', 0, (10, 4))]
    """
    check_stack(packed, stack)
    exchange = line_exchange(packed, stack, plan, receivers)
    windows = windows_of(packed, stack, tables)
    pending = None
    for turn in _batched(windows, exchange.num_windows):
        starts, _ = _bounds(turn, exchange.num_windows)
        received = [read_lines(x, starts, exchange=exchange) for x in packed.arrays]
        if pending is not None:
            yield list(_blocks_of_turn(*pending, exchange, packed))
        pending = turn, received
    if pending is not None:
        yield list(_blocks_of_turn(*pending, exchange, packed))


def write_blocks(
    packed: PackedRows,
    stack: StackPlan,
    plan: EmbeddingPlan,
    read: ReadTableRows,
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
    exchange = line_exchange(packed, stack, plan, "one")
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

    def parts_of(turn: Sequence[Window]) -> dict[int, list[np.ndarray]]:
        return {
            shard: exchange.layout.split_columns(
                _parts_of_window(
                    turn[shard] if shard < len(turn) else NO_WINDOW,
                    *(exchange, packed, read),
                )
            )
            for shard in sorted(set(shard_of.values()))
        }

    lines = list(packed.arrays)
    with ThreadPoolExecutor(1) as reader:
        pending = reader.submit(parts_of, turns[0]) if turns else None
        for i, turn in enumerate(turns):
            assert pending is not None
            parts = pending.result()
            if i + 1 < len(turns):
                pending = reader.submit(parts_of, turns[i + 1])
            bounds = _bounds(turn, exchange.num_shards)
            for j in range(len(lines)):
                arrays = [jax.device_put(parts[s][j], d) for d, s in shard_of.items()]
                sent = jax.make_array_from_single_device_arrays(shape, sharding, arrays)
                lines[j] = write_lines(lines[j], sent, *bounds, exchange=exchange)
            # At most one turn waits in the queue of a device.
            jax.block_until_ready(lines)
    return packed.with_arrays(lines)


def read_turn(
    packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> list[jax.Array]:
    """Returns the lines of one turn of `read_blocks`, to compile ahead of time.

    Args:
      packed: see `read_blocks`.
      stack: the stack of the rows.
      plan: plan of the embedding layer.
    """
    exchange = line_exchange(packed, stack, plan, "one")
    starts = _starts(exchange)
    return [read_lines(x, starts, exchange=exchange) for x in packed.arrays]


def lower_programs(
    packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> dict[str, jax.stages.Lowered]:
    """Returns the programs of a turn, to compile ahead of time.

    Args:
      packed: shapes of the global rows, with their sharding.
      stack: the stack of the rows.
      plan: plan of the embedding layer.

    Returns:
      The programs by name: two that read, and one that writes. Column arrays share
      them.
    """
    exchange = line_exchange(packed, stack, plan, "one")
    bounds = _bounds((), exchange.num_shards)
    parts = jax.ShapeDtypeStruct(
        exchange.parts_shape, packed.lines_dtype, sharding=plan.rows_sharding(stack)
    )
    lines = packed.arrays[0]
    everywhere = dataclasses.replace(exchange, receivers="all")
    return {
        "read_blocks": read_lines.lower(lines, _starts(exchange), exchange=exchange),
        "read_blocks everywhere": read_lines.lower(
            lines, _starts(everywhere), exchange=everywhere
        ),
        "write_blocks": write_lines.lower(lines, parts, *bounds, exchange=exchange),
    }


def _batched(windows: Sequence[Window], size: int) -> list[Sequence[Window]]:
    return [windows[i : i + size] for i in range(0, len(windows), size)]


def _bounds(turn: Sequence[Window], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and number of rows of the window of each device."""
    filled = [*turn, *[NO_WINDOW] * (size - len(turn))]
    starts = np.asarray([window.start for window in filled], np.int32)
    return starts, np.asarray([window.num_rows for window in filled], np.int32)


def _starts(exchange: LineExchange) -> np.ndarray:
    """Returns the first rows of a turn without windows."""
    return _bounds((), exchange.num_windows)[0]


def _blocks_of_turn(
    turn: Sequence[Window],
    received: Sequence[jax.Array],
    exchange: LineExchange,
    packed: PackedRows,
) -> Iterator[RowBlock]:
    """Yields the blocks that this process's devices received."""
    size = received[0].shape[0] // exchange.num_windows
    # Every device has the same lines if all processes receive them.
    by_window = [
        {
            (shard.index[0].start or 0) // size: shard.data
            for shard in part.addressable_shards
        }
        for part in received
    ]
    for i in by_window[0]:
        if i >= len(turn):
            continue
        window = turn[i]
        lines = join_columns([np.asarray(of_array[i]) for of_array in by_window])
        rows = _rows_of_window(lines, window, exchange)
        begin = 0
        for table, start, num_rows in window.pieces:
            yield RowBlock(table, start, rows[begin : begin + num_rows])
            begin += num_rows


def _rows_of_window(
    lines: np.ndarray, window: Window, exchange: LineExchange
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
    window: Window, exchange: LineExchange, packed: PackedRows, read: ReadTableRows
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
    """Returns the rows of a piece; refuses those of another shape or dtype."""
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
