"""Adam, by default lazy: moments move only when their row is touched.

Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import positive
from tpu_embedding.optimizers.modes import every_row
from tpu_embedding.optimizers.options import CommonOptions, takes_common_options


class AdamState(NamedTuple):
    """State of `adam`.

    Attributes:
      count: updates so far.
      momenta: moving averages of the gradients, `[rows, dim]`.
      velocities: moving averages of their squares, `[rows, dim]`.
    """

    count: jax.Array
    momenta: jax.Array
    velocities: jax.Array


@takes_common_options()
def adam(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    *,
    lazy_adam: bool = True,
    sum_inside_sqrt: bool = True,
    bias_correction: bool = False,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adam as TensorFlow's TPU embedding defines it.

    For a row `w` with the summed gradient `g`::

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        w -= c * learning_rate * m / sqrt(v + epsilon**2)        if sum_inside_sqrt
        w -= c * learning_rate * m / (sqrt(v) + epsilon)         otherwise
        c = sqrt(1 - beta_2**t) / (1 - beta_1**t)     if bias_correction, else 1

    `c` is the bias correction, and `t` the step, counted from 1, for all rows alike.
    The slot variables `m` and `v`, `[rows, dim]`, start at 0.

    Source: Kingma and Ba (2015), as `tf.tpu.experimental.embedding.Adam`.

    It differs from `optax.adam` and Keras' Adam in three ways:

    * Moments of a row decay only in steps that look the row up. `lazy_adam=False` moves
      every row in every step, at the cost of a pass over the table.
    * There is no bias correction unless `bias_correction=True`.
    * Epsilon is inside the root unless `sum_inside_sqrt=False`.

    With all three arguments set, it equals Keras' Adam. `optax.adam` then still differs
    in epsilon, which it adds after the bias correction.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      beta_1: decay of `m`, in [0, 1).
      beta_2: decay of `v`, in [0, 1).
      epsilon: positive; at least 1.1e-19 with `sum_inside_sqrt=True`, because the
        square of a smaller one is 0 in float32.
      lazy_adam: False moves every row in every step, as dense Adam does.
      sum_inside_sqrt: True adds epsilon inside the root.
      bias_correction: True multiplies the learning rate by `c`.
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
            "adam: lazy_adam=False moves every row once by its summed gradient, so "
            "use_gradient_accumulation must be True, got False. Leave it out, or set "
            "lazy_adam=True."
        )
    if sum_inside_sqrt and positive(epsilon**2).problem:
        raise ValueError(
            "adam: epsilon must be at least 1.1e-19 with sum_inside_sqrt=True, which "
            f"squares it in float32, got {epsilon}. Raise it, or set "
            "sum_inside_sqrt=False."
        )

    def init(params):
        return AdamState(
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
        return steps, AdamState(count, momenta, velocities)

    rule = optax.chain(
        for_each_array(init, update), optax.scale_by_learning_rate(learning_rate)
    )
    return rule if lazy_adam else every_row(rule)
