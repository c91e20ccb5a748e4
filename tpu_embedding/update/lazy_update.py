"""Applies any row-local optax transformation to touched rows only.

A rule is written, or taken from optax, as if the table were a dense `[rows, dim]`
array. A `RuleStep` gathers the touched rows of table and slot variables, runs the rule
on them, and adds the differences back in place. So rules know nothing of row ids,
shards, packing or rounds. Values shared by all rows are computed once per step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from tpu_embedding.optimizers.probe import (
    ProbedRule,
    probe_rule,
    rates_are_finite,
    split_rule,
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

RowsOf = Callable[[Int[Array, " rows"]], TableRows]
"""Returns the facts that a rule may ask about the rows with some ids."""


def lift_to_rows(
    optimizer: optax.GradientTransformation | RowOptimizer,
    rows_of: RowsOf | None = None,
) -> optax.GradientTransformation:
    """Turns a transformation of dense rows into one of `RowUpdates`.

    Slot variables of rows that the updates do not name keep their bits (lazy
    semantics): a moment decays only when its row is touched. Values that belong to no
    row, such as the step count, advance with every update.

    Args:
      optimizer: any row-local optax transformation, chained, scheduled or with
        `optax.inject_hyperparams`.
      rows_of: answers rules that ask for totals over the rows of a table; without it,
        such a rule sees the given rows as one whole table.

    Returns:
      A transformation whose `init` takes the `PackedRows` of a table and whose
      `update` maps `RowUpdates`, state and table to `RowUpdates` and state. Slot
      variables in its state are `PackedRows`. Everything is per shard.

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
        all_rows = jnp.arange(params.layout.num_rows, dtype=jnp.int32)
        return init_rule(optimizer, params, rows_of and rows_of(all_rows))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        table: PackedRows = params
        step = start_step(optimizer, state, table.layout.dim)
        known = rows_of and rows_of(updates.row_ids)
        values, slots, new_values = step.update_rows(
            updates, table, slots_of(state), known
        )
        new_state = with_values(with_slots(state, slots), new_values)
        return dataclasses.replace(updates, values=values), new_state

    return optax.GradientTransformation(init, update)


def init_rule(
    optimizer: optax.GradientTransformation | RowOptimizer,
    table: PackedRows,
    known: TableRows | None = None,
) -> Any:
    """Returns the state of a rule for a table. Per shard.

    Args:
      optimizer: see `lift_to_rows`.
      table: rows of this shard.
      known: facts about all of them, for a rule that asks for totals.
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RuleStep:
    """One step of a rule. It exists while a step is traced.

    What all rows share is computed before the rows, which may come in rounds. A rule
    that asks for totals runs as a whole instead: its values depend on the totals, and
    are the same for all rows of a step.

    Attributes:
      optimizer: the rule.
      dim: columns of the table.
      probed: what the probe of the rule has shown.
      state: the state before the step.
      hyperparameters: values that the rows need; empty for a rule with totals.
      new_values: values of the state after the step; for a rule with totals, before it.
      form: form of the update. In `"blocks"`, slots are read before one is written.
    """

    optimizer: RowOptimizer
    dim: int
    probed: ProbedRule
    state: Any
    hyperparameters: list[Any]
    new_values: list[Any]
    form: Updates = "whole"

    @functools.cached_property
    def is_finite(self) -> Bool[Array, ""] | None:
        """False if a learning rate of the step is not; None if rates never change."""
        values = values_of(self.state)
        return rates_are_finite(self.optimizer, self.dim, values)

    def only_if_finite(self, gradient: GradientRounds) -> GradientRounds:
        """Returns a gradient; no rows if a learning rate is not finite."""
        return gradient if self.is_finite is None else gradient.only_if(self.is_finite)

    def new_state(self, slots: Sequence[PackedRows], new_values: list[Any]) -> Any:
        """Returns the state after the step.

        A learning rate that is not finite makes totals NaN, and other values that
        follow it. They stay as they were.
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
        """Runs the rule on rows of a table, and moves their slot variables in place.

        Args:
          gradient: gradients of the rows.
          table: rows of this shard, which stay.
          slots: slot variables before the update.
          known: facts about the rows, for a rule that asks for totals.

        Returns:
          The updates of the rows, the new slot variables, and the new values.
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
          known: facts about the rows; without it, all rows of a table are there.
        """
        if not self.probed.takes_totals:
            is_touched = (
                jnp.ones(len(rows), bool) if known is None else known.is_touched
            )
            split = split_rule(self.optimizer.transformation, self.dim, len(rows))
            updates, new_slots = split.rows(
                gradient, rows, is_touched, slots, self.hyperparameters
            )
            return updates, new_slots, self.new_values
        state = with_slots(self.state, slots)
        with table_rows_context(known):
            updates, new_state = self.optimizer.update(gradient, state, rows)
        tree = jax.tree.structure(self.state, is_leaf=is_slot)
        new = zip(tree.flatten_up_to(new_state), self.probed.leaves, strict=True)
        new_slots, new_values = [], []
        for leaf, slot in new:
            (new_values if slot is None else new_slots).append(leaf)
        return updates, new_slots, new_values


