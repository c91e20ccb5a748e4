"""Adafactor for dense arrays that are no tables: any rank but 2, as Keras has it.

Keras factors the last two axes of an array of rank 2 or more. An array of rank 0 or 1
keeps its second moments as they are. Rank 2 is that of tables; `_adafactor_rows.py` has
the same formula for it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tpu_embedding.optimizers.rules._adafactor_settings import (
    AdafactorSettings,
    clipped,
    inverse_root,
)
from tpu_embedding.optimizers.rules._adafactor_state import AdafactorState
from tpu_embedding.optimizers.rules._sums import NO_SUM


def init_dense(settings: AdafactorSettings, array: Any) -> AdafactorState:
    """Returns the state for an array."""
    shape = array.shape
    rows = columns = velocities = averages = momentum = None
    if len(shape) < 2:
        velocities = jnp.zeros(shape, jnp.float32)
    else:
        rows = jnp.zeros(shape[:-1], jnp.float32)
        columns = jnp.zeros((*shape[:-2], shape[-1]), jnp.float32)
    if settings.use_ema:
        averages = jnp.array(array, jnp.float32)
        momentum = jnp.asarray(settings.ema_momentum, jnp.float32)
    # All rows are at hand in each step, so nothing is tracked between steps. The sums
    # stand here, empty, so that the states of all arrays have one structure.
    return AdafactorState(
        count=jnp.zeros((), jnp.int32),
        row_accumulators=rows,
        row_clocks=None,
        column_accumulators=columns,
        velocities=velocities,
        squares=NO_SUM,
        clock=NO_SUM if settings.mode == "exact" else None,
        averages=averages,
        average_counts=None,
        average_momentum=momentum,
    )


def update_dense(
    settings: AdafactorSettings, gradient: Any, state: AdafactorState, array: Any
) -> tuple[Any, AdafactorState]:
    """Returns the update of an array, and the new state."""
    t = (state.count + 1).astype(jnp.float32)
    rate = settings.rate_at(state.count)
    gradient = clipped(settings, jnp.asarray(gradient, jnp.float32), None)
    old = jnp.asarray(array, jnp.float32)
    decayed = old
    if settings.weight_decay is not None:
        decayed = old - settings.weight_decay * rate * old
    scaled, state = _scale(settings, gradient, state, t)
    alpha = jnp.maximum(settings.epsilon_2, _rms(decayed))
    alpha *= jnp.minimum(rate, jax.lax.rsqrt(t))
    alpha /= jnp.maximum(1, _rms(scaled) / settings.clip_threshold)
    new = decayed - alpha * scaled
    if settings.use_ema:
        averages = settings.new_averages(state.averages, old, new, state.count, 0)
        state = state._replace(
            averages=averages,
            average_momentum=jnp.asarray(settings.ema_momentum, jnp.float32),
        )
        if settings.ema_overwrite_frequency is not None:
            new = jnp.where(settings.overwrites_at(state.count), averages, new)
    updates = new - old
    return updates, state._replace(count=state.count + 1)


def _scale(
    settings: AdafactorSettings, gradient: jax.Array, state: AdafactorState, t: Any
) -> tuple[jax.Array, AdafactorState]:
    """Returns the gradient divided by the root of its second moments, and these."""
    b = settings.decay_at(t)
    squares = jnp.square(gradient) + settings.epsilon_1
    if state.velocities is not None:
        velocities = b * state.velocities + (1 - b) * squares
        scaled = gradient * inverse_root(velocities)
        return scaled, state._replace(velocities=velocities)
    rows = b * state.row_accumulators + (1 - b) * jnp.mean(squares, axis=-1)
    columns = b * state.column_accumulators + (1 - b) * jnp.mean(squares, axis=-2)
    means = jnp.mean(rows, axis=-1, keepdims=True)
    profile = columns / jnp.where(means > 0, means, 1)
    # Two roots: the product of both could underflow.
    scaled = gradient * inverse_root(rows)[..., None]
    scaled *= inverse_root(profile)[..., None, :]
    return scaled, state._replace(row_accumulators=rows, column_accumulators=columns)


def _rms(values: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(values)))
