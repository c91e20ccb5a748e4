"""Lion: the sign of an interpolated momentum.

Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023).
"""

from typing import Unpack

import optax

from tpu_embedding.optimizers.options import (
    CommonOptions,
    takes_common_options,
    with_options,
)


@takes_common_options
def lion(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Lion: `w -= learning_rate * sign(beta_1 * m + (1 - beta_1) * g)`.

    Then `m = beta_2 * m + (1 - beta_2) * g`. TensorFlow: `LionParameters` of the TPU
    embeddings' protocol buffer, lazy; `every_row(lion(...))` is what it has as
    `use_non_lazy_lion`. Slot variable: `m`, `[rows, dim]`, from 0. `optax.lion` adds
    weight decay.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      beta_1: weight of the momentum in the update.
      beta_2: decay of the momentum.
      **options: see `with_options`.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = lion(0.5)
      >>> state = optimizer.init(jnp.zeros((1, 2)))
      >>> optimizer.update(jnp.ones((1, 2)), state)[0].tolist()
      [[-0.5, -0.5]]
    """
    rule = optax.chain(
        optax.scale_by_lion(beta_1, beta_2),
        optax.scale_by_learning_rate(learning_rate),
    )
    return with_options(rule, learning_rate=learning_rate, **options)
