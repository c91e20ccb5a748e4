"""Writes updated rows to a table in its storage dtype.

Updates are added to a float32 table. For a narrow table, such as bfloat16, the sum is
computed in float32 and then rounded up or down at random, so that the mean over many
steps is exact. Rounding to the nearest number would lose every update below half a unit
of the dtype, and small gradients would never change the row.

The random bits are a hash of the step, the table's name, the row and the element, so
rounding does not depend on devices, stacking or packing. The step is part of the state:
without it, an element that was rounded back to its old value would get the same bits in
the next step, and would never change.
"""

import dataclasses
import hashlib
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from tpu_embedding.optimizers.table_rows import AllReduce, TableRows
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import (
    add_to_rows,
    gather_rows,
    replace_stored_rows,
    set_rows,
)
from tpu_embedding.rows.narrow_rows import encode_rows, mix_bits, random_bits
from tpu_embedding.rows.packed_rows import PackedRows, load_rows
from tpu_embedding.update.totals import rows_of_stack, tables_of_rows
from tpu_embedding.xla import value_of_range


class RoundedState(NamedTuple):
    """The state of a rule whose table is narrow.

    Attributes:
      step: int32 scalar, updates so far.
      inner: the rule's state.
    """

    step: Array
    inner: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableWriter:
    """Writes a table's rows in one step, and provides facts about them. Per shard.

    Attributes:
      stack: the stack's plan.
      step: `RoundedState.step` of a narrow table, whose rows are rounded
        stochastically. `None` for a float32 table.
      table_sizes: float32 `[tables]`, number of rows to count in each table, or `None`
        for all rows.
    """

    stack: StackPlan
    step: Int[Array, ""] | None = None
    table_sizes: Float[Array, " tables"] | None = None

    def closed(self, state: Any) -> Any:
        """Returns the stack's state after the step, given the rule's state."""
        if self.step is None:
            return state
        return RoundedState(step=self.step + 1, inner=state)

    def known_rows(
        self,
        row_ids: Int[Array, " ids"],
        is_touched: Bool[Array, " ids"],
        all_reduce: AllReduce,
    ) -> TableRows:
        """Returns the facts that the rule may ask about rows; see `tables_of_rows`."""
        known = tables_of_rows(row_ids, is_touched, all_reduce, self.stack)
        if self.table_sizes is not None:
            known = dataclasses.replace(known, table_sizes=self.table_sizes)

        def values_after_adding(old: Array, updates: Array) -> Array:
            stored = self.stored_rows(row_ids, old, updates)
            return load_rows(stored, self.stack.layout)

        return dataclasses.replace(known, stored=values_after_adding)

    def before_rule(self, table: PackedRows, row_ids: Int[Array, " ids"]) -> PackedRows:
        """Sets rows to zero, in place, if the rule sets them without reading them.

        Such a rule returns the difference from the old row. If the old row were NaN,
        the difference would also be NaN. If the old row were large, a small new value
        would be lost to rounding.

        Args:
          table: the rows.
          row_ids: rows that the rule will update, each at most once.
        """
        if not self.stack.optimizer.sets_rows:
            return table
        zeros = jnp.zeros((*row_ids.shape, table.layout.dim), jnp.float32)
        return set_rows(table, row_ids, zeros)

    def add(
        self,
        table: PackedRows,
        row_ids: Int[Array, " ids"],
        updates: Float[Array, "ids dim"],
        occurrence: Int[Array, ""] | int = 0,
    ) -> PackedRows:
        """Adds updates to rows, in place where donated.

        Args:
          table: the rows.
          row_ids: each at most once; ids past the end are dropped.
          updates: values to add.
          occurrence: number of earlier calls in this step for the same rows.
        """
        if self.step is None:
            return add_to_rows(table, row_ids, updates)
        old = gather_rows(table, row_ids)
        stored = self.stored_rows(row_ids, old, updates, occurrence)
        return replace_stored_rows(table, row_ids, stored)

    def stored_rows(
        self,
        row_ids: Int[Array, " ids"],
        old: Float[Array, "ids dim"],
        updates: Float[Array, "ids dim"],
        occurrence: Int[Array, ""] | int = 0,
    ) -> Shaped[Array, "ids _"]:
        """Returns `old + updates` as the table stores rows; see `add`."""
        # An update of 0 must not change an element's bits. Adding 0 would turn -0.0
        # into 0.0, and flush a denormal on a TPU.
        new = jnp.where(updates == 0, old, old + updates)
        if self.step is None:
            return new
        dtype = self.stack.layout.narrow_dtype
        assert dtype is not None
        bits = bits_of_rows(row_ids, self.step, occurrence, self.stack)
        return encode_rows(new, dtype, bits)


def open_state(
    state: Any,
    stack: StackPlan,
    used_rows: Any = None,
) -> tuple[TableWriter, Any]:
    """Returns a step's writer, and the state of the stack's rule. Per shard.

    Args:
      state: the stack's optimizer state.
      stack: the stack's plan.
      used_rows: this shard's part of `used_rows` in the stack's vocabulary.
    """
    is_rounded = isinstance(state, RoundedState)
    writer = TableWriter(
        stack=stack,
        step=state.step if is_rounded else None,
        table_sizes=stack.vocabulary.stacks.table_sizes(used_rows, stack),
    )
    return writer, state.inner if is_rounded else state


def bits_of_rows(
    row_ids: Int[Array, " ids"],
    step: Int[Array, ""],
    occurrence: Int[Array, ""] | int,
    stack: StackPlan,
) -> UInt32[Array, "ids dim"]:
    """Returns random bits for each element of some rows in a step.

    They depend on the step, the table's name, the row within the table, and the
    occurrence.
    """
    _, stack_rows = rows_of_stack(row_ids, stack)
    stack_rows = stack.vocabulary.stacks.rows_on_one_shard(stack_rows, stack)
    stack_rows = stack_rows.astype(jnp.uint32)
    offsets, table_keys = [], []
    for table in stack.tables:
        digest = hashlib.sha256(table.name.encode()).digest()
        offsets.append(table.row_offset)
        table_keys.append(int.from_bytes(digest[:4], "little"))
    rows = stack_rows - value_of_range(stack_rows, offsets, offsets)
    keys = value_of_range(stack_rows, offsets, table_keys)
    number = mix_bits(step.astype(jnp.uint32)) + jnp.uint32(occurrence)
    return random_bits(mix_bits(rows ^ mix_bits(keys ^ mix_bits(number))), stack.dim)
