"""Combiners of the user's own: pooled after all rounds, and differentiated by JAX.

A feature with a `CustomCombiner` is looked up as a sequence of `max_valence` ids.
`apply_custom_combiners` pools the sequences when all their rows are there, and
`row_cotangents` turns the cotangents of the results into those of the rows.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.lookup._flatten_to_owners import PoolingSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledSequence:
    """The rows that a custom combiner pooled, for its derivative. Per shard.

    Attributes:
      rows: float32 `[samples * max_valence, dim]`.
      valences: int32 `[samples]`, the rows of each sample, which come first.
      combiner: pools them.
    """

    rows: Float[Array, "places dim"]
    valences: Int[Array, " samples"]
    combiner: CustomCombiner = dataclasses.field(metadata={"static": True})


def apply_custom_combiners(
    activations: Sequence[Float[Array, "_ dim"]], poolings: Sequence[PoolingSpec]
) -> tuple[list[Float[Array, "_ dim"]], list[PooledSequence | None]]:
    """Pools the sequences of features that have a custom combiner. Per shard.

    Args:
      activations: per feature of the stack.
      poolings: per feature of the stack.

    Returns:
      Activations per feature, and per feature what `row_cotangents` needs; None for
      features without a custom combiner, whose activations stay as they are.
    """
    results, sequences = [], []
    for x, pooling in zip(activations, poolings, strict=True):
        sequence = None
        if pooling.custom_combiner is not None:
            assert pooling.valences is not None
            sequence = PooledSequence(
                rows=x, valences=pooling.valences, combiner=pooling.custom_combiner
            )
            x = _pool(sequence, x)
        results.append(x)
        sequences.append(sequence)
    return results, sequences


def row_cotangents(
    cotangents: Sequence[Float[Array, "_ dim"]],
    sequences: Sequence[PooledSequence | None],
) -> list[Float[Array, "_ dim"]]:
    """Returns the cotangents of the rows that custom combiners pooled. Per shard.

    Args:
      cotangents: derivatives of the loss by the activations, per feature.
      sequences: from `apply_custom_combiners`.
    """
    return [
        x if sequence is None else _row_cotangents(x, sequence)
        for x, sequence in zip(cotangents, sequences, strict=True)
    ]


def _pool(
    sequence: PooledSequence, rows: Float[Array, "places dim"]
) -> Float[Array, "samples dim"]:
    samples = rows.reshape(-1, sequence.combiner.max_valence, rows.shape[1])
    pooled = jax.vmap(sequence.combiner.function)(sequence.valences, samples)
    # The function may divide by the valence.
    return jnp.where(sequence.valences[:, None] > 0, pooled, 0.0)


def _row_cotangents(
    cotangents: Float[Array, "samples dim"], sequence: PooledSequence
) -> Float[Array, "places dim"]:
    _, derivative = jax.vjp(lambda rows: _pool(sequence, rows), sequence.rows)
    (by_row,) = derivative(cotangents)
    # Places without a row have no owner, but 0 * NaN of an empty sample would spread.
    place = jnp.arange(sequence.combiner.max_valence, dtype=jnp.int32)
    is_used = place[None] < sequence.valences[:, None]
    return jnp.where(is_used.reshape(-1, 1), by_row, 0.0)
