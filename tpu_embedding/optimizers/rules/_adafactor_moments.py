"""The second moments of Adafactor, for the rows of a table and for dense arrays.

Keras factors the last two axes of an array of rank 2 or more. An array of rank 0 or 1
keeps its second moments as they are. Rank 2 is that of tables, whose totals are over
all rows of a table, and whose rows may be skipped in a step.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tpu_embedding.optimizers.rules._adafactor_state import AdafactorState
from tpu_embedding.optimizers.rules._sums import (
    NO_SUM,
    CompensatedSum,
    coarse_part,
    compensated_sum,
)
from tpu_embedding.optimizers.table_rows import TableRows, is_in_layer, table_rows

AdafactorMode = Literal["lazy", "exact"]


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


@dataclasses.dataclass(frozen=True)
class Moments:
    """How the second moments of `adafactor` move; see its arguments."""

    beta_2_decay: Any
    epsilon_1: Any
    mode: AdafactorMode

    def init(self, array: Any) -> AdafactorState:
        """Returns the state of the rows of one stack, or of a dense array."""
        shape, is_exact = array.shape, self.mode == "exact"
        state = AdafactorState(
            count=jnp.zeros((), jnp.int32), clock=NO_SUM if is_exact else None
        )
        if len(shape) < 2:
            return state._replace(velocities=jnp.zeros(shape, jnp.float32))
        if len(shape) > 2:
            return state._replace(
                row_accumulators=jnp.zeros(shape[:-1], jnp.float32),
                column_accumulators=jnp.zeros((*shape[:-2], shape[-1]), jnp.float32),
            )
        tables = table_rows(array)
        start = self.epsilon_1 if is_exact else 0.0
        return state._replace(
            row_accumulators=jnp.full(shape[0], start, jnp.float32),
            row_clocks=jnp.zeros(shape[0], jnp.float32),
            column_accumulators=jnp.zeros(
                (tables.table_sizes.shape[0], shape[1]), jnp.float32
            ),
            squares=sum_of_squares(array, tables),
            clock=compensated_sum(jnp.zeros(())) if is_exact else None,
        )

    def scale_array(
        self, gradient: jax.Array, state: AdafactorState, array: Any
    ) -> ScaledGradient:
        """Scales the gradient of a dense array of any rank but 2.

        Args:
          gradient: the clipped gradient.
          state: state before the step.
          array: values after weight decay.
        """
        b = self._decay_at(state.count + 1)
        squares = jnp.square(gradient) + self.epsilon_1
        if state.velocities is not None:
            velocities = b * state.velocities + (1 - b) * squares
            scaled = gradient * _inverse_root(velocities)
            state = state._replace(velocities=velocities)
        else:
            rows = b * state.row_accumulators + (1 - b) * jnp.mean(squares, axis=-1)
            columns = b * state.column_accumulators
            columns += (1 - b) * jnp.mean(squares, axis=-2)
            means = jnp.mean(rows, axis=-1, keepdims=True)
            profile = columns / jnp.where(means > 0, means, 1)
            # Two roots: the product of both could underflow.
            scaled = gradient * _inverse_root(rows)[..., None]
            scaled *= _inverse_root(profile)[..., None, :]
            state = state._replace(row_accumulators=rows, column_accumulators=columns)
        return ScaledGradient(scaled, _rms(scaled), _rms(array), state)

    def scale_rows(
        self,
        gradient: jax.Array,
        state: AdafactorState,
        rows: tuple[jax.Array, jax.Array],
        tables: TableRows,
    ) -> ScaledGradient:
        """Scales the gradients of the rows at hand.

        Args:
          gradient: the clipped gradient, `[rows, dim]`.
          state: state before the step.
          rows: the rows before and after weight decay.
          tables: the tables of the rows.
        """
        before, decayed = rows
        # Outside of the layer all rows are at hand, and may have been set since.
        squares = state.squares if is_in_layer() else sum_of_squares(before, tables)
        state = self._move_rows(gradient, state._replace(squares=squares), tables)
        change = jnp.sum(jnp.square(decayed) - jnp.square(before), axis=1)
        columns, change, num_rows = self._move_columns(gradient, state, tables, change)
        means = jnp.mean(columns, axis=1, keepdims=True)
        # A table that was never touched has no column moments yet.
        profile = columns / jnp.where(means > 0, means, 1)
        scaled = gradient * _inverse_root(state.row_accumulators)[:, None]
        scaled *= tables.per_row(_inverse_root(profile))
        scaled = jnp.where(self.rows_to_update(tables)[:, None], scaled, 0)
        dim = gradient.shape[1]
        total = tables.total(jnp.sum(jnp.square(scaled), axis=1))
        rms = jnp.sqrt(total / (num_rows * dim))
        num_values = jnp.maximum(tables.table_sizes, 1) * dim
        scale = jnp.sqrt(jnp.maximum(squares.value + change, 0) / num_values)
        state = state._replace(column_accumulators=columns)
        return ScaledGradient(scaled, rms, scale, state)

    def rows_to_update(self, tables: TableRows) -> Any:
        """Returns the mask of the rows to update: in mode "lazy" the touched ones."""
        return tables.is_touched if self.mode == "lazy" else tables.is_used

    def _decay_at(self, t: jax.Array) -> jax.Array:
        """Returns the decay of the accumulators in update `t`, counted from 1."""
        return 1 - jnp.power(t.astype(jnp.float32), self.beta_2_decay)

    def _move_rows(
        self, gradient: Any, state: AdafactorState, tables: TableRows
    ) -> AdafactorState:
        """Returns the state with the new `r`, and the new clocks."""
        mean = jnp.mean(jnp.square(gradient), axis=1) + self.epsilon_1
        old = state.row_accumulators
        if state.clock is None:  # Mode "lazy".
            clocks = state.row_clocks + 1
            b = self._decay_at(clocks)
            moves = tables.is_touched
            return state._replace(
                row_accumulators=jnp.where(moves, b * old + (1 - b) * mean, old),
                row_clocks=jnp.where(moves, clocks, state.row_clocks),
            )
        # Applies the updates that the row missed. With gradient 0, each of them is
        # r = b * r + (1 - b) * epsilon_1.
        missed = jnp.exp(state.clock.value - state.row_clocks)
        old = missed * old + (1 - missed) * self.epsilon_1
        b = self._decay_at(state.count + 1)
        # The first step has b = 0, whose logarithm is infinite. It may be skipped: rows
        # that it does not touch stay at epsilon_1, their initial value.
        clock = state.clock.plus(jnp.where(b > 0, jnp.log(jnp.maximum(b, 1e-30)), 0.0))
        return state._replace(
            row_accumulators=b * old + (1 - b) * mean,
            row_clocks=jnp.broadcast_to(clock.value, old.shape),
            clock=clock,
        )

    def _move_columns(
        self, gradient: Any, state: AdafactorState, tables: TableRows, change: Any
    ) -> tuple[Any, Any, Any]:
        """Returns the new `c`, the total of `change`, and the rows that means are over.

        All of them are of each table. They take one all-reduce.
        """
        dim = gradient.shape[1]
        moves = self.rows_to_update(tables)
        columns = jnp.where(moves[:, None], jnp.square(gradient), 0)
        count = moves.astype(jnp.float32)
        parts = [columns, count[:, None], change[:, None]]
        totals = tables.total(jnp.concatenate(parts, axis=1))
        sums, counts, change = totals[:, :dim], totals[:, dim], totals[:, dim + 1]
        num_rows = tables.table_sizes if self.mode == "exact" else counts
        is_any = num_rows > 0
        num_rows = jnp.maximum(num_rows, 1)
        b = self._decay_at(state.count + 1)
        old = state.column_accumulators
        new = b * old + (1 - b) * (sums / num_rows[:, None] + self.epsilon_1)
        return jnp.where(is_any[:, None], new, old), change, num_rows


def sum_of_squares(rows: Any, tables: TableRows) -> CompensatedSum:
    """Returns the sum of the squares of the elements of each table."""
    rows = rows.astype(jnp.float32)  # Dense parameters may be narrow.
    about = tables.total(jnp.sum(jnp.square(rows), axis=1))
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
