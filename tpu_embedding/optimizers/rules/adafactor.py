"""Adafactor: second moments as one row vector and one column vector per table.

A step needs column means, `RMS(u)` and `RMS(w)` over whole tables, but sees only some
rows. `table_rows` adds up the first two over shards and rounds. `RMS(w)` comes from a
compensated running sum, which stays accurate over millions of additions.
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
from tpu_embedding.optimizers.table_rows import (
    TableRows,
    is_in_layer,
    model_gradient_context,
    model_gradient_squares,
    table_rows,
)


class CompensatedSum(NamedTuple):
    """A float32 sum and its rounding error, which is added with the next addend.

    See Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B.
    """

    value: Any
    rest: Any

    def plus(self, addend: jax.Array) -> "CompensatedSum":
        addend = addend + self.rest
        value = self.value + addend
        return CompensatedSum(value, _rounding_error(self.value, addend, value))


def coarse_part(values: jax.Array, total: jax.Array) -> jax.Array:
    """Rounds float32 values to a unit, so that their sum is exact in any order.

    The remainders `values - coarse_part(values, total)` are small, and so is the
    rounding error of their sum. So summing coarse parts and remainders separately is as
    exact as summing with twice the bits. `total` is a rough estimate of the sum. Sums
    up to 8 times this estimate are exact.

    Example:
      >>> values = jnp.array([1e7, 0.25])
      >>> coarse = coarse_part(values, jnp.float32(1e7))
      >>> coarse.tolist(), (values - coarse).tolist()
      ([10000000.0, 0.0], [0.0, 0.25])
    """
    # Without this minimum, the unit could be subnormal, which TPUs flush to 0.
    bits = jax.lax.bitcast_convert_type(jnp.maximum(total, 1e-30), jnp.int32)
    # Keeps only the exponent, which gives a power of two.
    power = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    # Sums up to `8 * total` stay below `2**24` units, which float32 counts exactly.
    unit = power * 2**-20
    # Larger values are already multiples of the unit, and their quotients could
    # overflow.
    is_small = jnp.abs(values) < 8 * power
    return jnp.where(is_small, jnp.round(values / unit) * unit, values)


def is_sum(node: Any) -> bool:
    """Tells if a state node is a sum. Use it as `is_leaf` in `jax.tree`."""
    return isinstance(node, CompensatedSum)


def _rounding_error(first: jax.Array, second: jax.Array, total: jax.Array) -> jax.Array:
    # In exact arithmetic, the result would be 0, so don't simplify this expression.
    added = total - first
    return (first - (total - added)) + (second - added)


def compensated_sum(start: jax.Array) -> CompensatedSum:
    """Starts a compensated sum at a value."""
    return CompensatedSum(start, jnp.zeros_like(start))


NO_SUM: Final = CompensatedSum(None, None)
"""Placeholder for an unused sum, so that all states have the same structure."""


class CollectedGradients(NamedTuple):
    """State of dense arrays if `gradient_accumulation_steps` is set."""

    steps: optax.MultiStepsState


class AdafactorState(NamedTuple):
    """Moments and sums. Fields that an array does not need are None.

    Attributes:
      row_accumulators: `r`, `[rows]`. For arrays above rank 2, the array's shape
        without its last axis.
      row_clocks: `[rows]`. In mode "lazy", the number of the row's updates so far. In
        mode "exact", the `clock` after the row's latest update.
      column_accumulators: `c`, `[tables, dim]`. For arrays above rank 2, the array's
        shape without its second-to-last axis.
      velocities: second moments of arrays below rank 2.
      squares: summed squared elements, `[tables]`.
      clock: sum of the logarithms of the decays so far, only in mode "exact".
      average_counts: `[rows]`, the `count` when each average was last updated.
    """

    count: jax.Array
    row_accumulators: Any = None
    row_clocks: Any = None
    column_accumulators: Any = None
    velocities: Any = None
    # Only arrays of rank 2 have running sums, because only they may be tables.
    squares: CompensatedSum = NO_SUM
    clock: CompensatedSum | None = None
    averages: Any = None
    average_counts: Any = None
    average_momentum: Any = None


AdafactorMode = Literal["lazy", "exact"]
ClipnormOf = Literal["sum", "occurrences"]


class ScaledGradient(NamedTuple):
    """A gradient divided by the root of its second moments.

    Attributes:
      rms: root mean square of `values`, a scalar or `[tables]`.
      scale: root mean square of the parameters after weight decay, in the shape of
        `rms`.
    """

    values: jax.Array
    rms: jax.Array
    scale: jax.Array
    state: AdafactorState


def sum_of_squares(rows: Any, tables: TableRows) -> CompensatedSum:
    """Sums each table's squared elements."""
    rows = rows.astype(jnp.float32)  # Dense parameters may have a narrow dtype.
    about = tables.total(jnp.sum(jnp.square(rows), axis=1))
    nothing = compensated_sum(jnp.zeros_like(about))
    return plus_total(nothing, jnp.square(rows), tables, about)