def start_step(
    optimizer: optax.GradientTransformation | RowOptimizer,
    state: Any,
    dim: int,
    form: Updates = "whole",
) -> RuleStep:
    """Starts a step of a rule: computes what all rows share.

    Args:
      optimizer: see `lift_to_rows`.
      state: from `init_rule`.
      dim: columns of the table.
      form: see `RuleStep`.
    """
    probed = probe_rule(optimizer, dim)
    hyperparameters, values = [], values_of(state)
    if not probed.takes_totals:
        hyperparameters, values = probed.split.values(values)
    return RuleStep(
        optimizer=row_optimizer_of(optimizer),
        dim=dim,
        probed=probed,
        state=state,
        hyperparameters=hyperparameters,
        new_values=values,
        form=form,
    )


def is_slot(leaf: Any) -> bool:
    """Returns True if a part of a lifted optimizer's state is a slot variable."""
    return isinstance(leaf, PackedRows)


def slots_of(state: Any) -> list[PackedRows]:
    """Returns the slot variables of a lifted optimizer's state."""
    leaves = jax.tree.leaves(state, is_leaf=is_slot)
    return [leaf for leaf in leaves if is_slot(leaf)]


def with_slots(state: Any, slots: Sequence[Any]) -> Any:
    """Returns the state with its slot variables replaced; counts and such stay."""
    remaining = iter(slots)
    return map_slots(lambda _: next(remaining), state)


def map_slots(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Returns the state with `function(slot, *others)` as its slot variables.

    Args:
      function: takes a slot variable, and the subtree at its place in each other state.
      state: state of a lifted optimizer.
      *others: states of the same structure, whose slots may be of any type.
    """
    return jax.tree.map(
        lambda leaf, *subtrees: function(leaf, *subtrees) if is_slot(leaf) else leaf,
        state,
        *others,
        is_leaf=is_slot,
    )


def structure_of_state(state: Any) -> jax.tree_util.PyTreeDef:
    """Returns the structure of states, wherever the rows of slot variables are."""
    return jax.tree.structure(
        map_slots(lambda slot: PackedRows(lines=0, layout=slot.layout), state)
    )


def state_specs(state: Any, stack: StackPlan) -> Any:
    """Returns the partition of each part of a stack's state.

    Slot variables are split like the rows of their table; other values are replicated.
    """
    return jax.tree.map(
        lambda leaf: stack.rows_spec if is_slot(leaf) else PartitionSpec(),
        state,
        is_leaf=is_slot,
    )


def abstract_rule_state(optimizer: RowOptimizer, layout: RowLayout) -> Any:
    """Returns a state as `init_rule` makes it, with shapes of rows as slot variables.

    It has their structure, and costs no run of the rule.

    Args:
      optimizer: the rule.
      layout: layout of the table.
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
    """Returns what all rows share in a lifted optimizer's state, such as counts."""
    leaves = jax.tree.leaves(state, is_leaf=is_slot)
    return [leaf for leaf in leaves if not is_slot(leaf)]


def with_values(state: Any, values: list[Any]) -> Any:
    """Returns the state with such values replaced; slot variables stay."""
    remaining = iter(values)
    return jax.tree.map(
        lambda leaf: leaf if is_slot(leaf) else next(remaining),
        state,
        is_leaf=is_slot,
    )


def move_rows(
    slot: PackedRows,
    places: Int[Array, " ids"],
    old: Array,
    new: Array,
    is_moved_by_adding: bool,
) -> PackedRows:
    """Sets rows of a slot variable to their new values; see `ProbedSlot`."""
    if is_moved_by_adding:
        return add_to_rows(slot, places, row_differences(old, new))
    return replace_rows(slot, places, old, new)
