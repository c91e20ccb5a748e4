"""A stack's rows on the host, kept in step with the caches on devices.

Four threads use a `HostStack`: a pipeline's planner and reader, the main thread, which
runs exchanges, and a writer. Two rules ensure that no update is lost:

1. Devices run exchanges and steps in batch order, and no exchange evicts a row that an
   untrained batch needs.
2. The reader waits until the rows that it needs have been written back.
"""

import dataclasses
import functools
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tpu_embedding.host_rows.cached_rows import CachedRows, MappedRows
from tpu_embedding.host_rows.exchange import swap_program
from tpu_embedding.host_rows.initial import fill_slots, fill_tables, measured_state
from tpu_embedding.host_rows.messages import exchange_values
from tpu_embedding.host_rows.own_shards import Exchange, OwnShards
from tpu_embedding.host_rows.planner import BatchPlan
from tpu_embedding.host_rows.worker import ENDING, Worker
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows, round_up
from tpu_embedding.tables.line_exchange import LineExchange, Window
from tpu_embedding.tables.row_stream import (
    ReadTableRows,
    Receivers,
    RowBlock,
    read_windows,
    write_windows,
)
from tpu_embedding.update.state import abstract_state, slots_of, with_slots

if TYPE_CHECKING:
    from tpu_embedding.host_rows.feed import Feed


_SECONDS_BETWEEN_LOOKS: Final = 0.2
"""Interval at which a waiting reader checks whether the process is exiting."""


@dataclasses.dataclass(frozen=True)
class FetchedRows:
    """A batch's plans and exchanges for own shards. Their arrays are on the devices."""

    plans: list[BatchPlan]
    exchanges: list[Exchange]
    num_exchanges: int  # The most that any process needs for the batch.


