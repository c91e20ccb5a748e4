"""Lists the rows of tables that updates touched."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.argument_checks import takes
from tpu_embedding.optimizers.rules.track_touched_rows import (
    RECORD_SLOT,
    TouchedRowsState,
    first_step_to_read,
    is_tracking,
)
from tpu_embedding.plan.plan import PLAN, EmbeddingPlan
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.line_exchange import Receivers
from tpu_embedding.tables.row_stream import read_blocks, write_blocks
from tpu_embedding.tables.slot_values import slot_rows, with_slot_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedStack:
    """The record of the touched rows of one stack.

    Attributes:
      stack: the stack.
      state: state of `track_touched_rows`.
    """

    stack: TrainedStackPlan
    state: TouchedRowsState

    @property
    def update_count(self) -> int:
        """Updates so far."""
        return int(self.state.update_count)

    def touched_since(
        self, step: int, plan: EmbeddingPlan, receivers: Receivers = "one"
    ) -> dict[str, np.ndarray]:
        """Returns the rows of each table that updates after a step touched."""
        found: dict[str, list[np.ndarray]] = {t.name: [] for t in self.stack.tables}
        record = self._last_touched
        for blocks in read_blocks(record, self.stack, plan, receivers=receivers):
            for table, start, steps in blocks:
                (places,) = np.nonzero(steps >= first_step_to_read(step))
                found[table].append((start + places).astype(np.int32))
        # Each device serves blocks of its own, so they come in no order.
        return {
            name: np.sort(np.concatenate([np.zeros(0, np.int32), *parts]))
            for name, parts in found.items()
        }

    @property
    def _last_touched(self) -> PackedRows:
        return _rows_of(self.state)[0]


def tracked_stacks(
    slots: Mapping[str, Any], plan: EmbeddingPlan
) -> Iterator[TrackedStack]:
    """Yields the stacks whose optimizer is wrapped by `track_touched_rows`."""
    for stack in plan.trained_stacks:
        nodes = jax.tree.leaves(slots.get(stack.name), is_leaf=is_tracking)
        # `optax.multi_transform` keeps states of other tables, too, without rows.
        tracking = [node for node in nodes if is_tracking(node) and _rows_of(node)]
        for state in tracking[:1]:
            yield TrackedStack(stack=stack, state=state)


def with_touched_tables(
    slots: Mapping[str, Any], tables: Collection[str], plan: EmbeddingPlan
) -> dict[str, Any]:
    """Returns slots in which all rows of some tables count as touched.

    Call it after `with_table_values` without slots, where optimizers track the touched
    rows. The rows count as touched by the next update, so a delta lists them, whether
    or not updates follow. `TPUEmbedding.set_embedding_tables` and imports do it
    themselves.

    Args:
      slots: stack name to optimizer state, from `init_slots`.
      tables: names of tables; those without a record are passed over.
      plan: plan of the embedding layer.

    Example:
      >>> import jax
      >>> import tpu_embedding as te
      >>> rule = te.optimizers.track_touched_rows(te.optimizers.adagrad(0.1))
      >>> table = te.TableConfig(vocabulary_size=3, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer=rule)
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> slots = te.functional.with_touched_tables(slots, ["movie"], plan)
      >>> te.functional.touched_rows(slots, plan)["movie"].tolist()
      [0, 1, 2]
    """
    result = dict(slots)
    for each in tracked_stacks(slots, plan):
        stack, own = each.stack, [t.name for t in each.stack.tables if t.name in tables]
        if own:
            state, next_update = slots[stack.name], np.float32(each.update_count + 1)
            records = {
                name: _filled(record, own, next_update, stack, plan)
                for name, record in slot_rows(state, stack).items()
                if name.rpartition("/")[2] == RECORD_SLOT
            }
            result[stack.name] = with_slot_rows(state, records, stack)
    return result


def _filled(
    record: PackedRows,
    tables: list[str],
    value: np.float32,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> PackedRows:
    """Returns a record with one value in all rows of some tables."""

    def read(table: str, start: int, num_rows: int) -> np.ndarray:
        del table, start
        return np.full(num_rows, value)

    # The caller keeps the old record.
    record = dataclasses.replace(record, lines=jnp.copy(record.lines))
    return write_blocks(record, stack, plan, read, tables)


def _rows_of(state: TouchedRowsState) -> list[PackedRows]:
    """Returns the record; an optimizer of several tables keeps it in a dict."""
    leaves = jax.tree.leaves(
        state.last_touched, is_leaf=lambda x: isinstance(x, PackedRows)
    )
    return [x for x in leaves if isinstance(x, PackedRows)]


@takes("te.functional.", plan=PLAN)
def touched_rows(
    slots: Mapping[str, Any], plan: EmbeddingPlan, since_step: int = 0
) -> dict[str, np.ndarray]:
    """Lists the rows of each table that updates after a step touched.

    Optimizers wrapped by `te.optimizers.track_touched_rows` record the touched rows. A
    row is touched when it is looked up, even if its gradient is zero. The record passes
    through the host in blocks.

    Args:
      slots: stack name to optimizer state, from `init_slots`.
      plan: plan of the embedding layer.
      since_step: number of updates after which rows count; 0: all updates. Steps above
        8 million may list some rows of slightly earlier updates, too.

    Returns:
      Table name to sorted row ids, int32. Tables without a record are missing. Of
      several processes, each gets a part of the rows.

    Raises:
      ValueError: if no optimizer records touched rows, or `since_step` is negative.

    Example:
      >>> import jax
      >>> import tpu_embedding as te
      >>> rule = te.optimizers.track_touched_rows(te.optimizers.adagrad(0.1))
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer=rule)
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> te.functional.touched_rows(slots, plan)["movie"].tolist()
      []
    """
    if since_step < 0:
        raise ValueError(
            f"since_step must be at least 0, the number of past updates, got "
            f"{since_step}."
        )
    tracked = list(tracked_stacks(slots, plan))
    if not tracked:
        raise ValueError(
            "touched_rows needs slots of an optimizer that records touched rows, got "
            "none; wrap it by te.optimizers.track_touched_rows."
        )
    return {
        name: rows
        for each in tracked
        for name, rows in each.touched_since(since_step, plan).items()
    }
