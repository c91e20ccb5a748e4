"""Runs a rule on one part of a table: some rows, or a block of consecutive rows.

A rule is written, or taken from optax, as if the table were a dense `[rows, dim]`
array. `StackStep` reads and writes the rows, in place, so that rules need not know
about row ids, shards, packing or rounds.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, UInt32

from tpu_embedding.optimizers.probe import probe_rule, rates_are_finite
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, row_optimizer_of
from tpu_embedding.optimizers.table_rows import (
    AllReduce,
    TableRows,
    table_rows_context,
)
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import (
    add_to_rows,
    gather_rows,
    read_block,
    replace_stored_rows,
    row_differences,
    set_rows,
    write_block,
)
from tpu_embedding.rows.narrow_rows import encode_rows, mix_bits, random_bits
from tpu_embedding.rows.packed_rows import PackedRows, load_rows
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates
from tpu_embedding.update.state import (
    PADDING_ROWS,
    KeptGradientState,
    RoundedState,
    init_rule,
    is_slot,
    rule_state_of,
    slots_of,
    values_of,
    with_slots,
    with_values,
)
from tpu_embedding.update.totals import rows_of_stack, tables_of_rows
from tpu_embedding.xla import read_before_write, value_of_range


class Arrays(NamedTuple):
    """The arrays that a step changes, part by part.

    `kept` has `gradient` and `touches` from a `KeptGradientState`, or is empty.
    """

    table: Any
    slots: list[Any]
    kept: tuple[Any, ...] = ()


class Part(NamedTuple):
    """Rows of one shard that a rule gets at once, with their gradient.

    Each row occurs at most once. Unused positions have `PADDING_ROW_ID` and gradient
    zero. `occurrence` counts earlier parts in the same step that have the same rows.
    `occurrences` is from `RowGradients`.
    """

    row_ids: Int[Array, " rows"]
    gradient: Float[Array, "rows dim"]
    is_touched: Bool[Array, " rows"]
    occurrence: Int[Array, ""] | int = 0
    occurrences: RowUpdates | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class StackStep:
    """One step of a stack on one shard. It exists only during tracing.

    `state` is the state before the step. Pass `table_sizes` if ids are not row numbers.
    Totals then count only rows that belong to an id.
    """

    stack: StackPlan
    state: Any
    table_sizes: Float[Array, " tables"] | None = None

    @functools.cached_property
    def kept(self) -> KeptGradientState | None:
        """The state with the dense gradient, if the rule needs one."""
        is_rounded = isinstance(self.state, RoundedState)
        state = self.state.inner if is_rounded else self.state
        return state if isinstance(state, KeptGradientState) else None

    @functools.cached_property
    def old_values(self) -> list[Any]:
        """Values shared by all rows, before the step."""
        return values_of(rule_state_of(self.state))

    @functools.cached_property
    def is_finite(self) -> Bool[Array, ""] | None:
        """False if this step's rate is not finite. None if the rate is constant."""
        return rates_are_finite(self.stack.optimizer, self.stack.dim, self.old_values)

    def arrays(self, table: PackedRows) -> Arrays:
        kept = () if self.kept is None else (self.kept.gradient, self.kept.touches)
        return Arrays(table, slots_of(rule_state_of(self.state)), kept)

    def run_on_rows(
        self, arrays: Arrays, part: Part, all_reduce: AllReduce
    ) -> tuple[Arrays, list[Any]]:
        """Runs the rule on some rows, in place, and returns the new shared values."""
        optimizer, (table, slots, kept) = self.stack.optimizer, arrays
        table, places = table.locate(part.row_ids)
        old_slots = [gather_rows(slot, places) for slot in slots]
        if self.stack.updates == "blocks":
            # In a loop, XLA:CPU copies a slot that is read after a different slot is
            # written.
            old_slots, slots = read_before_write((old_slots, slots))
        rows = gather_rows(table, places)
        if optimizer.sets_rows:
            # The rule returns the difference from the old row. With zeros as the old
            # row, this is the new row. Otherwise, the difference would be NaN where the
            # old value is NaN, and would lose a small new value next to a large old
            # one.
            rows = jnp.zeros_like(rows)
        known = self._known_rows(part, all_reduce) if optimizer.takes_totals else None
        updates, new_slots, new_values = self._run_rule(part, rows, old_slots, known)
        slots = replaced_slots(
            optimizer, slots, places, old_slots, new_slots, self.stack.dim
        )
        if self.stack.layout.narrow_dtype is not None:
            stored = self._stored_rows(part, rows, updates)
            table = replace_stored_rows(table, places, stored)
        elif optimizer.sets_rows:
            stored = self._stored_rows(part, rows, updates)
            table = set_rows(table, places, stored)
        else:
            table = add_to_rows(table, places, updates)
        return Arrays(table, slots, kept), new_values

    def run_on_block(
        self,
        arrays: Arrays,
        part: Part,
        start: Int[Array, ""] | int,
        covered: RowRange | None,
        all_reduce: AllReduce,
    ) -> tuple[Arrays, list[Any]]:
        """Runs the rule on consecutive rows, and clears their kept gradient, in place.

        Only rows in `covered` change, or all rows if it is None.
        """
        (size,) = part.row_ids.shape
        old = jax.tree.map(
            lambda rows: read_block(rows, start, size), arrays, is_leaf=is_slot
        )
        is_set = self.stack.optimizer.sets_rows  # See `run_on_rows`.
        rows = jnp.zeros_like(old.table) if is_set else old.table
        known = self._known_rows(part, all_reduce)
        is_moved = known.is_used
        if covered is not None:
            is_moved &= (part.row_ids >= covered.first_row) & (
                part.row_ids < covered.end_row
            )
        updates, new_slots, new_values = self._run_rule(part, rows, old.slots, known)

        def if_moved(new: Array, old: Array) -> Array:
            return jnp.where(is_moved.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        updates = jnp.where(is_moved[:, None], updates, 0)
        new = Arrays(
            table=self._stored_rows(part, rows, updates),
            slots=list(map(if_moved, new_slots, old.slots)),
            kept=jax.tree.map(jnp.zeros_like, old.kept),
        )
        # XLA must not write an array before its last read, or else it copies the array.
        new, new_values = read_before_write((new, new_values))
        arrays = jax.tree.map(
            lambda rows, new_rows: write_block(rows, start, new_rows),
            arrays,
            new,
            is_leaf=is_slot,
        )
        return arrays, new_values

    def values_without_rows(self) -> list[Any]:
        """Computes new shared values by running the rule on padding rows."""
        # The probe has checked that shared values don't depend on rows.
        optimizer, dim = self.stack.optimizer, self.stack.dim
        rows = jnp.zeros((PADDING_ROWS, dim), jnp.float32)
        row_ids = jnp.full(PADDING_ROWS, PADDING_ROW_ID, jnp.int32)
        part = Part(row_ids, rows, is_touched=row_ids < 0)
        slots = [
            jnp.zeros((PADDING_ROWS, *slot.row.shape), slot.row.dtype)
            for slot in probe_rule(optimizer, dim).slots
        ]
        known = None
        if optimizer.takes_totals:
            # Totals over no rows are zero. Shared values may depend on these totals.
            known = self._known_rows(part, lambda totals, _: totals)
        return self._run_rule(part, rows, slots, known)[2]

    def state_after(self, arrays: Arrays | None, new_values: Sequence[Any]) -> Any:
        """Builds the state after the step. Without arrays, slots are unchanged."""
        state = rule_state_of(self.state)
        if self.is_finite is not None:
            # If the rate isn't finite, shared floats, such as totals, may become NaN,
            # and would remain NaN. So these floats keep their old values. Integers,
            # such as the step count, advance.
            new_values = [
                jnp.where(self.is_finite | jnp.isfinite(new), new, old)
                if jnp.issubdtype(new.dtype, jnp.floating)
                else new
                for new, old in zip(new_values, self.old_values, strict=True)
            ]
        state = with_values(state, new_values)
        if arrays is not None:
            state = with_slots(state, arrays.slots)
            if self.kept is not None:
                count = self.kept.step + 1
                is_due = count >= self.stack.optimizer.gradient_steps
                count = jnp.where(is_due, 0, count)
                state = KeptGradientState(*arrays.kept, step=count, inner=state)
        if isinstance(self.state, RoundedState):
            return RoundedState(step=self.state.step + 1, inner=state)
        return state

    def _run_rule(
        self,
        part: Part,
        rows: Array,
        slots: Sequence[Array],
        known: TableRows | None,
    ) -> tuple[Array, list[Array], list[Any]]:
        state = with_slots(rule_state_of(self.state), slots)
        return run_rule(self.stack.optimizer, state, part.gradient, rows, known)

    def _known_rows(self, part: Part, all_reduce: AllReduce) -> TableRows:
        def facts(row_ids: Array, is_touched: Array) -> TableRows:
            known = tables_of_rows(row_ids, is_touched, all_reduce, self.stack)
            if self.table_sizes is None:
                return known
            return dataclasses.replace(known, table_sizes=self.table_sizes)

        total, occurrences = None, part.occurrences
        if occurrences is not None:
            is_touched = occurrences.row_ids != PADDING_ROW_ID
            squares = jnp.sum(jnp.square(occurrences.values), axis=1)
            total = facts(occurrences.row_ids, is_touched).total(squares)

        def values_after_adding(old: Array, updates: Array) -> Array:
            return load_rows(self._stored_rows(part, old, updates), self.stack.layout)

        return dataclasses.replace(
            facts(part.row_ids, part.is_touched),
            occurrence_squares=total,
            stored=values_after_adding,
        )

    def _stored_rows(
        self, part: Part, old: Float[Array, "rows dim"], updates: Array
    ) -> Array:
        """Adds updates to old rows, and encodes the sums in the table's own dtype."""
        # An update of 0 must not change an element's bits. Adding 0 would turn -0.0
        # into 0.0, and would flush a denormal to 0 on a TPU.
        new = jnp.where(updates == 0, old, old + updates)
        dtype = self.stack.layout.narrow_dtype
        if dtype is None:
            return new
        bits = bits_of_rows(part.row_ids, self.state.step, part.occurrence, self.stack)
        return encode_rows(new, dtype, bits)


def run_rule(
    optimizer: RowOptimizer,
    state: Any,
    gradient: Float[Array, "rows dim"],
    rows: Float[Array, "rows dim"],
    known: TableRows | None,
) -> tuple[Array, list[Array], list[Any]]:
    """Runs a rule on rows. Returns updates, new slot rows, and new shared values.

    Slots in `state` must be plain rows. If `known` is None, the rows are a whole table.
    """
    probed = probe_rule(optimizer, rows.shape[1])
    # In a rule with totals, the cache of a `jit` could return totals from another call.
    with table_rows_context(known, inlines_jit=probed.takes_totals):
        updates, new_state = optimizer.update(gradient, state, rows)
    new_leaves = jax.tree.structure(state).flatten_up_to(new_state)
    new_slots, new_values = [], []
    for leaf, slot in zip(new_leaves, probed.leaves, strict=True):
        (new_values if slot is None else new_slots).append(leaf)
    return updates, new_slots, new_values


def replaced_slots(
    optimizer: RowOptimizer,
    slots: Sequence[PackedRows],
    places: Int[Array, " rows"],
    old: Sequence[Array],
    new: Sequence[Array],
    table_dim: int,
) -> list[PackedRows]:
    """Writes new slot values to one shard's rows, in place."""
    probed = probe_rule(optimizer, table_dim)
    result = []
    # Adding the difference takes one scatter. But if an old value is large and the new
    # value is small, the difference rounds the new value away. Slots that may have such
    # values are set instead, which may take two scatters.
    for slot, facts, before, after in zip(slots, probed.slots, old, new, strict=True):
        if facts.is_moved_by_adding:
            difference = row_differences(before, after)
            result.append(add_to_rows(slot, places, difference))
        else:
            result.append(set_rows(slot, places, after, before))
    return result


def lift_to_rows(
    optimizer: optax.GradientTransformation | RowOptimizer,
) -> optax.GradientTransformation:
    """Lifts an optax transformation of dense rows to `RowUpdates`.

    Only rows in the updates change their slot variables (lazy semantics): a moment
    decays only when its row is touched. Values shared by all rows, such as the step
    count, advance with every update.

    Args:
      optimizer: any row-local optax transformation, including chains, schedules and
        `optax.inject_hyperparams`. Note that a rule with totals, such as Adafactor,
        treats the rows you pass as one whole table.

    Returns:
      A transformation. Its `init` accepts a table's `PackedRows`. Its `update` maps
      `RowUpdates`, state and table to new `RowUpdates` and a new state. Slot variables
      in the state are `PackedRows`. All arrays are per shard.

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
    rule = row_optimizer_of(optimizer)

    def init(params: Any) -> Any:
        return init_rule(optimizer, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        table, places = params.locate(updates.row_ids)
        slots = slots_of(state)
        old_slots = [gather_rows(slot, places) for slot in slots]
        rows = gather_rows(table, places)
        values, new_slots, new_values = run_rule(
            rule, with_slots(state, old_slots), updates.values, rows, known=None
        )
        slots = replaced_slots(rule, slots, places, old_slots, new_slots, rows.shape[1])
        new_state = with_values(with_slots(state, slots), new_values)
        return dataclasses.replace(updates, values=values), new_state

    return optax.GradientTransformation(init, update)


def bits_of_rows(
    row_ids: Int[Array, " ids"],
    step: Int[Array, ""],
    occurrence: Int[Array, ""] | int,
    stack: StackPlan,
) -> UInt32[Array, "ids dim"]:
    """Hashes step, table name, row and element into bits for stochastic rounding."""
    # Rounding to nearest would lose every update below half a unit of the dtype, so
    # small gradients would never move a row. With random rounding, the mean is exact.
    # The hash doesn't depend on devices, stacking or packing. It includes the step.
    # Otherwise, an element that was rounded back to its old value would get the same
    # bits in the next step, and might never change.
    _, stack_rows = rows_of_stack(row_ids, stack)
    stack_rows = stack.vocabulary.stacks.rows_on_one_shard(stack_rows, stack)
    stack_rows = stack_rows.astype(jnp.uint32)
    offsets, table_keys = [], []
    for table in stack.tables:
        # Python's own hash of a string differs between processes.
        digest = hashlib.sha256(table.name.encode()).digest()
        offsets.append(table.row_offset)
        table_keys.append(int.from_bytes(digest[:4], "little"))
    rows = stack_rows - value_of_range(stack_rows, offsets, offsets)
    keys = value_of_range(stack_rows, offsets, table_keys)
    number = mix_bits(step.astype(jnp.uint32)) + jnp.uint32(occurrence)
    return random_bits(mix_bits(rows ^ mix_bits(keys ^ mix_bits(number))), stack.dim)