class HostStack:
    """All rows of a stack on the host, and the order of exchanges with the devices.

    It equals only itself, because all copies of `CachedRows` share it as a static
    field.

    Attributes:
      owner: number of optimizer states made so far.
      feed: the active pipeline.
      exchange_rows: K, the rows per shard in an exchange. 0 until a batch has rows.
      num_ids: unique rows, summed over batches and own shards.
      num_fetched: how many of the `num_ids` rows were not cached.
    """

    def __init__(self, stack: StackPlan, plan: EmbeddingPlan):
        self.stack, self.plan = stack, plan
        self.shards = OwnShards(stack, plan)
        self.owner = self.exchange_rows = 0
        self.feed: Feed | None = None
        self._paused: list[Feed] = []
        self.num_ids = self.num_fetched = 0
        # `_versions` and `_is_filled` have an entry per column of the records: the
        # table, then slot variables.
        num_columns = len(self.shards.columns)
        # A random number, so that copies from another run are stale. It is the same in
        # all processes.
        first = exchange_values("host_rows_version", secrets.randbits(30), plan)[0]
        self._versions = np.full(num_columns, first, np.int32)
        self._is_filled = [False] * num_columns
        self._is_empty = True
        self._is_verified = False
        # The latest batch whose exchanges ran, and the latest batch whose evicted rows
        # are in the stores.
        self._executed = self._landed = -1
        # Appended by the planner's thread, popped by the main thread.
        self._planned: list[list[BatchPlan]] = []
        self._error: BaseException | None = None
        self._lost_reads: BaseException | None = None
        self._empty_exchange: Exchange | None = None
        self._changed = threading.Condition()

    def __deepcopy__(self, memo: Any) -> "HostStack":
        return self  # `version` tells which copy of a model is up to date.

    @functools.cached_property
    def _writer(self) -> Worker:
        return Worker("host_rows_writer")

    def init_rows(self, key: jax.Array) -> MappedRows:
        """Fills the stores with new rows, and returns an empty cache."""
        rows = self.empty_rows()
        if not isinstance(rows.lines, Tracer):  # Tracers only need shapes.
            fill_tables(self.shards, self.plan, key)
            self._is_filled[0] = True
        return rows

    def empty_rows(self) -> MappedRows:
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
        sharding = self.plan.rows_sharding(self.stack)
        shape = (self.stack.num_shards * shape[0], *shape[1:])
        return jnp.full(shape, value, dtype, device=sharding)

    def init_state(self, table: MappedRows, kept: Any) -> Any:
        """Makes an optimizer state, with new slot variables unless a state is `kept`.

        New slot variables make earlier states invalid. With `kept`, its slot variables
        stay in use, and only totals are computed again.
        """
        stack: Any = self.stack
        if kept is not None:
            self._flush(table)  # Totals are summed over the stores.
            slot_at = slots_of(kept).__getitem__
            return measured_state(self.shards, self.plan, slot_at)
        if not isinstance(table.lines, Tracer):
            self._check_filled(0)
            self.claim(None)  # Readers may have read old slot variables.
            self._flush(table)
            self.owner += 1  # Makes earlier slot variables stale.
            self._is_filled = [True] * len(self._is_filled)
            slot_at = lambda i: self.empty_slot(i + 1)  # noqa: E731
            state = fill_slots(self.shards, self.plan, slot_at)
            return with_slots(state, [self._reloaded(x) for x in slots_of(state)])
        state = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_state(stack)
        )
        slots = [self.empty_slot(i + 1) for i in range(len(stack.slots))]
        return with_slots(state, slots)

    # A pipeline calls claim, then plan_batch and fetch in threads, and exchange in the
    # main thread.

    def claim(self, feed: "Feed | None") -> None:
        """Activates a pipeline, and undoes the plans of the previous pipeline."""
        if feed is not None:
            self._is_verified = False
        before, self.feed = self.feed, feed
        if before is not None:
            before.stop()  # Waits for its threads, so `_planned` no longer changes.
            self._paused.append(before)
        for plans in reversed(self._planned):
            for planner, plan in zip(self.shards.planners, plans, strict=True):
                planner.undo(plan)
        self._planned.clear()
        self._paused = [x for x in self._paused if x is not feed and not x.is_closed]
        for planner in self.shards.planners:
            planner.unpin_all()
        # A paused loop may still train on the last two batches that it drew.
        for paused in self._paused:
            paused.pin(self)

    def plan_batch(self, rows: Sequence[np.ndarray]) -> list[BatchPlan]:
        plans = self.shards.plan(rows)
        self._planned.append(plans)
        return plans

    def agree(self, most_rows: int, most_fetched: int) -> int:
        """Counts a batch's exchanges, from the maxima over all processes' shards."""
        if not self.exchange_rows and most_rows:
            # Half the rows on the busiest shard, because usually fewer rows are
            # missing. After that, K never changes, since each new size would recompile
            # the exchange.
            slots = round_up(self.stack.layout.num_rows, 8)
            self.exchange_rows = min(round_up(-(-most_rows // 2), 256), slots)
        return -(-most_fetched // self.exchange_rows) if most_fetched else 0

    def fetch(
        self, plans: Sequence[BatchPlan], stopped: threading.Event
    ) -> list[Exchange]:
        """Reads the uncached rows of a planned batch, unless `stopped`."""
        # Rule 2: some of these rows may have left in batch `wait_for`. Until they are
        # written back, the stores have old values.
        wait_for = max(plan.wait_for for plan in plans)

        def is_over() -> bool:
            return self._landed >= wait_for or stopped.is_set() or ENDING.is_set()

        with self._changed:
            while not self._changed.wait_for(is_over, _SECONDS_BETWEEN_LOOKS):
                pass
        if self._landed < wait_for or stopped.is_set():
            return []
        size, most = self.exchange_rows, max(len(plan.fetched) for plan in plans)
        numbers = range(-(-most // size) if most else 0)
        return [self.shards.exchange_of(plans, number, size) for number in numbers]

    def wake(self) -> None:
        """Makes a waiting reader check whether it was stopped."""
        with self._changed:
            self._changed.notify_all()

    def check(
        self,
        table: MappedRows,
        state: Any,
        lost_reads: Any,
        fetched: FetchedRows | None = None,
    ) -> None:
        """Checks the rows before an exchange, or at the end if `fetched` is None.

        `lost_reads`, an int32 scalar, counts uncached rows that were read since the
        last check.
        """
        slots = slots_of(state)
        if fetched is not None:
            self._check_order(fetched, table, slots)
        versions = [rows.version for rows in (table, *slots)]
        facts = _facts_program(self.plan, self.stack)(
            versions, table.num_lost, lost_reads
        )
        # Stale copies and lost updates are only known after the devices have run the
        # steps so far. So the writer looks for them, and the pipeline raises the
        # writer's error in the next turn or at the end. The writer looks before it
        # writes the rows that this exchange evicts, which may come from a stale copy.
        # `_versions` changes in place, so copy it.
        expected = self._versions[: len(versions), None].copy()
        self._writer.submit(self._check_facts, facts, expected)

    def _check_order(
        self, fetched: FetchedRows, table: MappedRows, slots: Sequence[Any]
    ) -> None:
        if not self._planned or self._planned[0] is not fetched.plans:
            raise self._wrong_order()
        num_slots = len(self.stack.slots) if any(self._is_filled[1:]) else 0
        if [slot.owner for slot in slots] != [self.owner] * num_slots:
            raise ValueError(
                f"host_rows got {len(slots)} slot variables for {self._owner}, but the "
                f"latest optimizer of these tables has {num_slots} of its own. Pass "
                "the model together with the optimizer that was made last for it."
            )
        if not self._is_verified:  # Once per pipeline, as it waits for devices.
            for rows in (table, *slots):
                self._check_filled(rows.column)
                self.check_current(rows)
            self._is_verified = True

    def check_brought(self, fetched: FetchedRows) -> None:
        """Raises if the next batch is drawn before these rows were brought."""
        if fetched.plans[0].batch > self._executed:
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
        """Brings fetched rows to the devices. Donates table and state."""
        plans = self._planned.pop(0)
        batch = self._executed = plans[0].batch
        slots: Any = slots_of(state)
        left, swap = [], swap_program(self.plan.hardware)
        none = fetched.num_exchanges - len(fetched.exchanges)
        try:
            for exchange in [*fetched.exchanges, *[self._nothing(plans)] * none]:
                table, slots, records = swap(table, slots, *exchange.arrays, self.plan)
                for part in self.shards.parts_of(records):
                    part.copy_to_host_async()
                left.append((exchange, records))
                self._versions += 1
                self._is_empty = False
                for held, slot, rows in zip(
                    self.shards.held, exchange.slots, exchange.fetched, strict=True
                ):
                    held[slot] = rows
        except BaseException as error:  # The donated arrays are gone.
            self._error = self._error or self._incomplete(error)
            # Nothing will be written, so the reader must not wait for this batch. The
            # writer marks it as landed in order, after earlier batches.
            self._writer.submit(self._write_back, batch, ())
            raise
        self.num_ids += sum(plan.num_rows for plan in plans)
        self.num_fetched += sum(len(plan.fetched) for plan in plans)
        self._writer.submit(self._write_back, batch, left)
        return table, with_slots(state, slots)

    def _nothing(self, plans: Sequence[BatchPlan]) -> Exchange:
        """Makes an exchange without rows."""
        # A process that needs fewer exchanges must still run the program.
        if self._empty_exchange is None:
            last = self.stack.layout.num_rows
            self._empty_exchange = self.shards.exchange_of(
                plans, last, self.exchange_rows
            )
        return self._empty_exchange

    def _write_back(
        self, batch: int, left: Sequence[tuple[Exchange, jax.Array]]
    ) -> None:
        try:
            for exchange, records in left:
                if self._error is None:  # Otherwise, rows may be stale.
                    self.shards.write(exchange, records)
        except BaseException as error:
            self._error = self._error or error
        # Runs also after an error, or the reader and `_flush` would wait forever.
        with self._changed:
            self._landed = batch
            self._changed.notify_all()

    def _check_facts(self, facts: jax.Array, expected: np.ndarray) -> None:
        try:
            parts = self.shards.parts_of(facts)
            *versions, lost_changes, (lost_reads, *_) = np.concatenate(parts).T
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
        """Ends the writer after its queued calls. The next write starts it again."""
        if writer := vars(self).pop("_writer", None):
            writer.wait()
            writer.end()

    def wait_for_writer(self) -> None:
        if "_writer" in vars(self):
            self._writer.wait()

    def check_error(self) -> None:
        """Raises an error that the writer found."""
        # Lost reads raise only once. After lost updates, each call raises until all
        # rows are replaced.
        error, self._lost_reads = self._error or self._lost_reads, None
        if error is not None:
            raise error

    def _is_old(self, rows: Any) -> bool:
        # An exchange donates its arrays, so arrays of an older copy may be deleted.
        version, expected = rows.version, self._versions[rows.column]
        if version.is_deleted() or (rows.column > 0 and rows.owner != self.owner):
            return True
        return any(np.asarray(x) != expected for x in self.shards.parts_of(version))

    def check_current(self, rows: Any) -> None:
        """Raises if rows are older than the latest exchange, or have lost updates."""
        self.wait_for_writer()
        self.check_error()
        if self._is_old(rows):
            raise ValueError(self._stale())
        if isinstance(rows, MappedRows):
            num_lost = sum(
                int(np.asarray(x)[0]) for x in self.shards.parts_of(rows.num_lost)
            )
            if num_lost:
                self._error = self._lost(0, num_lost)
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

    # These methods stream over all rows, for checkpoints, exports and users.

    def read_windows(
        self,
        rows: CachedRows,
        windows: Sequence[Window],
        exchange: LineExchange,
        receivers: Receivers,
    ) -> Iterator[list[RowBlock]]:
        self._check_filled(rows.column)
        self.check_current(rows)  # Even if nothing is cached.
        self._flush(rows)
        for first, near, facts in _near_windows(windows, exchange):
            lines = self.shards.lines_of_rows(first, facts.layout, rows.column)
            block = PackedRows(lines=lines, layout=facts.layout)
            yield from read_windows(block, facts, near, receivers)

    def write_windows(
        self,
        rows: CachedRows,
        windows: Sequence[Window],
        exchange: LineExchange,
        read: ReadTableRows,
    ) -> CachedRows:
        """Replaces windows on the host, then in the cache.

        If this fails, all rows must be replaced, for example with `te.restore`. If the
        arrays in `rows` are only shapes, the cache starts empty.
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
        # Other processes may have no error, but must run the same programs.
        is_lost = bool(self._error or self._is_old(rows))
        is_lost = any(exchange_values("host_rows_lost", is_lost, self.plan))
        if is_partial or not is_table or not is_lost:
            self._flush(rows)
        else:  # A whole new table replaces lost rows, so don't save cached rows.
            self.empty()
            no_slots = jnp.full_like(rows.slot_of_row, -1)
            rows = dataclasses.replace(rows, slot_of_row=no_slots)
        self._error = self._incomplete()  # This error stays if a write fails halfway.
        for first, near, facts in _near_windows(windows, exchange):
            lines = self.shards.lines_of_rows(first, facts.layout, rows.column)
            block = PackedRows(lines=lines, layout=facts.layout)
            block = write_windows(block, facts, near, read)
            self.shards.write_rows(first, block.lines, facts.layout, rows.column)
        self._is_filled[rows.column] |= not is_partial
        rows = self._reloaded(rows)
        self._error = None
        return rows

    def empty(self) -> None:
        """Empties all cache slots, without writing their rows to the stores."""
        self.claim(None)
        self.end_writer()  # Otherwise it would later write old rows to the stores.
        self._is_empty = True
        self._versions += 1
        for held, planner in zip(self.shards.held, self.shards.planners, strict=True):
            held.fill(-1)
            planner.reset(self._executed + 1)

    def _flush(self, rows: CachedRows) -> None:
        """Writes cached rows to the stores."""
        with self._changed:
            self._changed.wait_for(lambda: self._landed == self._executed)
        self.check_error()
        if not self._is_empty:
            self.check_current(rows)
            self.shards.save_cache(rows, rows.column)

    def _reloaded(self, rows: Any) -> Any:
        """Reads cached rows from the stores again, as a new version."""
        lines = (
            rows.lines if self._is_empty else self.shards.load_cache(rows, rows.column)
        )
        self._versions[rows.column] += 1
        version = self._full((1,), self._versions[rows.column])
        rows = dataclasses.replace(rows, lines=lines, version=version)
        if isinstance(rows, MappedRows):
            rows = dataclasses.replace(rows, num_lost=jnp.zeros_like(rows.num_lost))
        return rows


def _near_windows(
    windows: Iterable[Window], exchange: LineExchange
) -> Iterator[tuple[int, list[Window], LineExchange]]:
    """Groups neighboring windows. A group has about one window per device.

    For each group, yields its first local row, then its windows and facts, shifted to a
    stack that begins at this row.
    """
    num_shards = exchange.num_shards
    layout = dataclasses.replace(exchange.layout, num_rows=exchange.window_rows + 1)
    facts = dataclasses.replace(exchange, layout=layout)
    near: list[Window] = []
    for window in [*windows, None]:
        begin = near[0].start if near else 0
        end = begin + exchange.window_rows * num_shards
        if near and (window is None or window.start + window.num_rows > end):
            first = begin // num_shards
            shift = first * num_shards
            moved = [dataclasses.replace(x, start=x.start - shift) for x in near]
            yield first, moved, facts
            near = []
        near += [window] if window else []


@functools.cache
def _facts_program(plan: EmbeddingPlan, stack: StackPlan) -> Any:
    """Makes a program that stacks facts by shard, int32 `[shards, facts]`."""

    def stacked(versions: list[Any], num_lost: Any, lost_reads: Any) -> jax.Array:
        lost = jnp.full_like(num_lost, lost_reads)
        return jnp.stack([*versions, num_lost, lost], axis=1)

    return jax.jit(stacked, out_shardings=plan.rows_sharding(stack))
