"""What a row's further occurrences add to its first.

Sorting brings the occurrences of a row together: the first, then its *repeats*. A sum
per row needs no buffer of zeros to add all occurrences to. It begins as the values of
the first occurrences, and the repeats are added, a part of them at a time, in a loop
that turns while there are any.
"""

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.plan.capacity import LANES
from tpu_embedding.rows.access import add_repeatedly
from tpu_embedding.rows.packed_rows import PackedRows, round_up

_TURNS: Final = 8
"""Turns of the loop where almost all occurrences are repeats."""

_MIN_PER_TURN: Final = 8 * LANES
"""Repeats of a turn at least, so that few ids do not take several turns."""


def add_repeats(
    sums: PackedRows,
    is_repeat: Bool[Array, " n"],
    places: Int[Array, " n"],
    occurrences: Int[Array, " n"],
    values_of: Callable[[PackedRows, Int[Array, " turn"]], Float[Array, "turn dim"]],
) -> PackedRows:
    """Adds the values of repeats to the sums of their rows. Per shard; in place.

    Args:
      sums: the values of first occurrences, each at the place of its row.
      is_repeat: of all occurrences, in any order.
      places: the place of the row of each in `sums`.
      occurrences: what `values_of` knows each by.
      values_of: given the sums so far and some occurrences, their values.
    """
    num_places = sums.layout.num_rows
    num_occurrences = is_repeat.shape[0]
    num_repeats = jnp.sum(is_repeat, dtype=jnp.int32)
    per_turn = round_up(-(-num_occurrences // _TURNS), LANES)
    per_turn = min(max(per_turn, _MIN_PER_TURN), num_occurrences)
    # A sort moves repeats to the front: a TPU scatters single integers slowly.
    places, occurrences = jax.lax.sort(
        (jnp.where(is_repeat, places, num_places), occurrences),
        num_keys=1,
        is_stable=False,
    )
    places = jnp.pad(places, (0, per_turn), constant_values=num_places)
    occurrences = jnp.pad(occurrences, (0, per_turn))

    def add(carry):
        done, sums = carry
        turn = jax.lax.dynamic_slice_in_dim(occurrences, done, per_turn)
        rows = jax.lax.dynamic_slice_in_dim(places, done, per_turn)
        return done + per_turn, add_repeatedly(sums, rows, values_of(sums, turn))

    _, sums = jax.lax.while_loop(
        lambda carry: carry[0] < num_repeats, add, (jnp.int32(0), sums)
    )
    return sums
