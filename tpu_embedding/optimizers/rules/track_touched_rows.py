"""Records for each row the last update that touched it, for deltas of tables."""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.checks import check_rule
from tpu_embedding.optimizers.modes import TrackTouchedRows, request_mode

RECORD_SLOT: Final = "last_touched"
"""Name of the slot variable, which belongs to no rule."""


class TouchedRowsState(NamedTuple):
    """State of `track_touched_rows`.

    Attributes:
      update_count: int32 scalar, updates so far.
      last_touched: float32 `[rows]`, number of the last update that touched the row,
        from 1; 0: never. Kernels reach slot variables of type float32 only.
      base_step: int32 scalar, `update_count` at the latest export or delta.
      base_id: int32 scalar, identity of that export or delta; 0: there is none.
      inner: state of the wrapped rule.
    """

    update_count: jax.Array
    last_touched: Any
    base_step: jax.Array
    base_id: jax.Array
    inner: Any


def track_touched_rows(
    rule: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Records for each row the last update that touched it.

    `te.functional.touched_rows` lists the rows touched since a step, and
    `te.export.save_delta` writes their values. A row is touched when it is looked up,
    even if its gradient is zero. The updates are those of the wrapped rule, bit for
    bit.

    The record is a slot variable `last_touched`, 4 bytes per row. It is sharded and
    saved like the others. A step reads and writes it for touched rows only.

    Args:
      rule: a row-local optax transformation that updates touched rows only.

    Raises:
      TypeError: if `rule` is no transformation.
      ValueError: when the plan is made, if the rule updates every row.

    Example:
      >>> rule = track_touched_rows(optax.sgd(0.1))
      >>> rows = jnp.ones((3, 2))
      >>> updates, state = rule.update(rows, rule.init(rows), rows)
      >>> state.last_touched.tolist()
      [1.0, 1.0, 1.0]
    """
    check_rule("track_touched_rows", rule)

    def init(params: Any) -> TouchedRowsState:
        # Three arrays: a donated buffer must not occur twice.
        zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return TouchedRowsState(
            update_count=zeros[0],
            last_touched=jax.tree.map(
                lambda rows: jnp.zeros(rows.shape[:1], jnp.float32), params
            ),
            base_step=zeros[1],
            base_id=zeros[2],
            inner=rule.init(params),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if jax.tree.leaves(updates):
            request_mode(TrackTouchedRows())
        count = state.update_count + 1
        # Written as a sum, which the layer adds to rows in place.
        last_touched = jax.tree.map(
            lambda old: old + (count.astype(jnp.float32) - old), state.last_touched
        )
        updates, inner = rule.update(updates, state.inner, params)
        return updates, state._replace(
            update_count=count, last_touched=last_touched, inner=inner
        )

    return optax.GradientTransformation(init, update)


def first_step_to_read(step: int) -> float:
    """Returns the minimum of `last_touched` of rows touched after a step.

    A float32 holds steps up to 2**24 exactly. Later steps are rounded, so the bound is
    lowered by more than the roundings: some rows are then listed twice, none is missed.

    Example:
      >>> first_step_to_read(7)
      8.0
    """
    bound = float(step + 1)
    return bound if step < 2**23 else bound * (1 - 2.0**-20)


def without_base(state: Any) -> Any:
    """Returns a state that follows no export, because rows changed outside of updates.

    Args:
      state: state of an optimizer, or any pytree of states.
    """

    def replace(node: Any) -> Any:
        if not is_tracking(node):
            return node
        return node._replace(base_id=0 * node.base_id)

    return jax.tree.map(replace, state, is_leaf=is_tracking)


def with_new_rows_touched(new: Any, state: Any) -> Any:
    """Returns the state of new rows, which count as touched by the next update.

    Args:
      new: state of the rows of new ids.
      state: state of their stack.
    """

    def replace(node: Any, of_stack: Any) -> Any:
        if not is_tracking(node):
            return node
        step = (of_stack.update_count + 1).astype(jnp.float32)
        last_touched = jax.tree.map(lambda x: jnp.full_like(x, step), node.last_touched)
        return node._replace(last_touched=last_touched)

    return jax.tree.map(replace, new, state, is_leaf=is_tracking)


def is_base_of_deltas(slot: str) -> bool:
    """Returns True for the name of a value that says which export deltas follow.

    Example:
      >>> is_base_of_deltas("0/base_step"), is_base_of_deltas("update_count")
      (True, False)
    """
    return slot.rpartition("/")[2] in ("base_step", "base_id")


def is_tracking(node: Any) -> bool:
    """Returns True for a state of `track_touched_rows`."""
    return isinstance(node, TouchedRowsState)
