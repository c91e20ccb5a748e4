"""Gradient descent with and without momentum, Lion, and assignment.

All but `assign` combine optax transformations, with TensorFlow's argument names.
"""

from typing import Any, Unpack

import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.checks import equal_calls_are_one, fraction
from tpu_embedding.optimizers.options import CommonOptions, public_optimizer
from tpu_embedding.optimizers.row_optimizer import declare


@public_optimizer()
def sgd(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes plain gradient descent, without slot variables.

    For a row `w` with summed gradient `g`::

        w -= learning_rate * g

    Source: `tf.tpu.experimental.embedding.SGD`. The result equals applying `optax.sgd`
    to the dense gradient, because untouched rows have gradient zero.

    Args:
      learning_rate: scalar or optax schedule.
      **options: see `with_options`.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = sgd(0.5)
      >>> updates, _ = optimizer.update(jnp.ones((1, 2)), optimizer.init(None))
      >>> updates.tolist()
      [[-0.5, -0.5]]
    """
    return optax.scale_by_learning_rate(learning_rate)


@public_optimizer()
def momentum(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    momentum: float = 0.9,
    *,
    use_nesterov: bool = False,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes gradient descent with heavy-ball or Nesterov momentum.

    For a row `w` with summed gradient `g`::

        m = momentum * m + g
        w -= learning_rate * m
        w -= learning_rate * (g + momentum * m)           instead, if use_nesterov

    The slot variable `m`, `[rows, dim]`, starts at 0.

    Source: Polyak, "Some methods of speeding up the convergence of iteration methods"
    (1964). Nesterov's form follows Sutskever et al., "On the importance of
    initialization and momentum in deep learning" (ICML 2013). Both are as in
    TensorFlow's `MomentumParameters` (`optimization_parameters.proto`) and kernel
    `ResourceSparseApplyMomentum`.

    `m` decays only in steps that look up its row. `optax.sgd(momentum=...)` and Keras'
    SGD update every row in every step. If the learning rate is constant,
    `every_row(momentum(...))` gives the same result as both.

    Args:
      learning_rate: scalar or optax schedule.
      momentum: decay of `m`, in [0, 1].
      use_nesterov: True selects the Nesterov step.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

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


@public_optimizer(beta_1=fraction, beta_2=fraction)
def lion(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Lion, which steps by the sign of an interpolated momentum.

    For a row `w` with summed gradient `g`::

        w -= learning_rate * sign(beta_1 * m + (1 - beta_1) * g)
        m = beta_2 * m + (1 - beta_2) * g

    The slot variable `m`, `[rows, dim]`, starts at 0.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023),
    as in TensorFlow's `LionParameters` (`optimization_parameters.proto`).

    `m` decays only in steps that look up its row. `every_row(lion(...))` equals
    Keras' Lion, and TensorFlow's Lion with `use_non_lazy_lion`. `optax.lion` also
    decays weights.

    Args:
      learning_rate: scalar or optax schedule.
      beta_1: weight of the momentum in the step, in [0, 1].
      beta_2: decay of the momentum, in [0, 1].
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

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


@equal_calls_are_one
def assign() -> optax.GradientTransformation:
    """Makes an optimizer that sets each touched row to its gradient.

    For a row `w` with summed gradient `g`::

        w = g

    `g` is summed over samples, features and devices. A touched row with gradient 0
    becomes 0. The optimizer has neither slot variables nor a learning rate.

    Source: TensorFlow's `AssignParameters` (`optimization_parameters.proto`). With
    `in_sequence`, the row is set to the gradient of the id's last occurrence, whereas
    TensorFlow does not guarantee an order. optax has no equivalent.

    The layer clears a row before it adds `g`, so the row equals `g` even if it was NaN
    or infinite. Outside the layer, the update is `g - w`.

    Example:
      >>> optimizer = assign()
      >>> rows = jnp.ones((1, 2))
      >>> updates, _ = optimizer.update(5.0 * rows, optimizer.init(rows), rows)
      >>> (rows + updates).tolist()
      [[5.0, 5.0]]
    """

    def replace(gradient: Any, row: Any) -> Any:
        return jnp.subtract(gradient, row)

    return declare(optax.stateless_with_tree_map(replace), sets_rows=True)
