"""Stages 5 and 6: rows to activations, and cotangents back to rows.

`combine` and `spread` are each other's transpose: both are the sparse matrix
`[samples, places]` of the gains.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._flatten import Bags

_MOST_SLICES: Final = 128
"""Ids of a sample up to which each is an addition of its own in the program."""


def combine(
    rows: Float[Array, "buffer dim"],
    places: Int[Array, " all_ids"],
    bags: Sequence[Bags],
) -> list[Float[Array, "_ dim"]]:
    """Sums gain-weighted rows into their samples. Per shard; no communication.

    Args:
      rows: rows in the exchange buffer.
      places: place of each id's row in it; beyond the end where there is none. The
        last place of the buffer is no id's.
      bags: the features of the stack.

    Returns:
      Float32 activations per feature. Samples without ids are zero.
    """
    # The last place is never an id's; reading it needs no mask on what is read.
    nothing = rows.shape[0] - 1
    rows = rows.at[nothing].set(0.0)
    places = jnp.minimum(places, nothing)
    # One gather for all features: a TPU starts and compiles it faster than many.
    of_ids = rows.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return [
        _pool(bag, of_bag)
        for bag, of_bag in zip(bags, _split(of_ids, bags), strict=True)
    ]


def _pool(bag: Bags, rows: Float[Array, "ids dim"]) -> Float[Array, "samples dim"]:
    """Sums the rows of each sample, times their gains."""
    if bag.gains is not None:
        rows = rows * bag.gains[:, None]
    if bag.sample_ids is not None:
        return jax.ops.segment_sum(
            rows, bag.sample_ids, bag.num_samples, indices_are_sorted=True
        )
    if bag.valence == 1:
        return rows
    if bag.valence > _MOST_SLICES:
        return rows.reshape(bag.valence, -1, rows.shape[1]).sum(axis=0)
    # Slices are added where they lie; a reduction would have them copied out first.
    return functools.reduce(jnp.add, jnp.split(rows, bag.valence))


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
            of_ids = jnp.tile(cotangent, (bag.valence, 1))
        if bag.gains is not None:
            of_ids *= bag.gains[:, None]
        contributions.append(of_ids)
    contribution = jnp.concatenate(contributions)
    gradients = jnp.zeros((buffer_size, contribution.shape[1]), jnp.float32)
    return gradients.at[places].add(
        contribution, mode="drop", wrap_negative_indices=False
    )


def _split(
    of_ids: Float[Array, "all_ids dim"], bags: Sequence[Bags]
) -> list[Float[Array, "_ dim"]]:
    sizes = [
        bag.num_samples * bag.valence
        if bag.sample_ids is None
        else bag.sample_ids.shape[0]
        for bag in bags
    ]
    return jnp.split(of_ids, list(itertools.accumulate(sizes))[:-1])
