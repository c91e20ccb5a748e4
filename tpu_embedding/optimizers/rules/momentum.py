"""Gradient descent with momentum.

Polyak, "Some methods of speeding up the convergence of iteration methods" (1964).
Nesterov's variant follows Sutskever et al., "On the importance of initialization and
momentum in deep learning" (ICML 2013).
"""

from typing import Unpack

import optax

from tpu_embedding.optimizers.options import CommonOptions, takes_common_options


@takes_common_options()
def momentum(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    momentum: float = 0.9,
    *,
    use_nesterov: bool = False,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes gradient descent with momentum.

    For a row `w` with the summed gradient `g`::

        m = momentum * m + g
        w -= learning_rate * m
        w -= learning_rate * (g + momentum * m)           instead, if use_nesterov

    The slot variable `m`, `[rows, dim]`, starts at 0.

    Source: `MomentumParameters` of TensorFlow's `optimization_parameters.proto`, and
    its kernel `ResourceSparseApplyMomentum`.

    `m` decays only in steps that look its row up. `optax.sgd(momentum=...)` and Keras'
    SGD move every row in every step. At a constant learning rate,
    `every_row(momentum(...))` gives their result.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      momentum: decay of `m`, in [0, 1].
      use_nesterov: True selects Nesterov's step.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = momentum(0.5)
      >>> state = optimizer.init(jnp.zeros((1, 2)))
      >>> optimizer.update(jnp.ones((1, 2)), state)[0].tolist()
      [[-0.5, -0.5]]
    """
    return optax.chain(
        optax.trace(decay=momentum, nesterov=use_nesterov),
        optax.scale_by_learning_rate(learning_rate),
    )
