"""Adam, by default with moments that move only when their row is touched ("lazy").

Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.modes import every_row
from tpu_embedding.optimizers.options import (
    CommonOptions,
    takes_common_options,
    with_options,
)
from tpu_embedding.optimizers.rules._arrays import for_each_array
from tpu_embedding.optimizers.rules._checks import (
    check_hyperparameters,
    fraction_below_one,
    positive,
)


class ScaleByAdamState(NamedTuple):
    """Slot variables `[rows, dim]`, and the number of updates so far."""

    count: jax.Array
    momenta: jax.Array
    velocities: jax.Array


@takes_common_options
def adam(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    lazy_adam: bool = True,
    sum_inside_sqrt: bool = True,
    *,
    bias_correction: bool = False,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Adam as TensorFlow's TPU embeddings have it.

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        w -= learning_rate * m / sqrt(v + epsilon**2)     if sum_inside_sqrt
        w -= learning_rate * m / (sqrt(v) + epsilon)      otherwise

    TensorFlow: `tf.tpu.experimental.embedding.Adam`. It differs from `optax.adam` in
    two ways. Moments of a row decay only in steps that look it up, unless `lazy_adam`
    is False: then every row decays and moves in each step, at the cost of a pass over
    the table. And there is no bias correction unless asked for; then the learning rate
    is multiplied by `sqrt(1 - beta_2**t) / (1 - beta_1**t)` with the step t from 1, the
    same for all rows.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      beta_1: decay of the momenta, in [0, 1).
      beta_2: decay of the velocities, in [0, 1).
      epsilon: positive.
      lazy_adam: see above.
      sum_inside_sqrt: where epsilon is added, see above.
      bias_correction: see above.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range, or options contradict each other.

    Example:
      >>> optimizer = adam(0.1)
      >>> state = optimizer.init(jnp.zeros((1, 2)))
      >>> updates, state = optimizer.update(jnp.ones((1, 2)), state)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.3162, -0.3162]
    """
    if not lazy_adam and not options.get("use_gradient_accumulation", True):
        raise ValueError(
            "adam moves every row with lazy_adam=False, so it needs the sum of each "
            "row's gradients: use_gradient_accumulation must be True, got False."
        )
    rule = optax.chain(
        scale_by_lazy_adam(
            beta_1,
            beta_2,
            epsilon,
            sum_inside_sqrt=sum_inside_sqrt,
            bias_correction=bias_correction,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )
    rule = rule if lazy_adam else every_row(rule)
    return with_options(rule, learning_rate=learning_rate, **options)


def scale_by_lazy_adam(
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    *,
    sum_inside_sqrt: bool = True,
    bias_correction: bool = False,
) -> optax.GradientTransformation:
    """Scales by the moments of Adam; see `adam`."""
    check_hyperparameters(
        "adam",
        beta_1=fraction_below_one(beta_1),
        beta_2=fraction_below_one(beta_2),
        epsilon=positive(epsilon),
    )

    def init(params):
        return ScaleByAdamState(
            count=jnp.zeros((), jnp.int32),
            momenta=jnp.zeros_like(params),
            velocities=jnp.zeros_like(params),
        )

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        momenta = beta_1 * state.momenta + (1 - beta_1) * updates
        velocities = beta_2 * state.velocities + (1 - beta_2) * jnp.square(updates)
        if sum_inside_sqrt:
            steps = momenta * jax.lax.rsqrt(velocities + epsilon**2)
        else:
            steps = momenta / (jnp.sqrt(velocities) + epsilon)
        if bias_correction:
            t = count.astype(steps.dtype)
            steps *= jnp.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        return steps, ScaleByAdamState(count, momenta, velocities)

    return for_each_array(init, update)
