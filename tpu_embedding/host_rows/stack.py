"""A stack's rows on the host, kept in step with the devices' caches.

Three threads use a `HostStack`. A pipeline's reader plans batches and reads their rows
from the store. The main thread runs the exchanges on the devices in planning order. The
writer writes evicted rows back to the store. Two rules ensure that no update is lost:

1. Devices run exchanges and steps in batch order, and an exchange never evicts a row of
   a batch that may not have trained.
2. The reader waits until the rows it needs have been written back.
"""

import dataclasses
import functools
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tpu_embedding.host_rows.cached_rows import CachedRows, MappedRows
from tpu_embedding.host_rows.exchange import swap_program
from tpu_embedding.host_rows.initial import (
    columns_of,
    file_rows_of_words,
    fill_slots,
    fill_tables,
    measured_state,
    words_of_file_rows,
)
from tpu_embedding.host_rows.planner import BatchPlan, Exchange, Planner
from tpu_embedding.host_rows.store import RowStore
from tpu_embedding.host_rows.worker import ENDING, Worker
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TablePlan
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows, StackContents, TableRange
from tpu_embedding.rows.row_storage import RowStorage
from tpu_embedding.tables.line_exchange import LineExchange, Window
from tpu_embedding.tables.row_stream import (
    ReadTableRows,
    RowBlock,
    blocks_of_rows,
    new_rows,
    read_blocks,
    write_blocks,
)
from tpu_embedding.update.state import abstract_state, slots_of, with_slots

if TYPE_CHECKING:
    from tpu_embedding.host_rows.feed import Feed


_SECONDS_BETWEEN_LOOKS: Final = 0.2
"""Interval at which a waiting reader checks whether the process is exiting."""


@dataclasses.dataclass(frozen=True)
class FetchedRows:
    """A batch's exchanges, with their arrays on the devices.

    Attributes:
      plan: plan of the batch.
      arrays: moves and records of each exchange, for `swap_program`.
    """

    plan: BatchPlan
    arrays: list[tuple[jax.Array, jax.Array]]


