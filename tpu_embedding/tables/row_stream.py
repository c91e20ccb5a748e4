"""Streams the rows of a stack to and from hosts, in natural order, block by block.

Rows of a table are dealt round-robin to devices, so no device holds a range of rows.
Checkpoints and exports want ranges. In each turn, every device serves one range
of at most `rows_per_block` rows. To read, all owners send it their lines of the range
in one all-to-all, and the host puts the rows into their order while it copies them. To
write, the host deals the rows into lines, one all-to-all brings the lines to their
owners, and these write them in place.

No step holds a whole table. In a turn, a device needs at most `MAX_DEVICE_BYTES` beside
its tables, and the host six blocks of 10 to 20 MB per device of its own.

If the process has all devices and these are CPUs, their lines are in its memory. It
then reads rows where they lie, and deals new rows to their owners, without an exchange.

The programs get their ranges as arguments. One compilation serves all tables of a
stack, and all stacks whose rows lie alike.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from tpu_embedding.plan.check_rows import check_stack
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.file_rows import file_rows_of_lines, lines_of_file_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.line_exchange import (
    NO_WINDOW,
    LineExchange,
    RowRanges,
    Window,
    line_exchange,
    read_lines,
    windows_of,
    write_lines,
)

MAX_DEVICE_BYTES: Final = 256 * 2**20
"""Bound on the temporaries of a turn on each device."""

_ALIGNMENT: Final = 64
"""Bytes; JAX copies arrays to CPU devices unless they start at a multiple."""

ReadTableRows = Callable[[str, int, int], np.ndarray]
"""Returns rows of a table: `(table, start, num_rows) -> [num_rows, *shape]`."""

Receivers = Literal["one", "all"]
"""Processes that get a block: the one whose device it is read by, or all of them."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
    ranges: RowRanges | None = None,
    receivers: Receivers = "one",
) -> Iterator[list[RowBlock]]:
    """Returns the rows of a stacked table or slot variable, block by block.

    A table's blocks start at multiples of `rows_per_block`. All processes must run the
    same turns.

    Args:
      packed: global rows. They must stay as they are until the last turn.
      stack: the stack of the rows.
      plan: plan of the embedding layer.
      ranges: rows to read, by table; None: all rows.
      receivers: `"one"` gives each block to one process only. `"all"` gives it to all
        of them; in a job of several processes it takes more turns.

    Returns:
      An iterator of turns, each with the blocks of this process, possibly none.

    Raises:
      ValueError: if the rows were made for another plan, or `ranges` names others.

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
    exchange = line_exchange(packed, stack, plan)
    windows = windows_of(packed, stack, ranges)
    if _lies_on_host(packed):
        return _read_on_host(packed, exchange, windows)
    served = _windows_of_devices(exchange.received_sharding, receivers)
    return _read_by_exchange(packed, exchange, windows, served)


def write_blocks(
    packed: PackedRows,
    stack: StackPlan,
    plan: EmbeddingPlan,
    read: ReadTableRows,
    ranges: RowRanges | None = None,
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
      ranges: rows to write, by table; None: all rows.

    Raises:
      ValueError: if the rows were made for another plan, or `ranges` names others; or
        if `read` returns rows of another shape or dtype. The rows are lost then.
    """
    check_stack(packed, stack)
    exchange = line_exchange(packed, stack, plan)
    windows = windows_of(packed, stack, ranges)
    if _lies_on_host(packed):
        return _write_on_host(packed, exchange, windows, read)
    return _write_by_exchange(packed, exchange, windows, read)


def _read_by_exchange(
    packed: PackedRows,
    exchange: LineExchange,
    windows: Sequence[Window],
    served: Sequence[int],
) -> Iterator[list[RowBlock]]:
    """Yields the blocks of this process, turn by turn.

    Args:
      packed: global rows.
      exchange: facts of the lines.
      windows: ranges to read.
      served: number of the window that each device reads in a turn.
    """

    def read(turn: Sequence[Window]) -> tuple[Sequence[Window], jax.Array]:
        starts, _ = _bounds([turn[i] if i < len(turn) else NO_WINDOW for i in served])
        return turn, read_lines(packed.lines, starts, exchange=exchange)

    turns = _batched(windows, max(served) + 1)
    for turn, received in _one_ahead(map(read, turns)):
        yield list(_blocks_of_turn(turn, received, served, exchange))
        del received  # Else three turns are in memory while the next one is read.


