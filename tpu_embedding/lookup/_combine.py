"""Stages 5 and 6: rows to activations, and cotangents back to rows.

`combine` and `spread` are each other's transpose: both are the sparse matrix
`[samples, places]` of the gains.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._flatten import Bags


def combine(
    rows: Float[Array, "buffer dim"],
    places: Int[Array, " all_ids"],
    bags: Sequence[Bags],
) -> list[Float[Array, "_ dim"]]:
    """Sums gain-weighted rows into their samples. Per shard; no communication.

    Args:
      rows: rows in the exchange buffer.
      places: place of each id's row in it; beyond the end where there is none.
      bags: the features of the stack.

    Returns:
      Float32 activations per feature. Samples without ids are zero.
    """
    activations = []
    for bag, places_of_bag in zip(bags, _split(places, bags), strict=True):
        rows_of_ids = rows.at[places_of_bag].get(
            mode="fill", fill_value=0.0, wrap_negative_indices=False
        )
        if bag.gains is not None:
            rows_of_ids *= bag.gains[:, None]
        if bag.sample_ids is not None:
            pooled = jax.ops.segment_sum(
                rows_of_ids, bag.sample_ids, bag.num_samples, indices_are_sorted=True
            )
        elif bag.valence == 1:
            pooled = rows_of_ids
        else:
            pooled = rows_of_ids.reshape(-1, bag.valence, rows.shape[1]).sum(axis=1)
        activations.append(pooled)
    return activations


def spread(
    cotangents: Sequence[Float[Array, "_ dim"]],
    places: Int[Array, " all_ids"],
    bags: Sequence[Bags],
    buffer_size: int,
) -> Float[Array, "buffer dim"]:
    """Sums the cotangents of all samples that used a row. Per shard.

    Args:
      cotangents: per feature of the stack.
      places: as in `combine`.
      bags: the features of the stack.
      buffer_size: places of the exchange buffer.

    Returns:
      The gradient of each row in the exchange buffer.
    """
    contributions = []
    for bag, cotangent in zip(bags, cotangents, strict=True):
        if bag.sample_ids is not None:
            of_ids = cotangent.at[bag.sample_ids].get(mode="clip")
        elif bag.valence == 1:
            of_ids = cotangent
        else:
            of_ids = jnp.repeat(cotangent, bag.valence, axis=0)
        if bag.gains is not None:
            of_ids *= bag.gains[:, None]
        contributions.append(of_ids)
    contribution = jnp.concatenate(contributions)
    gradients = jnp.zeros((buffer_size, contribution.shape[1]), jnp.float32)
    return gradients.at[places].add(
        contribution, mode="drop", wrap_negative_indices=False
    )


def _split(
    places: Int[Array, " all_ids"], bags: Sequence[Bags]
) -> list[Int[Array, "_"]]:
    parts, start = [], 0
    for bag in bags:
        if bag.sample_ids is None:
            size = bag.num_samples * bag.valence
        else:
            size = bag.sample_ids.shape[0]
        parts.append(places[start : start + size])
        start += size
    return parts