class HostStack:
    """All rows of a stack on the host, and the order of exchanges with the devices.

    A `HostStack` is a static field of `CachedRows`. It is equal only to itself, and all
    copies of the rows share it. `CachedRows.version` shows whether a copy is up to
    date.

    Args:
      stack: plan of the stack.
      plan: plan of the layer.

    Attributes:
      stack: plan of the stack.
      plan: plan of the layer.
      slots_per_shard: number of rows that a device caches.
      owner: number of optimizer states made so far.
      feed: the active pipeline, or `None`.
      num_ids: number of unique rows of a batch, summed over all batches so far.
      num_fetched: how many of these rows were not in the cache.
    """

    def __init__(self, stack: StackPlan, plan: EmbeddingPlan):
        self.stack, self.plan = stack, plan
        self.slots_per_shard = stack.layout.num_rows
        self.owner = 0
        self.feed: Feed | None = None
        self.num_ids = self.num_fetched = 0
        self._columns = columns_of(stack)
        # By column of the records: the table, then each slot variable.
        self._versions = np.full(len(self._columns), secrets.randbits(30), np.int32)
        self._is_filled = [False] * len(self._columns)
        self._is_verified = False
        self._executed = self._landed = -1
        self._planned: list[BatchPlan] = []
        self._error: BaseException | None = None
        self._lost_reads: BaseException | None = None
        self._changed = threading.Condition()

    def __deepcopy__(self, memo: Any) -> "HostStack":
        return self

    @functools.cached_property
    def store(self) -> RowStore:
        """Records of all rows. Each holds the table's row, then its slot variables."""
        directory = self.stack.storage.directory  # type: ignore[attr-defined]
        return RowStore(self.stack.num_rows, self._columns[-1].stop, directory)

    @functools.cached_property
    def planner(self) -> Planner:
        """The planner that decides which rows are cached."""
        names = [table.name for table in self.stack.tables]
        return Planner(
            self.stack.num_rows,
            self.stack.num_shards,
            self.slots_per_shard,
            name=f"stack {self.stack.name!r} (tables {names})",
        )

    @functools.cached_property
    def _held(self) -> np.ndarray:
        """The stack row in each cache slot, by place; -1 for empty slots."""
        return np.full(self.slots_per_shard * self.stack.num_shards, -1, np.int32)

    @functools.cached_property
    def _writer(self) -> Worker:
        return Worker("host_rows_writer")

    def init_rows(self, key: jax.Array) -> MappedRows:
        """Fills the store with new rows, and returns an empty cache."""
        rows = self.empty_rows()
        if not isinstance(rows.lines, Tracer):  # Tracers only need shapes.
            fill_tables(self.store, self.stack, self.plan, key)
            self._is_filled[0] = True
        return rows

    def empty_rows(self) -> MappedRows:
        """Returns an empty cache of the table."""
        layout = self.stack.layout
        return MappedRows(
            lines=self._full(layout.lines_shape, 0, layout.stored_dtype),
            version=self._full((1,), self._versions[0]),
            slot_of_row=self._full((self.stack.rows_per_shard,), -1),
            num_lost=self._full((1,), 0),
            layout=layout,
            host=self,
            column=0,
        )

    def empty_slot(self, column: int) -> CachedRows:
        """Returns an empty cache of a slot variable."""
        row = self.stack.slots[column - 1]
        layout = self.stack.layout.slot_layout(row)
        return CachedRows(
            lines=self._full(layout.lines_shape, 0, row.dtype),
            version=self._full((1,), self._versions[column]),
            layout=layout,
            host=self,
            column=column,
            owner=self.owner,
        )

    def _full(
        self, shape: tuple[int, ...], value: Any, dtype: Any = jnp.int32
    ) -> jax.Array:
        """Returns an array with one value in all elements, `shape` per shard."""
        sharding = self.plan.rows_sharding(self.stack)
        shape = (self.stack.num_shards * shape[0], *shape[1:])
        return jnp.full(shape, value, dtype, device=sharding)

    def init_state(self, table: MappedRows, kept: Any) -> Any:
        """Fills the store with new slot variables, and returns the optimizer state.

        Overwrites the slot variables of an earlier state, which becomes invalid. Given
        the current state as `kept`, it keeps the slot variables and only adds up the
        totals.
        """
        stack: Any = self.stack
        if kept is not None:
            self._flush(table)
            slot_at = slots_of(kept).__getitem__
            return measured_state(self.store, stack, self.plan, slot_at)
        if not isinstance(table.lines, Tracer):  # Tracers only need shapes.
            self._check_filled(0)
            self.claim(None)  # Readers may have read old slot variables.
            self._flush(table)
            self.owner += 1
            self._is_filled = [True] * len(self._columns)
            state = fill_slots(
                self.store, stack, self.plan, lambda i: self.empty_slot(i + 1)
            )
            return with_slots(state, [self._reloaded(x) for x in slots_of(state)])
        state = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_state(stack)
        )
        slots = [self.empty_slot(i + 1) for i in range(len(stack.slots))]
        return with_slots(state, slots)

    # A pipeline calls claim, then fetch in its reader, and exchange in the main thread.

    def claim(self, feed: "Feed | None") -> None:
        """Makes a pipeline the active one; undoes the plans of the previous pipeline.

        The previous pipeline's last two batches stay cached until it resumes.
        """
        if feed is not None:
            self._is_verified = False
        before, self.feed = self.feed, feed
        if before is not None:
            before.stop()
        self.planner.undo(self._planned, self._executed)
        self._planned.clear()
        if before is not None and feed is not None:
            before.pin(self)

    def fetch(self, rows: np.ndarray, stopped: threading.Event) -> FetchedRows:
        """Plans the next batch and reads its missing rows. Called in the reader.

        Args:
          rows: the batch's sorted unique stack rows.
          stopped: set when the batch is no longer needed.
        """
        plan = self.planner.plan(rows)
        self._planned.append(plan)

        def is_over() -> bool:
            has_landed = self._landed >= plan.wait_for
            return has_landed or stopped.is_set() or ENDING.is_set()

        with self._changed:
            while not self._changed.wait_for(is_over, _SECONDS_BETWEEN_LOOKS):
                pass
        if self._landed < plan.wait_for or stopped.is_set():  # No longer needed.
            return FetchedRows(plan, [])
        return FetchedRows(plan, list(map(self._send, plan.exchanges)))

    def wake(self) -> None:
        """Makes a waiting reader check whether it was stopped."""
        with self._changed:
            self._changed.notify_all()

    def _send(self, exchange: Exchange) -> tuple[jax.Array, jax.Array]:
        records = self.store.read(exchange.fetched_rows.reshape(-1))
        moves = np.stack([exchange.slots, exchange.fetched, exchange.evicted], axis=1)
        sharding = self.plan.rows_sharding(self.stack)
        return jax.device_put((moves.reshape(-1), records), sharding)

    def check(
        self,
        table: MappedRows,
        state: Any,
        lost_reads: Any,
        fetched: FetchedRows | None = None,
    ) -> None:
        """Checks the rows before an exchange.

        Stale copies and lost updates are only known after the devices have run the
        steps so far. The writer checks for them, and the next `check` or the end of the
        loop raises the error.

        Args:
          table: rows of the table.
          state: optimizer state, or `None` if the table has no optimizer.
          lost_reads: int32 scalar, reads of missing rows since the last check.
          fetched: the next exchanges, from `fetch`, or `None` at the end.
        """
        self.check_error()
        slots = slots_of(state)
        if fetched is not None:
            self._check_order(fetched, table, slots)
        versions = [rows.version for rows in (table, *slots)]
        facts = _facts_of(versions, table.num_lost, lost_reads)
        expected = self._versions[: len(versions), None].copy()
        self._writer.submit(self._check_facts, facts, expected)

    def _check_order(
        self, fetched: FetchedRows, table: MappedRows, slots: Sequence[Any]
    ) -> None:
        if not self._planned or self._planned[0] is not fetched.plan:
            raise self._wrong_order()
        num_slots = len(self.stack.slots) if any(self._is_filled[1:]) else 0
        if [slot.owner for slot in slots] != [self.owner] * num_slots:
            raise ValueError(
                f"host_rows got {len(slots)} slot variables for {self._owner}, but the "
                f"latest optimizer of these tables has {num_slots} of its own. Pass "
                "the model together with the optimizer that was made last for it."
            )
        if not self._is_verified:  # Waits for the devices, so once per pipeline.
            for rows in (table, *slots):
                self._check_filled(rows.column)
                self.check_current(rows)
            self._is_verified = True

    def check_brought(self, fetched: FetchedRows) -> None:
        """Raises if a batch is drawn before the previous batch's rows were brought."""
        if fetched.plan.batch > self._executed:
            raise self._wrong_order()

    def _wrong_order(self) -> ValueError:
        return ValueError(
            f"Rows of {self._owner} must be brought once for each batch, before the "
            "next batch is drawn. Call bring first in the body of the loop over "
            "host_rows."
        )

    def exchange(
        self, table: MappedRows, state: Any, fetched: FetchedRows
    ) -> tuple[MappedRows, Any]:
        """Brings the next batch's rows to the devices.

        Args:
          table: rows of the table, after `check`; donated.
          state: optimizer state, or `None` if the table has no optimizer; donated.
          fetched: the batch's exchanges, from `fetch`.
        """
        plan = self._planned.pop(0)
        self._executed = plan.batch
        slots: Any = slots_of(state)
        left, swap = [], swap_program(self.plan.hardware)
        try:
            for exchange, arrays in zip(plan.exchanges, fetched.arrays, strict=True):
                table, slots, records = swap(table, slots, *arrays, self.plan)
                records.copy_to_host_async()
                left.append((exchange.evicted_rows.reshape(-1), records))
                self._versions += 1
                shard, lane = np.nonzero(exchange.fetched_rows >= 0)
                places = exchange.slots[shard, lane] * self.stack.num_shards + shard
                self._held[places] = exchange.fetched_rows[shard, lane]
        except BaseException as error:  # The donated arrays are gone.
            self._error = self._error or self._incomplete(error)
            self._landed = plan.batch
            raise
        self.num_ids += plan.num_rows
        self.num_fetched += plan.num_fetched
        self._writer.submit(self._write_back, plan.batch, left)
        return table, with_slots(state, slots)

    def _write_back(self, batch: int, left: Sequence[tuple[Any, Any]]) -> None:
        """Writes evicted rows to the store. Called in the writer."""
        try:
            for rows, records in left:
                records = np.asarray(records)
                if self._error is None:  # Else they may come from a stale copy.
                    self._write_records(rows, records)
        except BaseException as error:
            self._error = self._error or error
        with self._changed:
            self._landed = batch
            self._changed.notify_all()

    def _write_records(self, rows: np.ndarray, records: np.ndarray) -> None:
        num_words = records.shape[1]
        if num_words == self._columns[-1].stop:
            self.store.write(rows, records)
        else:  # Without an optimizer, slot variables in the store must not change.
            rows, records = rows[rows >= 0], records[rows >= 0]
            self.store.write_words(rows, records, slice(0, num_words))

    def _check_facts(self, facts: jax.Array, expected: np.ndarray) -> None:
        try:
            *versions, lost_changes, (lost_reads, *_) = np.asarray(facts)
        except BaseException as error:  # A step has failed on the devices.
            self._error = self._error or self._incomplete(error)
            return
        if (versions != expected).any():
            self._error = ValueError(self._stale())
        elif lost_changes.any():
            self._error = self._lost(lost_reads, lost_changes.sum())
        elif lost_reads:
            self._lost_reads = self._lost(lost_reads, 0)

    def _lost(self, reads: int, changes: int) -> ValueError:
        end = " Continue from a checkpoint." if changes else ""
        return ValueError(
            f"Steps read {reads} and changed {changes} rows of {self._owner} that were "
            "not on their device: lookups gave NaN, and changes are lost. Look up only "
            "what features_of of te.host_rows returns, and train on each batch before "
            f"drawing the third one after it.{end}"
        )

    def end_writer(self) -> None:
        """Ends the writer after its queued calls. The next write starts a new one."""
        if writer := vars(self).pop("_writer", None):
            writer.wait()
            writer.close()

    def check_error(self, wait: bool = False) -> None:
        """Raises an error that the writer found.

        After an error that lost updates, every call raises it until all rows are
        replaced.

        Args:
          wait: whether to wait for the writer first.
        """
        if wait and "_writer" in vars(self):
            self._writer.wait()
        error, self._lost_reads = self._error or self._lost_reads, None
        if error is not None:
            raise error

    def _is_old(self, rows: Any) -> bool:
        version, expected = rows.version, self._versions[rows.column]
        is_old = version.is_deleted() or (np.asarray(version) != expected).any()
        return is_old or (rows.column > 0 and rows.owner != self.owner)

    def check_current(self, rows: Any) -> None:
        """Raises if rows are older than the latest exchange, or have lost updates."""
        self.check_error(wait=True)
        if self._is_old(rows):
            raise ValueError(self._stale())
        if isinstance(rows, MappedRows) and np.asarray(rows.num_lost).any():
            self._error = self._lost(0, int(np.asarray(rows.num_lost).sum()))
            raise self._error

    def _check_filled(self, column: int) -> None:
        if not self._is_filled[column]:
            raise ValueError(
                f"{self._owner} were made inside jax.jit, nnx.jit or jax.eval_shape, "
                "which can't fill the host's memory. Make the model outside of "
                "jax.jit, or restore it with te.restore."
            )

    @property
    def _owner(self) -> str:
        names = [table.name for table in self.stack.tables]
        return f"tables {names} with te.HostRows"

    def _incomplete(self, error: BaseException | None = None) -> ValueError:
        return ValueError(
            f"Rows of {self._owner} are incomplete, because an exchange or a restore "
            f"failed ({error!r}). Restore a checkpoint with te.restore."
        )

    def _stale(self) -> str:
        return (
            f"Cached rows of {self._owner} must come from the latest exchange, but "
            "these are older, for example from a copy of the model or from another "
            "checkpointer. Use the model that te.host_rows trains, and save it with "
            "te.save."
        )

    # Streams over all rows, for checkpoints, exports and users.

    def read_windows(
        self, rows: CachedRows, windows: Sequence[Window], exchange: LineExchange
    ) -> Iterator[list[RowBlock]]:
        """Flushes the cached rows, then yields the windows' blocks."""
        self._check_filled(rows.column)
        self.check_current(rows)  # Even if nothing is cached.
        self._flush(rows)
        column = self._columns[rows.column]
        for window in windows:
            end = window.start + window.num_rows
            words = self.store.read_range(window.start, end, column)
            yield list(blocks_of_rows(file_rows_of_words(words, exchange.row), window))

    def write_windows(
        self,
        rows: CachedRows,
        windows: Sequence[Window],
        exchange: LineExchange,
        read: ReadTableRows,
    ) -> CachedRows:
        """Replaces the windows' rows on the host, then in the cache.

        If this fails, all rows must be replaced, for example by `te.restore`. If the
        arrays of `rows` are only shapes, the cache starts empty.
        """
        if isinstance(rows.lines, jax.ShapeDtypeStruct):
            if isinstance(rows, MappedRows):
                self.empty()
                rows = self.empty_rows()
            else:
                rows = self.empty_slot(rows.column)
        self.claim(None)  # Readers may have read old rows.
        num_rows = sum(table.num_rows for table in self.stack.tables)
        num_new = sum(block.num_rows for window in windows for block in window.blocks)
        is_partial = num_new < num_rows
        is_table = isinstance(rows, MappedRows)
        if is_partial or not is_table or not (self._error or self._is_old(rows)):
            self._flush(rows)
        else:
            self.empty()
            no_slots = jnp.full_like(rows.slot_of_row, -1)
            rows = dataclasses.replace(rows, slot_of_row=no_slots)
        column = self._columns[rows.column]
        self._error = self._incomplete()
        for window in windows:
            words = words_of_file_rows(new_rows(window, exchange, read))
            self.store.write_range(window.start, words, column)
        self._is_filled[rows.column] |= not is_partial
        rows = self._reloaded(rows)
        self._error = None
        return rows

    def empty(self) -> None:
        """Marks all cache slots as empty, without writing their rows to the store."""
        self.claim(None)
        self.end_writer()  # Otherwise it would later write old rows to the store.
        self._held.fill(-1)
        self._versions += 1
        self.planner.reset(self._executed + 1)

    def _flush(self, rows: CachedRows) -> None:
        """Writes the cached rows of a table or slot variable to the store."""
        with self._changed:
            self._changed.wait_for(lambda: self._landed == self._executed)
        self.check_error()
        if not (self._held >= 0).any():
            return
        self.check_current(rows)
        column = self._columns[rows.column]
        cache, cached = self._cache(rows)
        for blocks in read_blocks(cached, cache, self.plan):
            for _, start, values in blocks:
                held = self._held[start : start + len(values)]
                is_used = held >= 0
                words = words_of_file_rows(values[is_used])
                self.store.write_words(held[is_used], words, column)

    def _reloaded(self, rows: Any) -> Any:
        """Returns cached rows with the store's values, as a new version."""
        row, column = file_row(rows), self._columns[rows.column]
        cache, cached = self._cache(rows)

        def read(table: str, start: int, num_rows: int) -> np.ndarray:
            held = self._held[start : start + num_rows]
            words = self.store.read(held)[:, column]
            return file_rows_of_words(words, row)

        if (self._held >= 0).any():
            cached = write_blocks(cached, cache, self.plan, read)
        self._versions[rows.column] += 1
        version = self._full((1,), self._versions[rows.column])
        rows = dataclasses.replace(rows, lines=cached.lines, version=version)
        if isinstance(rows, MappedRows):
            rows = dataclasses.replace(rows, num_lost=jnp.zeros_like(rows.num_lost))
        return rows

    def _cache(self, rows: CachedRows) -> tuple[StackPlan, PackedRows]:
        """Returns cached rows by slot, as a stack of one table."""
        stack, num_rows = self.stack, len(self._held)
        contents = StackContents((TableRange("cache", 0, num_rows),), stack.num_shards)

        table: TablePlan = dataclasses.replace(
            stack.tables[0], name="cache", row_offset=0, num_rows=num_rows
        )
        cache = dataclasses.replace(
            stack,
            tables=(table,),
            rows_per_shard=self.slots_per_shard,
            layout=dataclasses.replace(stack.layout, contents=contents),
            storage=RowStorage(),
        )
        layout = dataclasses.replace(rows.layout, contents=contents)
        return cache, PackedRows(lines=rows.lines, layout=layout)


@jax.jit
def _facts_of(versions: list[Any], num_lost: Any, lost_reads: Any) -> jax.Array:
    return jnp.stack([*versions, num_lost, jnp.full_like(num_lost, lost_reads)])
