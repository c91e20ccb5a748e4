"""Stage 6, spread: cotangents are summed into the rows that their samples used.

The transpose of `combine`: each id adds its sample's cotangent, times gain and scale,
to the gradient of its row in the exchange buffer.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._combine import scale_samples
from tpu_embedding.lookup._flatten_to_owners import PoolingSpec
from tpu_embedding.lookup._repeats import add_repeats
from tpu_embedding.rows.access import gather_lines
from tpu_embedding.rows.packed_rows import gather_in_bounds

ReadCotangents = Callable[[Int[Array, " n"]], Float[Array, "n dim"]]
"""Returns the cotangent of each id, times its gain."""


@jax.named_scope("spread")
def spread(
    cotangents_of: ReadCotangents,
    order: Int[Array, " ids"],
    places: Int[Array, " ids"],
    buffer_size: int,
) -> Float[Array, "buffer dim"]:
    """Sums the cotangents of all samples that used a row. Per shard; no communication.

    The cotangent of each row's first id is gathered; those of its repeats are added.

    Args:
      cotangents_of: reads the cotangents of ids, from `cotangent_reader`.
      order: position of each id before sorting by row.
      places: place of the row of each sorted id in the exchange buffer; `buffer_size`
        if the id is not part of the round.
      buffer_size: places of the exchange buffer.

    Returns:
      The gradient of each row of the exchange buffer. Unused places hold anything.
    """
    is_first = jnp.diff(places, prepend=-1) != 0
    first_ids = jnp.zeros((buffer_size,), jnp.int32)
    first_ids = first_ids.at[jnp.where(is_first, places, buffer_size)].set(
        order, mode="drop", wrap_negative_indices=False
    )
    return add_repeats(
        cotangents_of(first_ids),
        ~is_first & (places < buffer_size),
        places=places,
        value_ids=order,
        read_values=lambda _, ids: cotangents_of(ids),
    )


def cotangent_reader(
    cotangents: Sequence[Float[Array, "_ dim"]],
    poolings: Sequence[PoolingSpec],
) -> ReadCotangents:
    """Returns a function that gathers the cotangents of ids, times gain and scale.

    Args:
      cotangents: per feature of the stack.
      poolings: the features of the stack.
    """
    samples = jnp.concatenate(scale_samples(cotangents, poolings))
    sample_ids, gains = _sample_of_each_id(poolings), gain_of_each_id(poolings)

    def cotangents_of(ids: Int[Array, " n"]) -> Float[Array, "n dim"]:
        sample = ids if sample_ids is None else gather_in_bounds(sample_ids, ids)
        rows = gather_lines(samples, sample)
        return rows if gains is None else rows * gather_in_bounds(gains, ids)[:, None]

    return cotangents_of


def _sample_of_each_id(
    poolings: Sequence[PoolingSpec],
) -> Int[Array, " all_ids"] | None:
    """Numbers the samples of all features; None if each has one id, in order."""
    if all(p.sample_ids is None and p.valence == 1 for p in poolings):
        return None
    samples, first = [], 0
    for pooling in poolings:
        sample_ids = pooling.sample_ids
        if sample_ids is None:
            sample_ids = jnp.tile(jnp.arange(pooling.num_samples), pooling.valence)
        # Unused ids have the number after the last sample; no row is theirs.
        samples.append(first + jnp.minimum(sample_ids, pooling.num_samples - 1))
        first += pooling.num_samples
    return jnp.concatenate(samples)


def gain_of_each_id(
    poolings: Sequence[PoolingSpec],
) -> Float[Array, " all_ids"] | None:
    """Returns the gains of all features; None if every id has gain 1."""
    if all(pooling.gains is None for pooling in poolings):
        return None
    return jnp.concatenate(
        [
            jnp.ones((p.num_ids,), jnp.float32) if p.gains is None else p.gains
            for p in poolings
        ]
    )
