"""Adafactor: second moments as one row and one column vector per table.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (ICML
2018), with Keras' formulas. Keras divides by the mean of the row accumulators. This
rule divides by the mean of the column accumulators. Both means are the same moving
average of the mean squared gradient, but the second is known on every shard.

One state serves tables and dense arrays of any rank. Keras factors the last two axes of
an array of rank 2 or more, and keeps the second moments of other arrays as they are.
Tables have rank 2. Their totals are over all rows, and a step may skip rows.

Totals are compensated float32 sums, accurate over millions of small additions.
"""

import dataclasses
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.averages import Averages, EMAStart
from tpu_embedding.optimizers.checks import PASSED, finite, positive_bound
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import public_optimizer
from tpu_embedding.optimizers.row_optimizer import (
    DeclaredRule,
    Driver,
    EveryRow,
    RowOptimizer,
    Touched,
)
from tpu_embedding.optimizers.rules._clipping import (
    ClipnormOf,
    Clipping,
    with_norm_of_arrays,
)
from tpu_embedding.optimizers.table_rows import TableRows, is_in_layer, table_rows


class CompensatedSum(NamedTuple):
    """A float32 sum, and the rounding error that its value does not hold.

    Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B.

    Attributes:
      value: the sum, rounded to float32.
      rest: the rounding error, added to the next addend.
    """

    value: Any
    rest: Any

    def plus(self, addend: jax.Array) -> "CompensatedSum":
        """Returns the sum with `addend` added."""
        addend = addend + self.rest
        value = self.value + addend
        return CompensatedSum(value, _rounding_error(self.value, addend, value))


def coarse_part(values: jax.Array, total: jax.Array) -> jax.Array:
    """Rounds values to a unit, so that float32 sums of them are exact in any order.

    The sum of `values - coarse_part(values, total)` is small, and so is its rounding
    error. A sum of both parts is as exact as one of twice the bits.

    Args:
      values: float32.
      total: float32, broadcast against the values. Sums up to 8 times as large are
        exact.

    Example:
      >>> values = jnp.array([1e7, 0.25])
      >>> coarse = coarse_part(values, jnp.float32(1e7))
      >>> coarse.tolist(), (values - coarse).tolist()
      ([10000000.0, 0.0], [0.0, 0.25])
    """
    bits = jax.lax.bitcast_convert_type(jnp.maximum(total, 1e-30), jnp.int32)
    # The exponent alone: a power of two.
    power = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    unit = power * 2**-20
    # Larger values are multiples of the unit, and their quotients could overflow.
    is_small = jnp.abs(values) < 8 * power
    return jnp.where(is_small, jnp.round(values / unit) * unit, values)


def is_sum(node: Any) -> bool:
    """Returns True if a part of an optimizer's state is a compensated sum."""
    return isinstance(node, CompensatedSum)


def _rounding_error(first: jax.Array, second: jax.Array, total: jax.Array) -> jax.Array:
    """Returns `first + second - total`, of the rounded total."""
    added = total - first
    return (first - (total - added)) + (second - added)


def compensated_sum(start: jax.Array) -> CompensatedSum:
    """Returns a compensated sum that starts at the given value."""
    return CompensatedSum(start, jnp.zeros_like(start))


NO_SUM: Final = CompensatedSum(None, None)
"""Stands for a sum that is not kept, in a state of the same structure."""


class CollectedGradients(NamedTuple):
    """State of `adafactor` on dense arrays, with `gradient_accumulation_steps`."""

    steps: optax.MultiStepsState


class AdafactorState(NamedTuple):
    """State of `adafactor`. A field that an array has no use for is None.

    Attributes:
      count: updates so far.
      row_accumulators: `r`, `[rows]`; of a dense array of rank 3 or more, its shape
        without the last axis.
      row_clocks: `[rows]`. Mode "lazy": updates of the row so far. Mode "exact": sum of
        the logarithms of the decays up to the row's latest update.
      column_accumulators: `c`, `[tables, dim]`; of a dense array of rank 3 or more, its
        shape without the axis before the last.
      velocities: second moments of a dense array of rank 0 or 1.
      squares: sum of the squares of all elements of each table, `[tables]`.
      clock: mode "exact": sum of the logarithms of the decays so far.
      averages: moving averages, with `use_ema`; of the shape of the array.
      average_counts: `[rows]`, the `count` at the latest update of the row's average.
      average_momentum: decay of the averages.
    """

    count: jax.Array
    row_accumulators: Any = None
    row_clocks: Any = None
    column_accumulators: Any = None
    velocities: Any = None
    # All rows of a dense array are at hand in each step, so nothing is tracked. Its
    # state has empty sums, so that all states have one structure.
    squares: CompensatedSum = NO_SUM
    clock: CompensatedSum | None = None
    averages: Any = None
    average_counts: Any = None
    average_momentum: Any = None


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


