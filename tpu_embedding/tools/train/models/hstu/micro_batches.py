"""Computes a function of samples for some of them at a time, to save memory."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_embedding.tools.train.models.hstu.stu_layer import ATTENTION_OUTPUT

_POLICY: Final = jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT)

Remat = Callable[[Callable[..., Array]], Callable[..., Array]]


def in_micro_batches(
    function: Callable[[Any, Remat], Float[Array, "samples ..."]],
    samples: Any,
    size: int,
) -> Float[Array, "batch ..."]:
    """Returns the function's results, computed for at most `size` samples at a time.

    There are as few micro-batches as possible, of equal size; zeros fill up the last
    one. The backward pass computes each of them again, except for outputs of attention.
    With one micro-batch it computes one layer at a time again, which takes less memory.
    Derivatives by arrays that the function closes over add up in the dtype of these.

    Args:
      function: maps arrays of some samples, and a wrapper for each of its layers, to an
        array of their results. The result of a sample must depend on no other sample,
        and be finite for zeros.
      samples: pytree of arrays `[batch, ...]`.
      size: largest number of samples at a time.
    """
    batch = jax.tree.leaves(samples)[0].shape[0]
    count = max(1, -(-batch // size))
    if count == 1:
        return function(samples, functools.partial(jax.checkpoint, policy=_POLICY))
    missing = -batch % count

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(count, -1, *x.shape[1:])

    remat = jax.checkpoint(
        lambda part: function(part, lambda layer: layer),
        policy=_POLICY,
        prevent_cse=False,  # a loop separates both passes
    )
    results = jax.lax.map(remat, jax.tree.map(split, samples))
    return results.reshape(batch + missing, *results.shape[2:])[:batch]
