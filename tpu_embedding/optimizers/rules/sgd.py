"""Stochastic gradient descent."""

from typing import Unpack

import optax

from tpu_embedding.optimizers.options import CommonOptions, takes_common_options


@takes_common_options()
def sgd(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes plain gradient descent.

    For a row `w` with the summed gradient `g`::

        w -= learning_rate * g

    There are no slot variables.

    Source: `tf.tpu.experimental.embedding.SGD`. The result equals `optax.sgd` on the
    dense gradient, because a row that the step does not look up has gradient zero.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      **options: see `with_options`.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = sgd(0.5)
      >>> updates, _ = optimizer.update(jnp.ones((1, 2)), optimizer.init(None))
      >>> updates.tolist()
      [[-0.5, -0.5]]
    """
    return optax.scale_by_learning_rate(learning_rate)
