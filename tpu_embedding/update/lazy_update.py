"""Applies any row-local optax transformation to touched rows only.

A rule is written, or taken from optax, as if the table were a dense `[rows, dim]`
array. A `RuleStep` gathers the touched rows of table and slot variables, runs the rule
on them, and updates the slot variables in place. The caller adds the updates to the
table. So rules need not know about row ids, shards, packing or rounds. Values shared by
all rows are computed once per step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from tpu_embedding.optimizers.probe import (
    ProbedRule,
    probe_rule,
    rates_are_finite,
)
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, row_optimizer_of
from tpu_embedding.optimizers.table_rows import TableRows, table_rows_context
from tpu_embedding.plan.capacity import Updates
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import (
    add_to_rows,
    gather_rows,
    replace_rows,
    row_differences,
)
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    full_rows,
    pack_rows,
    unpack_rows,
)
from tpu_embedding.rows.row_gradients import GradientRounds
from tpu_embedding.types import RowUpdates
from tpu_embedding.xla import read_before_write

PADDING_ROWS: Final = 8
"""Rows of a part without rows. A single row would broadcast, as totals do."""


def lift_to_rows(
    optimizer: optax.GradientTransformation | RowOptimizer,
) -> optax.GradientTransformation:
    """Turns a transformation of dense rows into a transformation of `RowUpdates`.

    Slot variables of rows that are not in the updates do not change (lazy semantics): a
    moment decays only when its row is touched. Values shared by all rows, such as the
    step count, advance with every update.

    Args:
      optimizer: any row-local optax transformation, including chains, schedules and
        `optax.inject_hyperparams`. A rule that needs totals over a table's rows treats
        the given rows as one whole table.

    Returns:
      A transformation whose `init` accepts a table's `PackedRows`, and whose `update`
      maps `RowUpdates`, state and table to `RowUpdates` and state. Slot variables in
      the state are `PackedRows`. Everything is per shard.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> from tpu_embedding.rows.packed_rows import RowLayout
      >>> layout = RowLayout(num_rows=4, row_shape=(2,))
      >>> table = PackedRows(lines=jnp.ones((4, 2)), layout=layout)
      >>> rows = lift_to_rows(optax.sgd(0.5))
      >>> updates = te.functional.RowUpdates(
      ...     row_ids=jnp.array([3]), values=jnp.ones((1, 2)))
      >>> updates, _ = rows.update(updates, rows.init(table), table)
      >>> updates.values.tolist()
      [[-0.5, -0.5]]
    """

    def init(params: Any) -> Any:
        return init_rule(optimizer, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        table: PackedRows = params
        step = RuleStep(row_optimizer_of(optimizer), state, table.layout.dim)
        values, slots, new_values = step.update_rows(updates, table, slots_of(state))
        new_state = with_values(with_slots(state, slots), new_values)
        return dataclasses.replace(updates, values=values), new_state

    return optax.GradientTransformation(init, update)


def init_rule(
    optimizer: optax.GradientTransformation | RowOptimizer,
    table: PackedRows,
    known: TableRows | None = None,
) -> Any:
    """Returns a rule's state for a table. Per shard.

    Args:
      optimizer: see `lift_to_rows`.
      table: this shard's rows.
      known: facts about these rows, for a rule that needs totals.
    """
    with table_rows_context(known):
        leaves, tree = jax.tree.flatten(optimizer.init(unpack_rows(table)))
    slots = probe_rule(optimizer, table.layout.dim).leaves
    new_leaves = []
    for leaf, slot in zip(leaves, slots, strict=True):
        if slot is not None:
            layout = table.layout.slot_layout(slot.row)
            if slot.initial_value is None:
                leaf = pack_rows(leaf, layout)
            else:
                leaf = full_rows(slot.initial_value, layout, slot.row.dtype)
        new_leaves.append(leaf)
    return tree.unflatten(new_leaves)


class Arrays(NamedTuple):
    """The arrays that the parts of a step change, one after another.

    Attributes:
      table: the table's rows.
      slots: slot variables.
      kept: `gradient` and `touches` of a `KeptGradientState`, or empty.
    """

    table: Any
    slots: list[Any]
    kept: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class RuleStep:
    """One step of a rule. It exists only during tracing.

    The rule runs as it is, on the rows of one part of a table at a time. All parts read
    the old shared values, and compute the same new ones.

    Attributes:
      optimizer: the rule.
      state: the state before the step, from `init_rule`.
      dim: columns of the table.
      form: form of the update. In `"blocks"`, all slots are read before any is written.
    """

    optimizer: RowOptimizer
    state: Any
    dim: int
    form: Updates = "whole"

    @functools.cached_property
    def probed(self) -> ProbedRule:
        """The probe's findings about the rule."""
        return probe_rule(self.optimizer, self.dim)

    @functools.cached_property
    def is_finite(self) -> Bool[Array, ""] | None:
        """False if a rate of the step is not finite, or None for constant rates."""
        values = values_of(self.state)
        return rates_are_finite(self.optimizer, self.dim, values)

    def only_if_finite(self, gradient: GradientRounds) -> GradientRounds:
        """Drops all rows of a gradient if a learning rate is not finite."""
        return gradient if self.is_finite is None else gradient.only_if(self.is_finite)

    def new_state(self, slots: Sequence[PackedRows], new_values: list[Any]) -> Any:
        """Returns the state after the step.

        If the learning rate is not finite, totals and other values that depend on it
        become NaN. Such values are reset to their old values.
        """
        if self.is_finite is not None:
            pairs = zip(new_values, values_of(self.state), strict=True)
            new_values = [
                jnp.where(self.is_finite | jnp.isfinite(new), new, old)
                if jnp.issubdtype(new.dtype, jnp.floating)
                else new
                for new, old in pairs
            ]
        return with_values(with_slots(self.state, slots), new_values)

    def update_rows(
        self,
        gradient: RowUpdates,
        table: PackedRows,
        slots: Sequence[PackedRows],
        known: TableRows | None = None,
    ) -> tuple[Array, list[PackedRows], list[Any]]:
        """Runs the rule on a table's rows, and updates their slot variables in place.

        Args:
          gradient: the rows' gradients.
          table: this shard's rows, not modified.
          slots: slot variables before the update.
          known: facts about the rows, for a rule that needs totals.

        Returns:
          The rows' updates, the new slot variables, and the new shared values.
        """
        row_ids = gradient.row_ids
        places = table.places(row_ids)
        old = [gather_rows(slot, places) for slot in slots]
        if self.form == "blocks":
            old, slots = read_before_write((old, slots))
        rows = gather_rows(table, row_ids)
        updates, new, new_values = self.run(gradient.values, rows, old, known)
        moved = [
            move_rows(slot, places, before, after, probed.is_moved_by_adding)
            for slot, before, after, probed in zip(
                slots, old, new, self.probed.slots, strict=True
            )
        ]
        return updates, moved, new_values

    def run(
        self,
        gradient: Array,
        rows: Array,
        slots: Sequence[Array],
        known: TableRows | None,
    ) -> tuple[Array, list[Array], list[Any]]:
        """Returns updates `[rows, dim]`, new slots and new values; see `update_rows`.

        Args:
          gradient: `[rows, dim]`.
          rows: `[rows, dim]`.
          slots: the rows of each slot variable.
          known: facts about the rows. `None` means that they are a whole table.
        """
        state = with_slots(self.state, slots)
        # A rule with totals must not get answers about other rows from a cache of jit.
        with table_rows_context(known, inlines_jit=self.probed.takes_totals):
            updates, new_state = self.optimizer.update(gradient, state, rows)
        tree = jax.tree.structure(self.state, is_leaf=is_slot)
        leaves = tree.flatten_up_to(new_state)
        new_values, new_slots = self.probed.partition(leaves)
        return updates, new_slots, new_values

    def without_rows(self, known: TableRows | None = None) -> list[Any]:
        """Returns the shared values after a step on rows that no table has."""
        rows = jnp.zeros((PADDING_ROWS, self.dim), jnp.float32)
        slots = [
            jnp.zeros((PADDING_ROWS, *slot.row.shape), slot.row.dtype)
            for slot in self.probed.slots
        ]
        _, _, new_values = self.run(rows, rows, slots, known)
        return new_values