def plus_total(
    total: CompensatedSum, values: Any, tables: TableRows, about: Any
) -> CompensatedSum:
    """Adds `[rows, dim]` values to their tables' totals, given rough totals `about`."""
    # A plain float32 sum would keep the rounding error from the largest total that a
    # table ever had, even after its values shrink.
    coarse = coarse_part(values, tables.per_row(about)[:, None])
    parts = [jnp.sum(coarse, axis=1), jnp.sum(values - coarse, axis=1)]
    # The parts are stacked, so that they share one all-reduce.
    sums = tables.total(jnp.stack(parts, axis=1))
    return total.plus(sums[:, 0]).plus(sums[:, 1])


def _inverse_root(values: jax.Array) -> jax.Array:
    # A moment is 0 only if all its gradients were 0, so any finite factor will do.
    return jax.lax.rsqrt(jnp.where(values > 0, values, 1))


def _rms(values: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(values)))


@public_optimizer(
    weight_decay=finite,
    clipvalue=positive_bound,
    name=lambda _: PASSED,
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

    For a row `w` with `dim` elements and summed gradient `g`, in step `t` counted from
    1::

        b = 1 - t**beta_2_decay
        S = g**2 + epsilon_1
        r = b * r + (1 - b) * mean(S)                          mean over the row
        c = b * c + (1 - b) * mean(S)                          mean over the column
        u = g / sqrt(r * c / mean(c))
        u = u / max(1, RMS(u) / clip_threshold)
        w -= max(epsilon_2, RMS(w)) * min(learning_rate, 1 / sqrt(t)) * u

    `S` is the regularized square, `b` is the decay, and `u` is the scaled gradient.
    `RMS(x)` is the root mean square of `x` over the table. The slot variables are `r`
    and a clock, both `[rows]`. Each table also has one vector `c`, `[dim]`. They all
    start at 0, except that `r` starts at `epsilon_1` in mode `"exact"`.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
    Cost" (ICML 2018), as in `keras.optimizers.Adafactor` of Keras 3 and `tf_keras`.
    `optax.adafactor` is a different algorithm: it factors only large matrices, and its
    decay, clipping and scaling differ.

    The modes differ in how they treat rows that the step does not look up:

    * `"exact"` gives the same numbers as Keras. Rows without lookups have gradient 0,
      so their `r` decays. The missed decays are applied when the row is next touched. A
      rare row therefore has a small `r` and takes large steps, with `u` up to `t**0.4`.
      Means over rows include the whole table.
    * `"lazy"` does not change rows without lookups. In the decay of `r`, `t` counts the
      row's own updates, so the row's first update sets `r` to the mean of `S`. Means
      over rows include only touched rows, except in `RMS(w)`. If every step touches
      every row, both modes give the same result.

    A step takes three small all-reduces per table, with `dim + 2`, 1 and 2 scalars.
    `RMS(w)` comes from a running sum over the squares of the stored values. If the
    table's dtype is narrow, the sum includes the rounding. Restoring a checkpoint
    recomputes this sum. If ids are not row numbers, means and `RMS(w)` include only the
    rows that belong to an id. If a row is reassigned to a new id, the sum includes only
    the row's new values.

    Note that Adafactor must come last in a chain. If you change table values later, use
    `tpu_embedding.Optimizer.set_embedding_tables`, which updates the sum.

    You can train tables and dense parameters with one `adafactor(...)`. In either mode,
    it gives the same numbers as Keras on dense arrays of any rank. If the rank is 2 or
    more, the second moments are factored over the last two axes. Otherwise they are
    kept in full.

    `global_clipnorm` bounds one norm over the loss gradients of all tables and dense
    parameters. `tpu_embedding.Optimizer` and Linen's `TrainState` compute this norm.
    `tpu_embedding.functional.apply_gradients` accepts the norm as an argument, or
    computes it over its tables. Otherwise, the norm covers the arrays that the
    optimizer is applied to.

    Three options move all rows: `gradient_accumulation_steps`,
    `ema_overwrite_frequency`, and `weight_decay` in mode `"exact"`. They need a pass
    over the table in each step, and keep a dense gradient as `every_row` does. In mode
    `"lazy"`, only touched rows decay.

    Args:
      learning_rate: scalar or optax schedule. With `gradient_accumulation_steps`,
        schedules count steps instead of updates.
      beta_2_decay: exponent in `b`, at most 0.
      epsilon_1: non-negative.
      epsilon_2: smallest step scale, non-negative.
      clip_threshold: largest `RMS(u)`, positive.
      relative_step: no effect, as in Keras.
      weight_decay: decay strength. Before the update,
        `weight_decay * learning_rate * w` is subtracted from each row `w`.
      clipnorm: largest gradient norm per table, positive.
      clipvalue: largest absolute value of a gradient element, positive. At most one of
        `clipnorm`, `clipvalue` and `global_clipnorm` is allowed.
      global_clipnorm: largest gradient norm over the model, positive. On tables, it
        cannot be combined with `gradient_accumulation_steps`.
      use_ema: True keeps moving averages. `with_ema` describes how to read them.
      ema_momentum: decay of the averages, in [0, 1].
      ema_overwrite_frequency: number of updates after which the averages replace the
        rows. Defaults to never. You can't combine it with
        `gradient_accumulation_steps`.
      loss_scale_factor: positive factor on the loss. Gradients are divided by it.
      gradient_accumulation_steps: number of steps per update, at least 2. An update
        uses the mean gradient of these steps. As in Keras, averages advance in every
        step.
      name: no effect; a Keras argument.
      mode: `"lazy"` or `"exact"`, see above.
      ema_start: `"first_update"` starts the averages after the first update, like Keras
        3; `"initial_values"` starts them before it, like `tf_keras`.
      clipnorm_of: `"sum"` takes the norm of the summed gradient. `"occurrences"` takes
        the norm over all occurrences of ids, as `tf_keras` does for `tf.IndexedSlices`.

    Raises:
      ValueError: if a value is out of range, or options cannot be combined.

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
        loss_scale_factor=loss_scale_factor,
        clipvalue=clipvalue,
        clipnorm=clipnorm,
        global_clipnorm=global_clipnorm,
        clipnorm_of=clipnorm_of,
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
        transformation = _with_norm_of_arrays(transformation, steps)
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
    # A layer accumulates its tables' gradients itself.
    return DeclaredRule(row_optimizer, _collecting(transformation, steps))


def _collecting(
    rule: optax.GradientTransformation, num_steps: int
) -> optax.GradientTransformation:
    """Runs a rule on the mean gradient over several steps."""
    collects = optax.MultiSteps(rule, num_steps)

    def init(params: Any) -> CollectedGradients:
        return CollectedGradients(collects.init(params))

    def update(
        updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, CollectedGradients]:
        updates, steps = collects.update(updates, state.steps, params)
        return updates, CollectedGradients(steps)

    return optax.GradientTransformation(init, update)


def _with_norm_of_arrays(
    rule: optax.GradientTransformation, gradient_steps: int
) -> optax.GradientTransformation:
    """Gives a rule the norm over its dense arrays, unless a model provides one."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # A model's norm covers only one step, so it doesn't fit a mean over several
        # steps.
        is_known = gradient_steps == 1 and model_gradient_squares() is not None
        if is_known or is_in_layer():
            return rule.update(updates, state, params)
        arrays = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(updates)]
        squares = sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.zeros(()))
        with model_gradient_context(lambda: squares):
            return rule.update(updates, state, params)

    return optax.GradientTransformation(rule.init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adafactor:
    """The rule for table rows and dense arrays, with the arguments of `adafactor`."""

    learning_rate: optax.ScalarOrSchedule
    beta_2_decay: Any
    epsilon_1: Any
    epsilon_2: Any
    clip_threshold: Any
    weight_decay: Any
    mode: AdafactorMode
    loss_scale_factor: Any
    clipvalue: Any
    clipnorm: Any
    global_clipnorm: Any
    clipnorm_of: ClipnormOf
    averages: Averages | None
    gradient_steps: int

    @property
    def moves_every_row(self) -> bool:
        decays_all = self.mode == "exact" and self.weight_decay is not None
        overwrites = self.averages and self.averages.overwrite_frequency is not None
        return self.gradient_steps > 1 or decays_all or bool(overwrites)

    def init(self, array: Any) -> AdafactorState:
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
        tables = table_rows(gradient) if gradient.ndim == 2 else None
        # Keras schedules count steps, and updates happen in the last of several steps.
        step = state.count * self.gradient_steps + self.gradient_steps - 1
        rate = learning_rate_at(self.learning_rate, step)
        gradient = self._clip(jnp.asarray(gradient, jnp.float32), tables)
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
            # The sum tracks the values that the table stores, after rounding. A product
            # loses fewer digits than a difference of squares.
            stored = tables.stored(old, updates).astype(jnp.float32)
            change = (stored - old) * (stored + old)
            total = plus_total(state.squares, change, tables, state.squares.value)
            state = state._replace(squares=total)
        # The count advances last, because moments and averages use the count before the
        # step.
        return updates, state._replace(count=state.count + 1)

    def _clip(self, gradient: jax.Array, tables: TableRows | None) -> jax.Array:
        """Unscales and clips gradients as Keras does. `tables` is only for rank 2."""
        scale = 1.0 if self.loss_scale_factor is None else self.loss_scale_factor
        gradient = gradient / scale
        if self.clipvalue is not None:
            return jnp.clip(gradient, -self.clipvalue, self.clipvalue)
        bound, squares = self.clipnorm, None
        if self.global_clipnorm is not None:
            bound, squares = self.global_clipnorm, model_gradient_squares()
        elif self.clipnorm_of == "occurrences" and tables is not None:
            squares = tables.occurrence_squares
        if bound is None:
            return gradient
        if squares is not None:
            # The caller summed these squares before this rule unscaled the gradient.
            squares = squares / scale**2
        elif tables is None:
            squares = jnp.sum(jnp.square(gradient))
        else:
            squares = tables.total(jnp.sum(jnp.square(gradient), axis=1))
        norms = jnp.sqrt(squares)
        factors = jnp.where(norms > bound, bound / norms, 1)
        # A global norm gives one scalar for all tables.
        if factors.ndim and tables is not None:
            factors = tables.per_row(factors)[:, None]
        return gradient * factors

    def _scale_array(
        self, gradient: jax.Array, state: AdafactorState, array: Any
    ) -> ScaledGradient:
        """Scales gradients of any rank but 2, given the array after weight decay."""
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
            # The rows and the columns have the same mean.
            means = jnp.mean(rows, axis=-1, keepdims=True)
            profile = columns / jnp.where(means > 0, means, 1)
            # Takes two roots, because the product could underflow.
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
        """Scales row gradients, given the rows before and after weight decay."""
        # Outside the layer, the caller may have set rows since the last step. All rows
        # are given there, so they are summed again.
        squares = state.squares if is_in_layer() else sum_of_squares(old, tables)
        moves, dim = self._rows_to_update(tables), gradient.shape[1]
        state = self._move_rows(gradient, state._replace(squares=squares), tables)

        # One all-reduce sums three things: squared gradients by column, the number of
        # moving rows, and the change in the squares from weight decay.
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
        # If a step has no rows in a table, the table's moments do not change.
        columns = jnp.where(has_rows[:, None], columns, state.column_accumulators)

        # Keras divides by the mean row accumulator instead. In mode "exact", both means
        # are the same moving average, but not every shard knows the rows' mean.
        means = jnp.mean(columns, axis=1, keepdims=True)
        # The column moments are 0 until a step touches the table.
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
        return tables.is_touched if self.mode == "lazy" else tables.is_used

    def _decay_at(self, t: jax.Array) -> jax.Array:
        """Computes the accumulators' decay in update `t`, counted from 1."""
        return 1 - jnp.power(t.astype(jnp.float32), self.beta_2_decay)

    def _move_rows(
        self, gradient: Any, state: AdafactorState, tables: TableRows
    ) -> AdafactorState:
        """Updates the row accumulators and clocks."""
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
        # Applies the updates that the row missed. With gradient 0, each is r = b * r +
        # (1 - b) * epsilon_1.
        missed = jnp.exp(state.clock.value - state.row_clocks)
        old = missed * old + (1 - missed) * self.epsilon_1
        b = self._decay_at(state.count + 1)
        # The first step has b = 0, whose logarithm is infinite. The clock can skip this
        # step, because rows that the first step does not touch keep their initial
        # value, epsilon_1.
        clock = state.clock.plus(jnp.where(b > 0, jnp.log(jnp.maximum(b, 1e-30)), 0.0))
        return state._replace(
            row_accumulators=b * old + (1 - b) * mean,
            row_clocks=jnp.broadcast_to(clock.value, old.shape),
            clock=clock,
        )


def _check_together(rule: _Adafactor) -> None:
    bounds = ("clipnorm", "clipvalue", "global_clipnorm")
    given = [name for name in bounds if getattr(rule, name) is not None]
    if len(given) > 1:
        raise ValueError(
            "adafactor: at most one of clipnorm, clipvalue and global_clipnorm is "
            f"allowed, got {given}. Keep one of them."
        )
    is_of_occurrences = rule.clipnorm is not None and rule.clipnorm_of == "occurrences"
    if is_of_occurrences and rule.moves_every_row:
        raise ValueError(
            "adafactor: clipnorm_of must be 'sum' with weight_decay in mode 'exact', "
            "ema_overwrite_frequency or gradient_accumulation_steps, got "
            "'occurrences'. These options move every row, where only summed gradients "
            "are known. Write clipnorm_of='sum', or turn them off."
        )
