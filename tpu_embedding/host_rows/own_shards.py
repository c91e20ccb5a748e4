"""The shards on this process's devices, and their rows on the host.

Each shard has a store with all its rows, and a planner for its cache. This module moves
rows between stores and devices; `stack.py` decides when.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embedding.argument_checks import about
from tpu_embedding.host_rows.messages import raise_together
from tpu_embedding.host_rows.planner import BatchPlan, CacheTooSmallError, Planner
from tpu_embedding.host_rows.records import (
    columns_of,
    file_rows_of_words,
    rows_of_record,
    words_of_file_rows,
)
from tpu_embedding.host_rows.store import RowStore, in_threads
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.file_rows import file_rows_of_lines, lines_of_file_rows
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout
from tpu_embedding.types import PADDING_ROW_ID

_CHUNK_BYTES: Final = 2**24
"""Bytes of cached lines that a device sends to its host at once."""


class Exchange(NamedTuple):
    """Local rows that enter slots, and rows that leave them. Lists are by own shard."""

    slots: list[np.ndarray]
    fetched: list[np.ndarray]
    evicted: list[np.ndarray]  # -1 where the slot was empty.
    arrays: tuple[jax.Array, jax.Array]  # For `swap_program`: moves and records.


class OwnShards:
    """A stack's shards on this process's devices. Lists are in shard order."""

    def __init__(self, stack: StackPlan, plan: EmbeddingPlan):
        self.stack, self._plan = stack, plan
        self.columns = columns_of(stack)
        self.record_bytes = 4 * self.columns[-1].stop
        self._programs = _line_programs(plan, stack)

    @functools.cached_property
    def _devices(self) -> dict[int, jax.Device]:
        """Own devices by shard number, ascending."""
        sharding = self._plan.rows_sharding(self.stack)
        indices = sharding.addressable_devices_indices_map((self.stack.num_shards,))
        shards = {(x[0].start or 0): device for device, x in indices.items() if x}
        return dict(sorted(shards.items()))

    @property
    def numbers(self) -> list[int]:
        return list(self._devices)

    @functools.cached_property
    def stores(self) -> list[RowStore]:
        """Records by shard. All processes must make the first call together."""
        # Lazy, because a model made of shapes needs no memory yet.
        directory = self.stack.storage.directory  # type: ignore[attr-defined]
        shape = self.stack.rows_per_shard, self.columns[-1].stop
        stores, error = [], None
        try:
            stores = [RowStore(*shape, directory) for _ in self.numbers]
        except (OSError, MemoryError) as raised:
            error = raised
        raise_together(error, self._plan)
        return stores

    @functools.cached_property
    def planners(self) -> list[Planner]:
        shape = self.stack.rows_per_shard, self.stack.layout.num_rows
        return [Planner(*shape) for _ in self.numbers]

    @functools.cached_property
    def held(self) -> list[np.ndarray]:
        """The local row in each cache slot, by shard; -1 if empty."""
        # This is the state after the latest exchange. A planner's `row_of` is some
        # batches ahead, so a flush must not use it.
        shape = self.stack.layout.num_rows
        return [np.full(shape, -1, np.int32) for _ in self.numbers]

    def parts_of(self, array: jax.Array) -> list[jax.Array]:
        """Finds an array's parts on own devices."""
        size = array.shape[0] // self.stack.num_shards
        parts = {
            (x.index[0].start or 0) // size: x.data for x in array.addressable_shards
        }
        return [parts[number] for number in self.numbers]

    def array_of(self, parts: Iterable[np.ndarray]) -> jax.Array:
        """Sends parts of equal shape to own devices, as one global array."""
        parts = list(parts)
        shape = self.stack.num_shards * parts[0].shape[0], *parts[0].shape[1:]
        return jax.make_array_from_single_device_arrays(
            shape,
            self._plan.rows_sharding(self.stack),
            jax.device_put(parts, list(self._devices.values())),
        )

    def plan(self, rows: Sequence[np.ndarray]) -> list[BatchPlan]:
        """Plans the next batch.

        If the batch's rows don't fit, this raises ValueError and changes nothing.
        """

        def plan(planner: Planner, rows: np.ndarray) -> BatchPlan | CacheTooSmallError:
            try:
                return planner.plan(rows)
            except CacheTooSmallError as error:
                return error

        plans = list(in_threads(plan, self.planners, rows))
        planned = [plan for plan in plans if isinstance(plan, BatchPlan)]
        if len(planned) == len(plans):
            return planned
        needed = [x.num_rows if isinstance(x, CacheTooSmallError) else 0 for x in plans]
        shard = int(np.argmax(needed))
        for planner, plan in zip(self.planners, plans, strict=True):
            if isinstance(plan, BatchPlan):
                planner.undo(plan)
        num_slots, num_shards = self.stack.layout.num_rows, self.stack.num_shards
        names = [table.name for table in self.stack.tables]
        error = ValueError(
            f"Batch {self.planners[0].next_batch} and the two before it need "
            f"{needed[shard]:,} rows of device {self.numbers[shard]}, which do not fit "
            f"in its {num_slots:,} cached rows of stack {self.stack.name!r} (tables "
            f"{names}). Raise HostRows.cache_rows to at least "
            f"{(needed[shard] - 1) * num_shards + 1:,}, or use smaller batches."
        )
        raise about(error, "HostRows.cache_rows", num_slots * num_shards)

    def exchange_of(
        self, plans: Sequence[BatchPlan], number: int, size: int
    ) -> Exchange:
        """Reads the records for exchange `number`, and sends them to the devices.

        An exchange after the last row moves nothing.
        """
        part = slice(number * size, (number + 1) * size)
        slots = [plan.slots[part] for plan in plans]
        fetched = [plan.fetched[part] for plan in plans]
        evicted = [plan.evicted[part] for plan in plans]
        moves, records = [], []
        for store, *moved in zip(self.stores, slots, fetched, evicted, strict=True):
            # All exchanges have the same static size, so that they share one compiled
            # program.
            padded = np.full((3, size), PADDING_ROW_ID, np.int32)
            padded[:, : len(moved[0])] = moved
            padded[2][padded[2] < 0] = PADDING_ROW_ID
            moves.append(padded.reshape(-1))
            records.append(np.empty((size, self.columns[-1].stop), np.uint32))
            store.read(moved[1], out=records[-1][: len(moved[1])])
        arrays = self.array_of(moves), self.array_of(records)
        return Exchange(slots, fetched, evicted, arrays)

    def write(self, exchange: Exchange, records: jax.Array) -> None:
        """Waits for the records that left, and writes them to the stores."""
        for store, rows, part in zip(
            self.stores, exchange.evicted, self.parts_of(records), strict=True
        ):
            values = np.asarray(part)[: len(rows)]
            if values.shape[1] == self.columns[-1].stop:
                store.write(rows, values)
            else:  # Without an optimizer, slot variables in the store must not change.
                words = slice(0, values.shape[1])
                store.write_words(rows[rows >= 0], values[rows >= 0], words)

    # The methods below move a range of local rows, the same on all shards.

    def lines_of_rows(self, first: int, layout: RowLayout, column: int) -> jax.Array:
        """Sends stored rows from row `first` on, padded with zeros, to the devices."""
        row, size = rows_of_record(self.stack)[column], layout.row_of(layout.num_lines)
        end = min(first + size, self.stack.rows_per_shard)

        def lines_of(store: RowStore) -> np.ndarray:
            rows = np.zeros((size, *row.shape), row.dtype)
            words = store.read_range(first, end, self.columns[column])
            rows[: end - first] = file_rows_of_words(words, row)
            return lines_of_file_rows(rows, layout)

        return self.array_of(map(lines_of, self.stores))

    def write_rows(
        self,
        first: int,
        lines: jax.Array,
        layout: RowLayout,
        column: int,
        stack_rows: tuple[int, int] | None = None,
    ) -> None:
        """Inverts `lines_of_rows`. Replaces only rows in the range `stack_rows`."""
        stack_rows = stack_rows or (0, self.stack.num_rows)
        for number, store, part in zip(
            self.numbers, self.stores, self.parts_of(lines), strict=True
        ):
            rows = file_rows_of_lines(np.asarray(part), layout)
            begin, end = (self.stack.first_local_row(x, number, 0) for x in stack_rows)
            begin, end = max(begin, first), min(end, first + len(rows))
            if begin < end:
                words = words_of_file_rows(rows[begin - first : end - first])
                store.write_range(begin, words, self.columns[column])

    def save_cache(self, rows: PackedRows, column: int) -> None:
        """Writes cached rows to the stores."""
        for start, size in self._chunks(rows):
            lines = self._programs.read(rows.lines, np.int32(start), num_lines=size)
            for number, part in enumerate(self.parts_of(lines)):
                held, is_used = self._held_in(number, start, size, rows.layout)
                values = file_rows_of_lines(np.asarray(part), rows.layout)
                words = words_of_file_rows(values[: len(held)][is_used])
                self.stores[number].write_words(
                    held[is_used], words, self.columns[column]
                )

    def load_cache(self, rows: PackedRows, column: int) -> jax.Array:
        """Replaces cached rows with rows from the stores. Donates `rows`."""
        row, lines = rows_of_record(self.stack)[column], rows.lines
        for start, size in self._chunks(rows):
            parts = []
            for number, store in enumerate(self.stores):
                held, is_used = self._held_in(number, start, size, rows.layout)
                values = np.zeros((rows.layout.row_of(size), *row.shape), row.dtype)
                words = store.read(held[is_used])[:, self.columns[column]]
                values[: len(held)][is_used] = file_rows_of_words(words, row)
                parts.append(lines_of_file_rows(values, rows.layout))
            lines = self._programs.write(lines, self.array_of(parts), np.int32(start))
        return lines

    def _chunks(self, rows: PackedRows) -> Iterator[tuple[int, int]]:
        """Yields the first line and the line count of each cache chunk."""
        num_lines = rows.layout.num_lines
        size = min(num_lines, max(1, _CHUNK_BYTES // (4 * rows.layout.lanes_per_line)))
        # All chunks have the same size, so that a program compiles once. The last two
        # chunks may overlap.
        for start in range(0, num_lines, size):
            yield min(start, num_lines - size), size

    def _held_in(
        self, number: int, start: int, size: int, layout: RowLayout
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds the local rows in a chunk, and which of its slots are used."""
        held = self.held[number][layout.row_of(start) : layout.row_of(start + size)]
        return held, held >= 0


class _LinePrograms(NamedTuple):
    """Programs that copy or replace some lines of each shard. Shapes are global.

    `read(lines, start, num_lines=n)` copies lines. `write(lines, new_lines, start)`
    replaces lines in place.
    """

    read: Any
    write: Any


@functools.cache
def _line_programs(plan: EmbeddingPlan, stack: StackPlan) -> _LinePrograms:
    slice_, update = jax.lax.dynamic_slice_in_dim, jax.lax.dynamic_update_slice_in_dim
    spec, everywhere = stack.rows_spec, PartitionSpec()

    def read(lines: jax.Array, start: Any, num_lines: int) -> jax.Array:
        specs = dict(in_specs=(spec, everywhere), out_specs=spec)
        read_shard = functools.partial(slice_, slice_size=num_lines)
        return on_shards(read_shard, plan, **specs)(lines, start)

    specs = dict(in_specs=(spec, spec, everywhere), out_specs=spec)
    write = on_shards(functools.partial(update, axis=0), plan, **specs)
    return _LinePrograms(
        jax.jit(read, static_argnames="num_lines"), jax.jit(write, donate_argnums=0)
    )