@public_optimizer(
    weight_decay=finite,
    clipvalue=positive_bound,
    name=lambda _: PASSED,  # It has no effect.
)
def adafactor(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    *,
    beta_2_decay: float = -0.8,
    epsilon_1: float = 1e-30,
    epsilon_2: float = 1e-3,
    clip_threshold: float = 1.0,
    relative_step: bool = True,
    weight_decay: float | None = None,
    clipnorm: float | None = None,
    clipvalue: float | None = None,
    global_clipnorm: float | None = None,
    use_ema: bool = False,
    ema_momentum: float = 0.99,
    ema_overwrite_frequency: int | None = None,
    loss_scale_factor: float | None = None,
    gradient_accumulation_steps: int | None = None,
    name: str = "adafactor",
    mode: AdafactorMode = "lazy",
    ema_start: EMAStart = "first_update",
    clipnorm_of: ClipnormOf = "sum",
) -> optax.GradientTransformation:
    """Makes Adafactor as Keras defines it, for tables and for dense arrays.

    For a row `w` of `dim` elements with the summed gradient `g`, in step `t` counted
    from 1::

        b = 1 - t**beta_2_decay
        S = g**2 + epsilon_1
        r = b * r + (1 - b) * mean(S)                          mean over the row
        c = b * c + (1 - b) * mean(S)                          mean over the column
        u = g / sqrt(r * c / mean(c))
        u = u / max(1, RMS(u) / clip_threshold)
        w -= max(epsilon_2, RMS(w)) * min(learning_rate, 1 / sqrt(t)) * u

    `S` is the regularised square, `b` the decay, and `u` the scaled gradient. `RMS(x)`
    is the root of the mean square of `x` over the table. The slot variables are `r` and
    a clock, `[rows]`. The column accumulators `c`, `[dim]`, are kept once per table.
    They start at 0, except that `r` starts at `epsilon_1` in mode `"exact"`.

    Source: Shazeer and Stern (2018), as `keras.optimizers.Adafactor` of Keras 3 and
    `tf_keras`. `optax.adafactor` is a different algorithm: it factors only large
    matrices, and its decay, clipping and scaling differ.

    The modes differ in rows that the step does not look up:

    * `"exact"` gives Keras' numbers. Such rows have gradient 0, so their `r` decays.
      The missed decays are applied when the row is next touched. A rare row therefore
      has a small `r` and takes large steps, up to `t**0.4`. Means over rows include all
      rows of the table.
    * `"lazy"` leaves such rows alone. `t` in the decay of `r` counts the row's own
      updates, so the first update sets `r` to the row's mean of `S`. Means over rows
      include the touched rows only, except in `RMS(w)`. It equals `"exact"` if every
      step touches every row.

    A step takes three small all-reduces per table: `dim + 2` scalars, then 1, then 2.
    `RMS(w)` comes from a sum of squares, which follows the values that the table
    stores: an update of a narrow table counts as it is rounded, and the row
    of a new id replaces the one before. A restore measures it again. Where ids are not
    row numbers, means and `RMS(w)` are over the rows that ids read, so the table equals
    one of that many rows. Adafactor must be the last
    transformation of a chain. Values of a table that are set later are set with the
    optimizer, by `tpu_embedding.Optimizer.set_embedding_tables`, so that the scale
    follows.

    It is also an optax transformation of dense arrays of any rank, in either mode with
    Keras' numbers. So one `adafactor(...)` trains the tables and the dense parameters
    of a model. An array of rank 2 or more is factored over its last two axes. One of
    rank 0 or 1 keeps its second moments as they are.

    `use_ema` keeps a moving average of each row, as `with_ema` does. Rows that a step
    does not look up stay as they are, so their averages follow in closed form, when
    they are next touched or read. `tpu_embedding.Optimizer.finalize_variable_values`
    sets a model to its averages after training.
    `tpu_embedding.functional.finalize_variable_values` does so for tables or dense
    arrays alone.

    `global_clipnorm` takes the norm of all gradients of a model, tables and dense
    parameters together, as the loss gives them. `tpu_embedding.Optimizer`, and
    `TrainState` of Linen, compute it. `tpu_embedding.functional.apply_gradients` takes
    it as an argument, or computes the norm of its tables. Without any of them it is the
    norm of the arrays that the transformation is given.

    Options that move all rows need a pass over the table in each step, and keep the
    dense gradient as `every_row` does. They are `gradient_accumulation_steps`,
    `ema_overwrite_frequency`, and `weight_decay` in mode `"exact"`. In mode `"lazy"`
    only touched rows decay.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0. With
        `gradient_accumulation_steps` it counts the steps that are summed.
      beta_2_decay: exponent of `b`, at most 0.
      epsilon_1: non-negative.
      epsilon_2: smallest scale of the step, non-negative.
      clip_threshold: largest root mean square of `u`, positive.
      relative_step: without effect, as in Keras, which always takes the smaller of
        `learning_rate` and `1 / sqrt(t)`.
      weight_decay: fraction of the rows, times the learning rate, lost before the
        update.
      clipnorm: largest norm of a table's gradient, positive.
      clipvalue: largest absolute value of a gradient's element, positive. At most one
        of `clipnorm`, `clipvalue` and `global_clipnorm` may be given.
      global_clipnorm: largest norm of the gradients of the whole model, positive. On
        tables it excludes `gradient_accumulation_steps`.
      use_ema: True keeps moving averages of the rows.
      ema_momentum: decay of these averages, in [0, 1].
      ema_overwrite_frequency: number of updates after which the averages replace the
        rows. Defaults to never. It excludes `gradient_accumulation_steps`.
      loss_scale_factor: factor by which the loss was multiplied, positive; gradients
        are divided by it.
      gradient_accumulation_steps: number of steps, at least 2, whose mean gradient
        makes one update. By default, each step updates. As in Keras, averages
        advance in each of these steps.
      name: without effect; an argument of Keras.
      mode: `"lazy"` or `"exact"`, see above.
      ema_start: `"first_update"` starts the averages at the rows after the first
        update, as Keras 3 does. `"initial_values"` starts them at the rows before it,
        as `tf_keras` does.
      clipnorm_of: `"sum"` takes the norm of the gradient with one entry per row.
        `"occurrences"` takes the norm over all occurrences of ids, as `tf_keras` does
        for `tf.IndexedSlices`.

    Raises:
      ValueError: if a value is out of its range, or options exclude each other.

    Example:
      >>> optimizer = adafactor(0.1)
      >>> rows = jnp.ones((3, 2))
      >>> updates, _ = optimizer.update(rows, optimizer.init(rows), rows)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.1, -0.1]
    """
    del name, relative_step
    steps = gradient_accumulation_steps or 1
    rule = _Adafactor(
        learning_rate=learning_rate,
        beta_2_decay=beta_2_decay,
        epsilon_1=epsilon_1,
        epsilon_2=epsilon_2,
        clip_threshold=clip_threshold,
        weight_decay=weight_decay,
        mode=mode,
        clip=Clipping(
            loss_scale_factor, clipvalue, clipnorm, global_clipnorm, clipnorm_of
        ),
        averages=(
            Averages(ema_momentum, ema_overwrite_frequency, ema_start, steps)
            if use_ema
            else None
        ),
        gradient_steps=steps,
    )
    _check_together(rule)
    of_occurrences = clipnorm is not None and clipnorm_of == "occurrences"
    transformation = for_each_array(rule.init, rule.update)
    if global_clipnorm is not None:
        transformation = with_norm_of_arrays(transformation, steps)
    if rule.moves_every_row:
        driver: Driver = EveryRow(gradient_steps=steps)
    else:
        driver = Touched(occurrence_norm=of_occurrences)
    row_optimizer = RowOptimizer(
        transformation=transformation,
        driver=driver,
        takes_model_norm=global_clipnorm is not None,
    )
    if steps == 1:
        return DeclaredRule(row_optimizer)
    # A layer collects the gradients of its tables itself.
    return DeclaredRule(row_optimizer, _collecting(transformation, steps))