def is_slot(leaf: Any) -> bool:
    """Returns True if a node of a lifted optimizer's state is a slot variable."""
    return isinstance(leaf, PackedRows)


def slots_of(state: Any) -> list[PackedRows]:
    """Returns the slot variables of a lifted optimizer's state."""
    leaves = jax.tree.leaves(state, is_leaf=is_slot)
    return [leaf for leaf in leaves if is_slot(leaf)]


def with_slots(state: Any, slots: Sequence[Any]) -> Any:
    """Returns the state with its slot variables replaced."""
    remaining = iter(slots)
    return map_slots(lambda _: next(remaining), state)


def map_slots(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Returns the state with `function(slot, *others)` as its slot variables.

    Args:
      function: called with a slot variable and the matching subtree of each other
        state.
      state: a lifted optimizer's state.
      *others: states with the same structure, except that slots may have any type.
    """
    return jax.tree.map(
        lambda leaf, *subtrees: function(leaf, *subtrees) if is_slot(leaf) else leaf,
        state,
        *others,
        is_leaf=is_slot,
    )


def structure_of_state(state: Any) -> jax.tree_util.PyTreeDef:
    """Returns a state's structure, independent of where slot rows are stored."""
    return jax.tree.structure(
        map_slots(lambda slot: PackedRows(lines=0, layout=slot.layout), state)
    )


def state_specs(state: Any, stack: StackPlan) -> Any:
    """Returns the partition spec of each node of a stack's state.

    Slot variables are sharded like their table's rows; other values are replicated.
    """
    return jax.tree.map(
        lambda leaf: stack.rows_spec if is_slot(leaf) else PartitionSpec(),
        state,
        is_leaf=is_slot,
    )


def abstract_rule_state(optimizer: RowOptimizer, layout: RowLayout) -> Any:
    """Returns a state structured like `init_rule`'s, with row shapes as slot variables.

    The rule does not run.
    """
    probed = probe_rule(optimizer, layout.dim)
    leaves, tree = jax.tree.flatten(probed.state)
    return tree.unflatten(
        [
            leaf
            if slot is None
            else PackedRows(lines=slot.row, layout=layout.slot_layout(slot.row))
            for leaf, slot in zip(leaves, probed.leaves, strict=True)
        ]
    )


def values_of(state: Any) -> list[Any]:
    """Returns the values shared by all rows, such as counts, of a lifted state."""
    leaves = jax.tree.leaves(state, is_leaf=is_slot)
    return [leaf for leaf in leaves if not is_slot(leaf)]


def with_values(state: Any, values: list[Any]) -> Any:
    """Returns the state with its shared values replaced."""
    remaining = iter(values)
    return jax.tree.map(
        lambda leaf: leaf if is_slot(leaf) else next(remaining),
        state,
        is_leaf=is_slot,
    )


def with_values_if(condition: Any, new: Any, old: Any) -> Any:
    """Returns a new state, with the old shared values if a condition is False."""
    if condition is None:
        return new
    pairs = zip(values_of(new), values_of(old), strict=True)
    return with_values(new, [jnp.where(condition, *pair) for pair in pairs])


def move_rows(
    slot: PackedRows,
    places: Int[Array, " ids"],
    old: Array,
    new: Array,
    is_moved_by_adding: bool,
) -> PackedRows:
    """Sets a slot variable's rows to new values; see `ProbedSlot`."""
    if is_moved_by_adding:
        return add_to_rows(slot, places, row_differences(old, new))
    return replace_rows(slot, places, old, new)
