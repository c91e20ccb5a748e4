"""Lion: the sign of an interpolated momentum.

Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023).
"""

from typing import Unpack

import optax

from tpu_embedding.optimizers.checks import fraction
from tpu_embedding.optimizers.options import CommonOptions, takes_common_options


@takes_common_options(beta_1=fraction, beta_2=fraction)
def lion(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Lion, which steps by the sign of an interpolated momentum.

    For a row `w` with the summed gradient `g`::

        w -= learning_rate * sign(beta_1 * m + (1 - beta_1) * g)
        m = beta_2 * m + (1 - beta_2) * g

    The slot variable `m`, `[rows, dim]`, starts at 0.

    Source: Chen et al. (2023), as `LionParameters` of TensorFlow's
    `optimization_parameters.proto`.

    `m` decays only in steps that look its row up. `every_row(lion(...))` is
    TensorFlow's `use_non_lazy_lion`, and Keras' Lion. `optax.lion` also decays weights.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      beta_1: weight of the momentum in the step, in [0, 1].
      beta_2: decay of the momentum, in [0, 1].
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = lion(0.5)
      >>> state = optimizer.init(jnp.zeros((1, 2)))
      >>> optimizer.update(jnp.ones((1, 2)), state)[0].tolist()
      [[-0.5, -0.5]]
    """
    return optax.chain(
        optax.scale_by_lion(beta_1, beta_2),
        optax.scale_by_learning_rate(learning_rate),
    )
