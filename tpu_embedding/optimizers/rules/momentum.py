"""Gradient descent with momentum.

Polyak, "Some methods of speeding up the convergence of iteration methods" (1964);
Sutskever et al., "On the importance of initialization and momentum in deep learning"
(ICML 2013) for Nesterov's.
"""

from typing import Unpack

import optax

from tpu_embedding.optimizers.options import (
    CommonOptions,
    takes_common_options,
    with_options,
)


@takes_common_options
def momentum(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    momentum: float = 0.9,
    use_nesterov: bool = False,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Momentum: `m = momentum * m + g; w -= learning_rate * m`.

    With Nesterov, `w -= learning_rate * (g + momentum * m)`. TensorFlow:
    `MomentumParameters` of the TPU embeddings' protocol buffer, and the kernel
    `ResourceSparseApplyMomentum`. Slot variable: `m`, `[rows, dim]`, from 0; it decays
    only in steps that look its row up. Keras' SGD with momentum moves every row: that
    is `every_row(momentum(...))`, at a constant learning rate.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      momentum: decay of `m`.
      use_nesterov: see above.
      **options: see `with_options`.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = momentum(0.5)
      >>> state = optimizer.init(jnp.zeros((1, 2)))
      >>> optimizer.update(jnp.ones((1, 2)), state)[0].tolist()
      [[-0.5, -0.5]]
    """
    rule = optax.chain(
        optax.trace(decay=momentum, nesterov=use_nesterov),
        optax.scale_by_learning_rate(learning_rate),
    )
    return with_options(rule, learning_rate=learning_rate, **options)
