"""Stage 7: gradients of one row that came from several shards become one."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._dedup import rank_unique, unsort
from tpu_embedding.types import PADDING_ROW_ID, RowUpdates


def merge(
    row_ids: Int[Array, " buffer"],
    gradients: Float[Array, "buffer dim"],
    num_places: int,
) -> RowUpdates:
    """Sums the gradients of equal rows. Per shard; no communication.

    Args:
      row_ids: local rows, as received from each source.
      gradients: their gradients, in the same places.
      num_places: bound on the different rows.

    Returns:
      Each row once, rising, then padding, in so many places.
    """
    sorted_ids, order, ranks = rank_unique(row_ids)
    ranks = jnp.where(sorted_ids == PADDING_ROW_ID, num_places, ranks)
    unique_ids = jnp.full((num_places,), PADDING_ROW_ID, jnp.int32)
    values = jnp.zeros((num_places, gradients.shape[1]), gradients.dtype)
    return RowUpdates(
        row_ids=unique_ids.at[ranks].set(
            sorted_ids, mode="drop", wrap_negative_indices=False
        ),
        values=values.at[unsort(ranks, order)].add(
            gradients, mode="drop", wrap_negative_indices=False
        ),
    )
