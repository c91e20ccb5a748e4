"""Stage 7, merge: the owner sums the gradients that several shards send for a row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._dedup import rank_unique, unsort
from tpu_embedding.lookup._repeats import add_repeats
from tpu_embedding.lookup._running_sums import forward_fill
from tpu_embedding.rows.access import gather_lines
from tpu_embedding.rows.row_gradients import RowGradients
from tpu_embedding.types import PADDING_ROW_ID


@jax.named_scope("merge")
def merge(
    row_ids: Int[Array, " buffer"],
    gradients: Float[Array, "buffer dim"],
    num_rows: int,
) -> RowGradients:
    """Sums the gradients of equal rows. Per shard; no communication.

    Args:
      row_ids: int32 `[buffer]`, local rows as received; `PADDING_ROW_ID` where unused.
      gradients: their gradients, in the same places.
      num_rows: upper bound on the number of distinct rows.

    Returns:
      The sums. Each row appears once, in any order; other places hold padding.
    """
    if 2 * num_rows <= row_ids.shape[0]:
        return _merge_few_rows(row_ids, gradients, num_rows)
    (sorted_ids,), order, ranks = rank_unique(row_ids)
    is_first = jnp.diff(ranks, prepend=-1) > 0
    is_repeat = ~is_first & (sorted_ids != PADDING_ROW_ID)
    sums = add_repeats(
        gradients,
        is_repeat,
        places=forward_fill(jnp.where(is_first, order, -1)),
        value_ids=order,
        # Sums change in places of first occurrences only. The places of repeats still
        # hold the gradients that were received.
        read_values=gather_lines,
    )
    unique_ids = unsort(jnp.where(is_repeat, PADDING_ROW_ID, sorted_ids), order)
    return RowGradients(row_ids=unique_ids, values=sums)


def _merge_few_rows(
    row_ids: Int[Array, " buffer"],
    gradients: Float[Array, "buffer dim"],
    num_rows: int,
) -> RowGradients:
    """Sums in a buffer of `num_rows`, which is shorter than the received buffer."""
    (sorted_ids,), order, ranks = rank_unique(row_ids)
    ranks = jnp.where(sorted_ids == PADDING_ROW_ID, num_rows, ranks)
    unique_ids = jnp.full((num_rows,), PADDING_ROW_ID, jnp.int32)
    sums = jnp.zeros((num_rows, gradients.shape[1]), gradients.dtype)
    sums = sums.at[unsort(ranks, order)].add(
        gradients, mode="drop", wrap_negative_indices=False
    )
    return RowGradients(
        row_ids=unique_ids.at[ranks].set(
            sorted_ids, mode="drop", wrap_negative_indices=False
        ),
        values=sums,
    )
