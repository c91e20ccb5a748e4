"""RMSProp, plain and centered, and Adadelta.

Tieleman and Hinton, "Lecture 6.5 - RMSProp" (2012). The centered form follows Graves,
"Generating Sequences With Recurrent Neural Networks" (2013). Adadelta follows Zeiler,
"ADADELTA: An Adaptive Learning Rate Method" (2012).
"""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import CommonOptions, takes_common_options


class RMSPropState(NamedTuple):
    """State of `rmsprop`.

    Attributes:
      count: updates so far.
      ms: moving averages of squared gradients, `[rows, dim]`.
      mom: momenta of the steps, `[rows, dim]`.
      mg: moving averages of gradients, `[rows, dim]`; None unless centered.
    """

    count: jax.Array
    ms: jax.Array
    mom: jax.Array
    mg: jax.Array | None


@takes_common_options()
def rmsprop(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    *,
    rho: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-7,
    initial_ms: float = 0.0,
    centered: bool = False,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes RMSProp with momentum.

    For a row `w` with the summed gradient `g`::

        ms = rho * ms + (1 - rho) * g**2
        mg = rho * mg + (1 - rho) * g                     if centered, else 0
        mom = momentum * mom + learning_rate * g / sqrt(max(ms - mg**2, 0) + epsilon)
        w -= mom

    The slot variables `ms`, `mom` and `mg` are `[rows, dim]`. `ms` starts at
    `initial_ms`, the others at 0. `mg` is a slot variable only if centered.

    Source: Tieleman and Hinton (2012), as `RmsPropParameters` and
    `CenteredRmsPropParameters` of TensorFlow's `optimization_parameters.proto`, and its
    kernels `ResourceSparseApplyRMSProp` and `ResourceSparseApplyCenteredRMSProp`.

    Slot variables decay only in steps that look their row up; `optax.rmsprop` and Keras
    move every row. TensorFlow 1 started `ms` at 1, Keras at 0.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      rho: decay of `ms` and `mg`, in [0, 1].
      momentum: decay of `mom`, in [0, 1].
      epsilon: positive.
      initial_ms: start of `ms`, non-negative.
      centered: True subtracts the squared mean of the gradient.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> rmsprop(0.1).init(jnp.ones((3, 2))).ms.shape
      (3, 2)
    """

    def init(params: Any) -> Any:
        return RMSPropState(
            count=jnp.zeros((), jnp.int32),
            ms=jnp.full_like(params, initial_ms),
            mom=jnp.zeros_like(params),
            mg=jnp.zeros_like(params) if centered else None,
        )

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        del params
        rate = learning_rate_at(learning_rate, state.count)
        ms = rho * state.ms + (1 - rho) * jnp.square(updates)
        mg, variance = None, ms
        if centered:
            mg = rho * state.mg + (1 - rho) * updates
            # Rounding makes it negative where gradients stay the same.
            variance = jnp.maximum(ms - jnp.square(mg), 0)
        step = rate * updates * jax.lax.rsqrt(variance + epsilon)
        mom = momentum * state.mom + step
        return -mom, RMSPropState(state.count + 1, ms, mom, mg)

    return for_each_array(init, update)


class AdadeltaState(NamedTuple):
    """State of `adadelta`: mean squares of gradients and updates, `[rows, dim]`."""

    accumulators: jax.Array
    updates: jax.Array


@takes_common_options()
def adadelta(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    rho: float = 0.95,
    epsilon: float = 1e-7,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adadelta, which scales gradients to the size of the past updates.

    For a row `w` with the summed gradient `g`::

        a = rho * a + (1 - rho) * g**2
        x = g * sqrt(u + epsilon) / sqrt(a + epsilon)
        u = rho * u + (1 - rho) * x**2
        w -= learning_rate * x

    `x` is the update. The slot variables `a` and `u`, `[rows, dim]`, start at 0.

    Source: Zeiler (2012), as `AdadeltaParameters` of TensorFlow's
    `optimization_parameters.proto`, and its kernel `ResourceSparseApplyAdadelta`.

    Slot variables decay only in steps that look their row up; `optax.adadelta` and
    Keras move every row.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      rho: decay of both slot variables, in [0, 1].
      epsilon: positive.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> adadelta(1.0).init(jnp.ones((3, 2)))[0].updates.shape
      (3, 2)
    """

    def init(params):
        return AdadeltaState(jnp.zeros_like(params), jnp.zeros_like(params))

    def update(updates, state, params=None):
        del params
        a = rho * state.accumulators + (1 - rho) * jnp.square(updates)
        x = updates * jnp.sqrt(state.updates + epsilon) * jax.lax.rsqrt(a + epsilon)
        return x, AdadeltaState(a, rho * state.updates + (1 - rho) * jnp.square(x))

    return optax.chain(
        for_each_array(init, update),
        optax.scale_by_learning_rate(learning_rate),
    )
