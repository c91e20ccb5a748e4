"""Lists the rows of tables that updates touched."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tpu_embedding.optimizers.rules.touched_rows import (
    TouchedRowsState,
    first_step_to_read,
    is_tracking,
)
from tpu_embedding.plan.plan import EmbeddingPlan, TrainedStackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.row_blocks import read_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedStack:
    """The record of the touched rows of one stack.

    Attributes:
      stack: the stack.
      state: of `track_touched_rows`.
    """

    stack: TrainedStackPlan
    state: TouchedRowsState

    @property
    def update_count(self) -> int:
        """Updates so far."""
        return int(self.state.update_count)

    def touched_since(self, step: int, plan: EmbeddingPlan) -> dict[str, np.ndarray]:
        """Returns the rows of each table that updates after a step touched."""
        found: dict[str, list[np.ndarray]] = {t.name: [] for t in self.stack.tables}
        for blocks in read_blocks(self._last_touched, self.stack, plan):
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


def _rows_of(state: TouchedRowsState) -> list[PackedRows]:
    """Returns the record; an optimizer of several tables keeps it in a dict."""
    leaves = jax.tree.leaves(
        state.last_touched, is_leaf=lambda x: isinstance(x, PackedRows)
    )
    return [x for x in leaves if isinstance(x, PackedRows)]


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
      >>> slots = te.init_slots(te.init_tables(plan, jax.random.key(0)), plan)
      >>> te.touched_rows(slots, plan)["movie"].tolist()
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
