"""Adds the values of repeated ids to the sums of their rows.

Sorting brings the occurrences of a row together: the first one, then its *repeats*. The
sum of a row starts as the value of its first occurrence, so no buffer of zeros is
needed. A loop then adds the repeats, one chunk of them per iteration. It ends when no
repeat is left.
"""

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.plan.capacity import LANES
from tpu_embedding.rows.packed_rows import round_up

_MAX_CHUNKS: Final = 8
"""Maximum iterations of the loop, reached if almost all occurrences are repeats."""

_MIN_CHUNK_SIZE: Final = 8 * LANES
"""Minimum repeats per iteration, so that few ids take one iteration only."""


def add_repeats(
    sums: Float[Array, "rows dim"],
    is_repeat: Bool[Array, " n"],
    places: Int[Array, " n"],
    value_ids: Int[Array, " n"],
    read_values: Callable[[Array, Int[Array, " chunk"]], Float[Array, "chunk dim"]],
) -> Float[Array, "rows dim"]:
    """Adds the values of repeats to the sums of their rows. Per shard; in place.

    Args:
      sums: values of the first occurrences, each at the place of its row.
      is_repeat: bool `[n]`, True for repeats. Occurrences may be in any order.
      places: int32 `[n]`, place of each occurrence's row in `sums`.
      value_ids: int32 `[n]`, the argument of `read_values` for each occurrence.
      read_values: called as `read_values(sums, value_ids)` with the sums so far and
        the ids of a chunk; returns the values of that chunk.
    """
    num_places = sums.shape[0]
    num_occurrences = is_repeat.shape[0]
    num_repeats = jnp.sum(is_repeat, dtype=jnp.int32)
    chunk_size = round_up(-(-num_occurrences // _MAX_CHUNKS), LANES)
    chunk_size = min(max(chunk_size, _MIN_CHUNK_SIZE), num_occurrences)
    # A sort moves repeats to the front: a TPU scatters single integers slowly.
    places, value_ids = jax.lax.sort(
        (jnp.where(is_repeat, places, num_places), value_ids),
        num_keys=1,
        is_stable=False,
    )
    places = jnp.pad(places, (0, chunk_size), constant_values=num_places)
    value_ids = jnp.pad(value_ids, (0, chunk_size))

    def add_chunk(carry):
        start, sums = carry
        chunk_ids = jax.lax.dynamic_slice_in_dim(value_ids, start, chunk_size)
        rows = jax.lax.dynamic_slice_in_dim(places, start, chunk_size)
        values = read_values(sums, chunk_ids)
        sums = sums.at[rows].add(
            values, mode="drop", indices_are_sorted=True, wrap_negative_indices=False
        )
        return start + chunk_size, sums

    _, sums = jax.lax.while_loop(
        lambda carry: carry[0] < num_repeats, add_chunk, (jnp.int32(0), sums)
    )
    return sums