def _write_by_exchange(
    packed: PackedRows,
    exchange: LineExchange,
    windows: Sequence[Window],
    read: ReadTableRows,
) -> PackedRows:
    """Replaces the rows of windows, one window per shard in a turn."""
    num_shards, shape = exchange.num_shards, exchange.parts_shape
    sharding = exchange.sharding
    number_of = functools.partial(_number_of_part, size=shape[0] // num_shards)
    indices = sharding.addressable_devices_indices_map(shape)
    own_shards = set(map(number_of, indices.values()))

    def parts_of(turn: Sequence[Window]) -> dict[int, np.ndarray]:
        parts = {}
        for shard in own_shards:
            rows = _rows_of_pieces(turn[shard], exchange, read)
            memory = np.zeros(exchange.dealt_shape, exchange.row.dtype)
            parts[shard] = _dealt(rows, turn[shard], exchange, memory)
        return parts

    turns = [
        [*turn, *[NO_WINDOW] * (num_shards - len(turn))]
        for turn in _batched(windows, num_shards)
    ]
    lines = packed.lines
    for turn, parts in zip(turns, _read_ahead(parts_of, turns), strict=True):
        sent = jax.make_array_from_callback(
            shape, sharding, lambda index, parts=parts: parts[number_of(index)]
        )
        lines = write_lines(lines, sent, *_bounds(turn), exchange=exchange)
        # At most one turn waits in the queue of a device.
        jax.block_until_ready(lines)
        del sent, parts
    return dataclasses.replace(packed, lines=lines)


def _one_ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yields each item once the next one is made, such as a transfer that goes on."""
    made = collections.deque(itertools.islice(items, 1))
    while made:
        made.extend(itertools.islice(items, 1))
        yield made.popleft()


def _read_ahead(
    function: Callable[[_Item], _Result], items: Sequence[_Item]
) -> Iterator[_Result]:
    """Yields the result for each item, while a thread makes that for the next one."""
    with ThreadPoolExecutor(1) as reader:
        for future in _one_ahead(reader.submit(function, item) for item in items):
            yield future.result()
            del future


def _batched(windows: Sequence[Window], size: int) -> list[Sequence[Window]]:
    return [windows[i : i + size] for i in range(0, len(windows), size)]


def _bounds(windows: Sequence[Window]) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and number of rows of each window."""
    starts = np.asarray([window.start for window in windows], np.int32)
    return starts, np.asarray([window.num_rows for window in windows], np.int32)


def _windows_of_devices(
    sharding: jax.sharding.Sharding, receivers: Receivers
) -> list[int]:
    """Returns the number of the window that each device reads in a turn."""
    num_devices = len(sharding.device_set)
    if receivers == "one":
        return list(range(num_devices))
    indices = sharding.devices_indices_map((num_devices,))
    in_order = sorted(indices, key=lambda device: _number_of_part(indices[device], 1))
    return windows_for_all([device.process_index for device in in_order])


def windows_for_all(processes: Sequence[int]) -> list[int]:
    """Returns the window of each device, if each process shall get all of a turn.

    Args:
      processes: process of each device.

    Example:
      >>> windows_for_all([0, 0, 1, 1])
      [0, 1, 0, 1]
    """
    num_windows = min(collections.Counter(processes).values())
    numbers = collections.defaultdict(itertools.count)
    return [next(numbers[process]) % num_windows for process in processes]


def _blocks_of_turn(
    turn: Sequence[Window],
    received: jax.Array,
    served: Sequence[int],
    exchange: LineExchange,
) -> Iterator[RowBlock]:
    """Yields the blocks that this process's devices received, each once."""
    by_device = _parts_by_index(received, received.shape[0] // len(served))
    by_window = {served[i]: lines for i, lines in by_device.items()}
    for i, window in enumerate(turn):
        if i in by_window:
            parts = np.split(np.asarray(by_window[i]), exchange.num_parts)
            yield from _blocks_of_window(parts, window, exchange)


def _parts_by_index(array: jax.Array, size: int) -> dict[int, jax.Array]:
    """Returns parts of `size` lines by their number in an array; equal ones once."""
    return {
        _number_of_part(shard.index, size): shard.data
        for shard in array.addressable_shards
    }


def _number_of_part(index: Any, size: int) -> int:
    """Returns the number of a part of `size` lines, by its index in an array."""
    return (index[0].start or 0) // size


def _blocks_of_window(
    parts: Sequence[np.ndarray], window: Window, exchange: LineExchange
) -> Iterator[RowBlock]:
    """Yields the blocks of a window, from the lines of its parts."""
    rows = _rows_of_window(parts, window, exchange)
    begin = 0
    for table, start, num_rows in window.pieces:
        yield RowBlock(table, start, rows[begin : begin + num_rows])
        begin += num_rows


def _rows_of_window(
    parts: Sequence[np.ndarray], window: Window, exchange: LineExchange
) -> np.ndarray:
    """Returns the rows of a window in their order, from the lines of its parts."""
    if exchange.num_parts == 1:
        of_part, _ = exchange.rows_of_part(0, window)
        return file_rows_of_lines(parts[0], exchange.layout)[of_part]
    row = exchange.row
    result = np.empty((window.num_rows, *row.shape), row.dtype)
    for part, lines in enumerate(parts):
        of_part, of_window = exchange.rows_of_part(part, window)
        result[of_window] = file_rows_of_lines(lines, exchange.layout)[of_part]
    return result


def _rows_of_pieces(
    window: Window, exchange: LineExchange, read: ReadTableRows
) -> np.ndarray:
    """Returns the new rows of a window."""
    row = exchange.row
    blocks = [_checked(read(*piece), piece, row) for piece in window.pieces]
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate([np.empty((0, *row.shape), row.dtype), *blocks])


def _dealt(
    rows: np.ndarray, window: Window, exchange: LineExchange, parts: np.ndarray
) -> np.ndarray:
    """Deals the rows of a window to their owners; returns the lines of all of them.

    Args:
      rows: `[num_rows, *shape]`.
      window: range of the rows.
      exchange: facts of the lines.
      parts: gets the rows of each part, `[num_parts, part_rows, *shape]`.
    """
    for i, part in enumerate(parts):
        of_part, of_window = exchange.rows_of_part(i, window)
        part[of_part] = rows[of_window]
    return lines_of_file_rows(parts.reshape(-1, *rows.shape[1:]), exchange.layout)


def _checked(
    rows: Any, piece: tuple[str, int, int], row: jax.ShapeDtypeStruct
) -> np.ndarray:
    """Returns the rows of a piece; rejects another shape or dtype."""
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


def _lies_on_host(packed: PackedRows) -> bool:
    """Returns True if the memory of this process holds all lines."""
    lines = packed.lines
    devices = lines.sharding.device_set
    return lines.is_fully_addressable and all(x.platform == "cpu" for x in devices)


def _read_on_host(
    packed: PackedRows, exchange: LineExchange, windows: Sequence[Window]
) -> Iterator[list[RowBlock]]:
    """Yields the blocks of each window, from lines in the memory of this process."""
    size = exchange.layout.num_lines
    by_shard = jax.tree.map(np.asarray, _parts_by_index(packed.lines, size))
    # The rows of a single owner would be a view of its lines, which may be donated.
    taken = np.array if exchange.num_parts == 1 else np.asarray
    for window in windows:
        parts = []
        for part in range(exchange.num_parts):
            line = exchange.first_line(part, window.start)
            lines = by_shard[part // exchange.layout.banks]
            parts.append(taken(lines[line : line + exchange.part_lines]))
        yield list(_blocks_of_window(parts, window, exchange))


def _write_on_host(
    packed: PackedRows,
    exchange: LineExchange,
    windows: Sequence[Window],
    read: ReadTableRows,
) -> PackedRows:
    """Replaces the rows of windows in the memory of this process."""
    lines, sharding = packed.lines, packed.lines.sharding
    # All windows share it: new memory costs as much as a copy.
    memory = _aligned(exchange.dealt_shape, exchange.row.dtype)
    read_rows = functools.partial(_rows_of_pieces, exchange=exchange, read=read)
    for window, rows in zip(windows, _read_ahead(read_rows, windows), strict=True):
        dealt = _dealt(rows, window, exchange, memory)
        dealt = jax.device_put(dealt, sharding)
        lines = write_lines(lines, dealt, *_bounds([window]), exchange=exchange)
        jax.block_until_ready(lines)
    return dataclasses.replace(packed, lines=lines)


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an array without values that CPU devices take without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)
