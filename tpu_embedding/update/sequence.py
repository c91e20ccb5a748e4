"""Applies a rule once per occurrence of an id."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import PADDING_ROW_ID, RowUpdates
from tpu_embedding.update.lazy_update import slots_of, with_slots
from tpu_embedding.update.table_writer import TableWriter


def apply_in_sequence(
    rule: Any,
    table: PackedRows,
    state: Any,
    gradient: RowUpdates,
    writer: TableWriter,
) -> tuple[PackedRows, Any]:
    """Runs a lifted rule once per occurrence of a row, in the order of the samples.

    Per shard; in place where donated.

    It takes as many passes as the most frequent row has occurrences. Values that belong
    to no row, such as the step count, stay: `step_on_no_row` advances them once.
    """
    occurrences = _occurrences(gradient.row_ids)
    is_used = gradient.row_ids != PADDING_ROW_ID
    num_passes = jnp.max(jnp.where(is_used, occurrences + 1, 0))

    def run(carry):
        done, table, slots = carry
        row_ids = jnp.where(occurrences == done, gradient.row_ids, PADDING_ROW_ID)
        table = writer.before_rule(table, row_ids)
        updates, new_state = rule.update(
            RowUpdates(row_ids=row_ids, values=gradient.values),
            with_slots(state, slots),
            table,
        )
        table = writer.add(table, updates.row_ids, updates.values, occurrence=done)
        return done + 1, table, slots_of(new_state)

    _, table, slots = jax.lax.while_loop(
        lambda carry: carry[0] < num_passes,
        run,
        (jnp.int32(0), table, slots_of(state)),
    )
    return table, with_slots(state, slots)


def _occurrences(row_ids: Int[Array, " n"]) -> Int[Array, " n"]:
    """Counts the equal ids before each position."""
    positions = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    sorted_ids, order = jax.lax.sort((row_ids, positions), num_keys=1, is_stable=True)
    firsts = jnp.searchsorted(sorted_ids, sorted_ids, side="left").astype(jnp.int32)
    return jnp.zeros_like(positions).at[order].set(positions - firsts)
