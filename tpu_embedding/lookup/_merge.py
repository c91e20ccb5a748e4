"""Stage 7: gradients of one row that came from several shards become one."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.layout.packed_rows import (
    PackedRows,
    gather_rows,
    keep_rows,
    unpack_rows,
)
from tpu_embedding.lookup._dedup import rank_unique, unsort
from tpu_embedding.lookup._repeats import add_repeats
from tpu_embedding.lookup._running import hold
from tpu_embedding.types import PADDING_ROW_ID, RowUpdates


def merge(
    row_ids: Int[Array, " buffer"],
    gradients: PackedRows,
    num_rows: int,
) -> RowUpdates:
    """Sums the gradients of equal rows. Per shard; no communication.

    Args:
      row_ids: local rows, as received from each source.
      gradients: their gradients, in the same places.
      num_rows: bound on the different rows.

    Returns:
      Each row once, in any order, and padding, whose values are zero.
    """
    if 2 * num_rows <= row_ids.shape[0]:
        return _merge_few_rows(row_ids, unpack_rows(gradients), num_rows)
    sorted_ids, order, ranks = rank_unique(row_ids)
    is_first = jnp.diff(ranks, prepend=-1) > 0
    is_repeat = ~is_first & (sorted_ids != PADDING_ROW_ID)
    sums = add_repeats(
        gradients,
        is_repeat,
        places=hold(jnp.where(is_first, order, -1)),
        occurrences=order,
        # Only places of first occurrences are added to; the others hold what was
        # received.
        values_of=gather_rows,
    )
    unique_ids = unsort(jnp.where(is_repeat, PADDING_ROW_ID, sorted_ids), order)
    return without_padding(unique_ids, sums)


def without_padding(
    row_ids: Int[Array, " buffer"], gradients: PackedRows
) -> RowUpdates:
    """Zeroes the values of unused places; XLA fuses it into what reads them."""
    values = unpack_rows(keep_rows(gradients, row_ids != PADDING_ROW_ID))
    return RowUpdates(row_ids=row_ids, values=values)


def _merge_few_rows(
    row_ids: Int[Array, " buffer"],
    gradients: Float[Array, "buffer dim"],
    num_rows: int,
) -> RowUpdates:
    """Sums in a buffer as long as there are rows, which is shorter than what came."""
    sorted_ids, order, ranks = rank_unique(row_ids)
    ranks = jnp.where(sorted_ids == PADDING_ROW_ID, num_rows, ranks)
    unique_ids = jnp.full((num_rows,), PADDING_ROW_ID, jnp.int32)
    values = jnp.zeros((num_rows, gradients.shape[1]), gradients.dtype)
    return RowUpdates(
        row_ids=unique_ids.at[ranks].set(
            sorted_ids, mode="drop", wrap_negative_indices=False
        ),
        values=values.at[unsort(ranks, order)].add(
            gradients, mode="drop", wrap_negative_indices=False
        ),
    )
