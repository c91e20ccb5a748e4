"""Stochastic gradient descent."""

import optax


def sgd(
    learning_rate: optax.ScalarOrSchedule = 0.01,
) -> optax.GradientTransformation:
    r"""Plain gradient descent, `w -= learning_rate * g`; no slot variables.

    TensorFlow: `tf.tpu.experimental.embedding.SGD`. Equal to `optax.sgd` of a dense
    gradient, since a row that was not looked up has gradient zero.

    Args:
      learning_rate: number or schedule of the step, counted from 0.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = sgd(0.5)
      >>> updates, _ = optimizer.update(jnp.ones((1, 2)), optimizer.init(None))
      >>> updates.tolist()
      [[-0.5, -0.5]]
    """
    return optax.scale_by_learning_rate(learning_rate)