def _collecting(
    rule: optax.GradientTransformation, num_steps: int
) -> optax.GradientTransformation:
    """Runs a rule on the mean gradient of several steps."""
    collects = optax.MultiSteps(rule, num_steps)

    def init(params: Any) -> CollectedGradients:
        return CollectedGradients(collects.init(params))

    def update(
        updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, CollectedGradients]:
        updates, steps = collects.update(updates, state.steps, params)
        return updates, CollectedGradients(steps)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adafactor:
    """The rule of the rows of tables, and of a dense array of any rank.

    Other fields are the arguments of `adafactor` with their names.

    Attributes:
      clip: unscales and clips a gradient.
      averages: keeps moving averages of the rows, unless it is `None`.
      gradient_steps: steps whose gradients one update averages.
    """

    learning_rate: optax.ScalarOrSchedule
    beta_2_decay: Any
    epsilon_1: Any
    epsilon_2: Any
    clip_threshold: Any
    weight_decay: Any
    mode: AdafactorMode
    clip: Clipping
    averages: Averages | None
    gradient_steps: int

    @property
    def moves_every_row(self) -> bool:
        """True if rows that the step does not look up change in the same step."""
        decays_all = self.mode == "exact" and self.weight_decay is not None
        overwrites = self.averages and self.averages.overwrite_frequency is not None
        return self.gradient_steps > 1 or decays_all or bool(overwrites)

    def init(self, array: Any) -> AdafactorState:
        """Returns the state of the rows of one stack, or of a dense array."""
        shape, is_exact = array.shape, self.mode == "exact"
        state = AdafactorState(
            count=jnp.zeros((), jnp.int32), clock=NO_SUM if is_exact else None
        )
        if len(shape) < 2:
            state = state._replace(velocities=jnp.zeros(shape, jnp.float32))
        elif len(shape) > 2:
            state = state._replace(
                row_accumulators=jnp.zeros(shape[:-1], jnp.float32),
                column_accumulators=jnp.zeros((*shape[:-2], shape[-1]), jnp.float32),
            )
        else:
            tables = table_rows(array)
            num_tables = tables.table_sizes.shape[0]
            start = self.epsilon_1 if is_exact else 0.0
            state = state._replace(
                row_accumulators=jnp.full(shape[0], start, jnp.float32),
                row_clocks=jnp.zeros(shape[0], jnp.float32),
                column_accumulators=jnp.zeros((num_tables, shape[1]), jnp.float32),
                squares=sum_of_squares(array, tables),
                clock=compensated_sum(jnp.zeros(())) if is_exact else None,
            )
        return state if self.averages is None else self.averages.init(state, array)

    def update(self, gradient: Any, state: Any, array: Any) -> tuple[Any, Any]:
        """Returns the updates of the rows or the array, and the new state."""
        tables = table_rows(gradient) if gradient.ndim == 2 else None
        # Keras' schedules count steps. An update may take several.
        step = state.count * self.gradient_steps + self.gradient_steps - 1
        rate = learning_rate_at(self.learning_rate, step)
        gradient = self.clip(jnp.asarray(gradient, jnp.float32), tables)
        old = decayed = jnp.asarray(array, jnp.float32)
        if self.weight_decay is not None:
            lost = self.weight_decay * rate * old
            if tables is not None:
                lost = jnp.where(self._rows_to_update(tables)[:, None], lost, 0)
            decayed = old - lost
        if tables is None:
            scaled = self._scale_array(gradient, state, decayed)
        else:
            scaled = self._scale_rows(gradient, state, old, decayed, tables)
        t = (state.count + 1).astype(jnp.float32)
        alpha = jnp.maximum(self.epsilon_2, scaled.scale)
        alpha *= jnp.minimum(rate, jax.lax.rsqrt(t))
        alpha /= jnp.maximum(1, scaled.rms / self.clip_threshold)
        if tables is not None:
            alpha = tables.per_row(alpha)[:, None]
        new, state = decayed - alpha * scaled.values, scaled.state
        if self.averages is not None:
            stored = new if tables is None else tables.stored(old, new - old)
            new, state = self.averages.update(old, stored, state)
        updates = new - old
        if tables is not None:
            # The sum follows the values that the table will hold, as they are rounded.
            stored = tables.stored(old, updates).astype(jnp.float32)
            change = (stored - old) * (stored + old)
            total = plus_total(state.squares, change, tables, state.squares.value)
            state = state._replace(squares=total)
        return updates, state._replace(count=state.count + 1)

    def _scale_array(
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
        if state.velocities is not None:  # Rank 0 or 1: not factored.
            velocities = b * state.velocities + (1 - b) * squares
            scaled = gradient * _inverse_root(velocities)
            state = state._replace(velocities=velocities)
        else:
            rows = b * state.row_accumulators + (1 - b) * jnp.mean(squares, axis=-1)
            columns = b * state.column_accumulators
            columns += (1 - b) * jnp.mean(squares, axis=-2)
            # The mean of the rows is the mean of the columns.
            means = jnp.mean(rows, axis=-1, keepdims=True)
            profile = columns / jnp.where(means > 0, means, 1)
            # Two roots: the product of both could underflow.
            scaled = gradient * _inverse_root(rows)[..., None]
            scaled *= _inverse_root(profile)[..., None, :]
            state = state._replace(row_accumulators=rows, column_accumulators=columns)
        return ScaledGradient(scaled, _rms(scaled), _rms(array), state)

    def _scale_rows(
        self,
        gradient: jax.Array,
        state: AdafactorState,
        old: jax.Array,
        decayed: jax.Array,
        tables: TableRows,
    ) -> ScaledGradient:
        """Scales the gradients of the rows at hand.

        Args:
          gradient: the clipped gradient, `[rows, dim]`.
          state: state before the step.
          old: the rows before weight decay.
          decayed: the rows after it.
          tables: the tables of the rows.
        """
        # Outside of the layer all rows are at hand, and may have been set since.
        squares = state.squares if is_in_layer() else sum_of_squares(old, tables)
        moves, dim = self._rows_to_update(tables), gradient.shape[1]
        state = self._move_rows(gradient, state._replace(squares=squares), tables)

        # The sums of a table over its rows take one all-reduce: of the columns' squared
        # gradients, of rows that move, and of the change of squares by weight decay.
        change = jnp.sum(jnp.square(decayed) - jnp.square(old), axis=1)
        totals = tables.total(
            jnp.concatenate(
                [
                    jnp.where(moves[:, None], jnp.square(gradient), 0),
                    moves.astype(jnp.float32)[:, None],
                    change[:, None],
                ],
                axis=1,
            )
        )
        sums, counts, change = totals[:, :dim], totals[:, dim], totals[:, dim + 1]
        num_rows = tables.table_sizes if self.mode == "exact" else counts
        has_rows = num_rows > 0
        num_rows = jnp.maximum(num_rows, 1)
        b = self._decay_at(state.count + 1)
        columns = b * state.column_accumulators
        columns += (1 - b) * (sums / num_rows[:, None] + self.epsilon_1)
        columns = jnp.where(has_rows[:, None], columns, state.column_accumulators)

        means = jnp.mean(columns, axis=1, keepdims=True)
        # A table that was never touched has no column moments yet.
        profile = columns / jnp.where(means > 0, means, 1)
        scaled = gradient * _inverse_root(state.row_accumulators)[:, None]
        scaled *= tables.per_row(_inverse_root(profile))
        scaled = jnp.where(moves[:, None], scaled, 0)
        total = tables.total(jnp.sum(jnp.square(scaled), axis=1))
        num_values = jnp.maximum(tables.table_sizes, 1) * dim
        return ScaledGradient(
            values=scaled,
            rms=jnp.sqrt(total / (num_rows * dim)),
            scale=jnp.sqrt(jnp.maximum(squares.value + change, 0) / num_values),
            state=state._replace(column_accumulators=columns),
        )

    def _rows_to_update(self, tables: TableRows) -> Any:
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


def _check_together(rule: _Adafactor) -> None:
    """Rejects arguments that exclude each other."""
    clip, steps = rule.clip, rule.gradient_steps
    bounds = ("clipnorm", "clipvalue", "global_clipnorm")
    given = [name for name in bounds if getattr(clip, name) is not None]
    if len(given) > 1:
        raise ValueError(
            "adafactor: at most one of clipnorm, clipvalue and global_clipnorm may be "
            f"given, got {given}. Keep one of them."
        )
    is_of_occurrences = clip.clipnorm is not None and clip.clipnorm_of == "occurrences"
    if is_of_occurrences and rule.moves_every_row:
        raise ValueError(
            "adafactor: clipnorm_of must be 'sum' with weight_decay in mode 'exact', "
            "ema_overwrite_frequency or gradient_accumulation_steps, got "
            "'occurrences'. They pass over every row, where only the summed gradients "
            "are known. Write clipnorm_of='sum', or turn them off."
        )
    if steps == 1:
        return
    if rule.averages is not None and rule.averages.overwrite_frequency is not None:
        raise ValueError(
            "adafactor: ema_overwrite_frequency must be None with "
            "gradient_accumulation_steps, got "
            f"{rule.averages.overwrite_frequency} and {steps}. Keras would overwrite "
            "the rows in steps without an update as well. Leave one out, and call "
            "finalize_variable_values at the end."
        )
