"""The second moments of Adafactor, for the rows of a table and for dense arrays.

Keras factors the last two axes of an array of rank 2 or more. An array of rank 0 or 1
keeps its second moments as they are. Rank 2 is that of tables, whose totals are over
all rows of a table, and whose rows may be skipped in a step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_embedding.optimizers.rules._adafactor_settings import (
    AdafactorSettings,
    row_squares,
)
from tpu_embedding.optimizers.rules._adafactor_state import AdafactorState
from tpu_embedding.optimizers.rules._sums import (
    CompensatedSum,
    coarse_part,
    compensated_sum,
)
from tpu_embedding.optimizers.table_rows import TableRows, is_in_layer


class ScaledGradient(NamedTuple):
    """A gradient divided by the root of its second moments.

    Attributes:
      values: the quotient, `u`.
      rms: root of its mean square, a scalar; of tables, `[tables]`.
      scale: root of the mean square of the decayed values, of the same shape.
      state: state with the new moments.
    """

    values: jax.Array
    rms: jax.Array
    scale: jax.Array
    state: AdafactorState


def scale_array(
    settings: AdafactorSettings, gradient: jax.Array, state: AdafactorState, array: Any
) -> ScaledGradient:
    """Scales the gradient of a dense array of any rank but 2.

    Args:
      settings: arguments of `adafactor`.
      gradient: the clipped gradient.
      state: state before the step.
      array: values after weight decay.
    """
    b = settings.decay_at((state.count + 1).astype(jnp.float32))
    squares = jnp.square(gradient) + settings.epsilon_1
    if state.velocities is not None:
        velocities = b * state.velocities + (1 - b) * squares
        scaled = gradient * _inverse_root(velocities)
        state = state._replace(velocities=velocities)
    else:
        rows = b * state.row_accumulators + (1 - b) * jnp.mean(squares, axis=-1)
        columns = b * state.column_accumulators + (1 - b) * jnp.mean(squares, axis=-2)
        means = jnp.mean(rows, axis=-1, keepdims=True)
        profile = columns / jnp.where(means > 0, means, 1)
        # Two roots: the product of both could underflow.
        scaled = gradient * _inverse_root(rows)[..., None]
        scaled *= _inverse_root(profile)[..., None, :]
        state = state._replace(row_accumulators=rows, column_accumulators=columns)
    return ScaledGradient(scaled, _rms(scaled), _rms(array), state)


def scale_rows(
    settings: AdafactorSettings,
    gradient: jax.Array,
    state: AdafactorState,
    rows: tuple[jax.Array, jax.Array],
    tables: TableRows,
) -> ScaledGradient:
    """Scales the gradients of the rows at hand.

    Args:
      settings: arguments of `adafactor`.
      gradient: the clipped gradient, `[rows, dim]`.
      state: state before the step.
      rows: the rows before and after weight decay.
      tables: the tables of the rows.
    """
    t = (state.count + 1).astype(jnp.float32)
    before, decayed = rows
    accumulators, clocks, clock = _row_moments(settings, gradient, state, tables, t)
    columns, decay_change, num_elements = _column_moments(
        settings, gradient, state, tables, t, jnp.square(decayed) - jnp.square(before)
    )
    means = jnp.mean(columns, axis=1, keepdims=True)
    # A table that was never touched has no column moments yet.
    profile = columns / jnp.where(means > 0, means, 1)
    scaled = gradient * _inverse_root(accumulators)[:, None]
    scaled *= tables.per_row(_inverse_root(profile))
    scaled = jnp.where(rows_to_update(settings, tables)[:, None], scaled, 0)
    rms = jnp.sqrt(tables.total(row_squares(scaled)) / num_elements)
    # Outside of the layer all rows are at hand, and may have been set since.
    squares = state.squares if is_in_layer() else sum_of_squares(before, tables)
    num_values = jnp.maximum(tables.table_sizes, 1) * gradient.shape[1]
    scale = jnp.sqrt(jnp.maximum(squares.value + decay_change, 0) / num_values)
    state = state._replace(
        row_accumulators=accumulators,
        row_clocks=clocks,
        column_accumulators=columns,
        clock=clock,
        squares=squares,
    )
    return ScaledGradient(scaled, rms, scale, state)


def rows_to_update(settings: AdafactorSettings, tables: TableRows) -> Any:
    """Returns the mask of the rows to update: in mode "lazy" the touched ones."""
    return tables.is_touched if settings.mode == "lazy" else tables.is_used


def _row_moments(
    settings: AdafactorSettings,
    gradient: Any,
    state: AdafactorState,
    tables: TableRows,
    t: Any,
) -> tuple[Any, Any, CompensatedSum | None]:
    """Returns the new `r`, the clock of each row, and the clock of the table."""
    mean = jnp.mean(jnp.square(gradient), axis=1) + settings.epsilon_1
    old = state.row_accumulators
    if state.clock is None:
        clocks = state.row_clocks + 1
        b = settings.decay_at(clocks)
        new = b * old + (1 - b) * mean
        moves = tables.is_touched
        return (
            jnp.where(moves, new, old),
            jnp.where(moves, clocks, state.row_clocks),
            None,
        )
    # Applies the updates that the row missed. With gradient 0, each of them is
    # r = b * r + (1 - b) * epsilon_1.
    missed = jnp.exp(state.clock.value - state.row_clocks)
    old = missed * old + (1 - missed) * settings.epsilon_1
    b = settings.decay_at(t)
    # The first step has b = 0, whose logarithm is infinite. It may be skipped: rows
    # that it does not touch stay at epsilon_1, their initial value.
    clock = state.clock.plus(jnp.where(b > 0, jnp.log(jnp.maximum(b, 1e-30)), 0.0))
    clocks = jnp.broadcast_to(clock.value, old.shape)
    return b * old + (1 - b) * mean, clocks, clock


def _column_moments(
    settings: AdafactorSettings,
    gradient: Any,
    state: AdafactorState,
    tables: TableRows,
    t: Any,
    decay_change: Any,
) -> tuple[Any, Any, Any]:
    """Returns the new `c`, and two values per table.

    The second value is the change of the table's sum of squares by weight decay. The
    third is the number of elements over which RMS(u) is the mean.
    """
    dim = gradient.shape[1]
    moves = rows_to_update(settings, tables)
    columns = jnp.where(moves[:, None], jnp.square(gradient), 0)
    count = moves.astype(jnp.float32)
    totals = tables.total(
        jnp.concatenate(
            [columns, count[:, None], jnp.sum(decay_change, axis=1, keepdims=True)],
            axis=1,
        )
    )
    sums, counts, change = totals[:, :dim], totals[:, dim], totals[:, dim + 1]
    num_rows = tables.table_sizes if settings.mode == "exact" else counts
    is_any = num_rows > 0
    num_rows = jnp.maximum(num_rows, 1)
    b = settings.decay_at(t)
    mean = sums / num_rows[:, None] + settings.epsilon_1
    old = state.column_accumulators
    new = jnp.where(is_any[:, None], b * old + (1 - b) * mean, old)
    return new, change, num_rows * dim


def sum_of_squares(rows: Any, tables: TableRows) -> CompensatedSum:
    """Returns the sum of the squares of the elements of each table."""
    rows = rows.astype(jnp.float32)  # Dense parameters may be narrow.
    about = tables.total(row_squares(rows))
    nothing = compensated_sum(jnp.zeros_like(about))
    return plus_total(nothing, jnp.square(rows), tables, about)


def plus_total(
    total: CompensatedSum, values: Any, tables: TableRows, about: Any
) -> CompensatedSum:
    """Adds the values of all rows of each table, `[rows, dim]`.

    A float32 sum would err by a share of the largest total that a table ever had, which
    is much for a table whose values shrink.

    Args:
      total: the sum so far, of each table.
      values: what is added.
      tables: the rows' tables.
      about: total of each table, roughly.
    """
    coarse = coarse_part(values, tables.per_row(about)[:, None])
    parts = [jnp.sum(coarse, axis=1), jnp.sum(values - coarse, axis=1)]
    sums = tables.total(jnp.stack(parts, axis=1))
    return total.plus(sums[:, 0]).plus(sums[:, 1])


def _inverse_root(values: jax.Array) -> jax.Array:
    """Returns `1 / sqrt(values)`; 1 for a value of 0, whose gradients were all 0."""
    return jax.lax.rsqrt(jnp.where(values > 0, values, 1))


def _rms(values: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(values)))
