"""Adafactor for the rows of a table: totals over rows, and rows that are skipped."""

from typing import Any

import jax
import jax.numpy as jnp

from tpu_embedding.optimizers.rules._adafactor_settings import (
    AdafactorSettings,
    clipped,
    inverse_root,
    row_squares,
)
from tpu_embedding.optimizers.rules._adafactor_state import AdafactorState
from tpu_embedding.optimizers.rules._sums import (
    CompensatedSum,
    coarse_part,
    compensated_sum,
)
from tpu_embedding.optimizers.table_rows import (
    TableRows,
    is_in_layer,
    table_rows,
)


def init_rows(settings: AdafactorSettings, rows: Any) -> AdafactorState:
    """Returns the state for the rows of one stack. The rows come from `table_rows`."""
    tables = table_rows(rows)
    num_rows, dim = rows.shape
    is_exact = settings.mode == "exact"
    averages = average_counts = average_momentum = None
    if settings.use_ema:
        averages = jnp.array(rows, jnp.float32)
        average_counts = jnp.zeros(num_rows, jnp.int32)
        average_momentum = jnp.asarray(settings.ema_momentum, jnp.float32)
    return AdafactorState(
        count=jnp.zeros((), jnp.int32),
        row_accumulators=jnp.full(
            num_rows, settings.epsilon_1 if is_exact else 0.0, jnp.float32
        ),
        row_clocks=jnp.zeros(num_rows, jnp.float32),
        column_accumulators=jnp.zeros((tables.table_sizes.shape[0], dim), jnp.float32),
        velocities=None,
        squares=_sum_of_squares(rows, tables),
        clock=compensated_sum(jnp.zeros(())) if is_exact else None,
        averages=averages,
        average_counts=average_counts,
        average_momentum=average_momentum,
    )


def update_rows(
    settings: AdafactorSettings, gradient: Any, state: AdafactorState, rows: Any
) -> tuple[Any, AdafactorState]:
    """Returns the updates of the rows at hand and the new state."""
    tables = table_rows(gradient)
    dim = gradient.shape[1]
    t = (state.count + 1).astype(jnp.float32)
    rate = settings.rate_at(state.count)
    gradient = clipped(settings, gradient, tables)
    decayed = _decay(settings, rate, rows, tables)
    accumulators, clocks, clock = _row_moments(settings, gradient, state, tables, t)
    columns, decay_change, num_elements = _column_moments(
        settings, gradient, state, tables, t, jnp.square(decayed) - jnp.square(rows)
    )
    means = jnp.mean(columns, axis=1, keepdims=True)
    # A table that was never touched has no column moments yet.
    profile = columns / jnp.where(means > 0, means, 1)
    scaled = gradient * inverse_root(accumulators)[:, None]
    scaled *= tables.per_row(inverse_root(profile))
    scaled = jnp.where(_update_mask(settings, tables)[:, None], scaled, 0)
    rms = jnp.sqrt(tables.total(row_squares(scaled)) / num_elements)
    # Outside of the layer all rows are at hand, and may have been set since.
    squares = state.squares
    if not is_in_layer():
        squares = _sum_of_squares(rows, tables)
    num_values = jnp.maximum(tables.table_sizes, 1) * dim
    scale = jnp.sqrt(jnp.maximum(squares.value + decay_change, 0) / num_values)
    alpha = jnp.maximum(settings.epsilon_2, scale) * jnp.minimum(rate, jax.lax.rsqrt(t))
    alpha /= jnp.maximum(1, rms / settings.clip_threshold)
    new = decayed - tables.per_row(alpha)[:, None] * scaled
    state = state._replace(
        row_accumulators=accumulators,
        row_clocks=clocks,
        column_accumulators=columns,
        clock=clock,
    )
    if settings.use_ema:
        new, state = _average(settings, rows, tables.stored(rows, new - rows), state)
    updates = new - rows
    # The sum follows the values that the table will hold, rounded as they are.
    stored = tables.stored(rows, updates).astype(jnp.float32)
    change = (stored - rows) * (stored + rows)
    squares = _plus_total(squares, change, tables, squares.value)
    return updates, state._replace(count=state.count + 1, squares=squares)


def _update_mask(settings: AdafactorSettings, tables: TableRows) -> Any:
    """Returns the mask of the rows to update: in mode "lazy" the touched ones."""
    return tables.is_touched if settings.mode == "lazy" else tables.is_used


def _decay(settings: AdafactorSettings, rate: Any, rows: Any, tables: TableRows) -> Any:
    """Returns the rows after weight decay."""
    if settings.weight_decay is None:
        return rows
    lost = jnp.where(
        _update_mask(settings, tables)[:, None], settings.weight_decay * rate * rows, 0
    )
    return rows - lost


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
    moves = _update_mask(settings, tables)
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


def _average(
    settings: AdafactorSettings, rows: Any, new: Any, state: AdafactorState
) -> tuple[Any, AdafactorState]:
    """Returns the new rows, and the state with their moving averages."""
    missed = (state.count - state.average_counts)[:, None]
    averages = settings.new_averages(state.averages, rows, new, state.count, missed)
    state = state._replace(
        averages=averages,
        average_counts=jnp.broadcast_to(state.count + 1, state.average_counts.shape),
        average_momentum=jnp.asarray(settings.ema_momentum, jnp.float32),
    )
    if settings.ema_overwrite_frequency is None:
        return new, state
    return jnp.where(settings.overwrites_at(state.count), averages, new), state


def _sum_of_squares(rows: Any, tables: TableRows) -> CompensatedSum:
    """Returns the sum of the squares of the elements of each table."""
    rows = rows.astype(jnp.float32)  # Dense parameters may be narrow.
    about = tables.total(row_squares(rows))
    nothing = compensated_sum(jnp.zeros_like(about))
    return _plus_total(nothing, jnp.square(rows), tables, about)


def _plus_total(
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
