"""Adafactor: second moments as one row and one column vector per table.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (ICML
2018), with Keras' formulas. Keras divides by the mean of the row accumulators. This
rule divides by the mean of the column accumulators. Both means are the same moving
average of the mean squared gradient, but the second is known on every shard.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    finite,
    flag,
    fraction,
    int_from,
    non_negative,
    non_positive,
    one_of,
    or_none,
    positive,
    positive_bound,
)
from tpu_embedding.optimizers.learning_rates import (
    checked_learning_rate,
    learning_rate_at,
)
from tpu_embedding.optimizers.modes import (
    MustBeLast,
    OccurrenceNorm,
    every_row,
    request_mode,
)
from tpu_embedding.optimizers.rules._sums import CompensatedSum, compensated_sum
from tpu_embedding.optimizers.table_rows import TableRows, table_rows

AdafactorMode = Literal["lazy", "exact"]
EMAStart = Literal["first_update", "initial_values"]
ClipnormOf = Literal["sum", "occurrences"]


class AdafactorState(NamedTuple):
    """State of `adafactor`.

    Attributes:
      count: updates so far.
      row_accumulators: `r`, `[rows]`.
      row_clocks: `[rows]`. Mode "lazy": updates of the row so far. Mode "exact": sum of
        the logarithms of the decays up to the row's latest update.
      column_accumulators: `c`, `[tables, dim]`.
      squares: sum of the squares of all elements of each table, `[tables]`.
      clock: mode "exact": sum of the logarithms of the decays so far; otherwise None.
      averages: moving averages of the rows, `[rows, dim]`; None without `use_ema`.
    """

    count: jax.Array
    row_accumulators: jax.Array
    row_clocks: jax.Array
    column_accumulators: jax.Array
    squares: CompensatedSum
    clock: CompensatedSum | None
    averages: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """The validated arguments of `adafactor`."""

    learning_rate: optax.ScalarOrSchedule
    beta_2_decay: Any
    epsilon_1: Any
    epsilon_2: Any
    clip_threshold: Any
    weight_decay: Any
    clipnorm: Any
    clipvalue: Any
    global_clipnorm: Any
    use_ema: bool
    ema_momentum: Any
    ema_overwrite_frequency: Any
    loss_scale_factor: Any
    gradient_accumulation_steps: int | None
    mode: AdafactorMode
    ema_start: EMAStart
    clipnorm_of: ClipnormOf

    def __post_init__(self):
        check_hyperparameters(
            "adafactor",
            beta_2_decay=non_positive(self.beta_2_decay),
            epsilon_1=non_negative(self.epsilon_1),
            epsilon_2=non_negative(self.epsilon_2),
            clip_threshold=positive_bound(self.clip_threshold),
            weight_decay=or_none(finite, self.weight_decay),
            clipnorm=or_none(positive_bound, self.clipnorm),
            clipvalue=or_none(positive_bound, self.clipvalue),
            global_clipnorm=or_none(positive_bound, self.global_clipnorm),
            use_ema=flag(self.use_ema),
            ema_momentum=fraction(self.ema_momentum),
            ema_overwrite_frequency=or_none(
                functools.partial(int_from, 1), self.ema_overwrite_frequency
            ),
            loss_scale_factor=or_none(positive, self.loss_scale_factor),
            mode=one_of(self.mode, AdafactorMode),
            ema_start=one_of(self.ema_start, EMAStart),
            clipnorm_of=one_of(self.clipnorm_of, ClipnormOf),
        )
        clips = [
            name
            for name in ("clipnorm", "clipvalue", "global_clipnorm")
            if getattr(self, name) is not None
        ]
        if len(clips) > 1:
            raise ValueError(
                "adafactor: at most one of clipnorm, clipvalue and global_clipnorm may "
                f"be given, got {clips}. Set the others to None."
            )
        steps = self.gradient_accumulation_steps
        if steps not in (None, 0):
            check_hyperparameters(
                "adafactor", gradient_accumulation_steps=int_from(2, steps)
            )
        if steps and self.use_ema:
            raise ValueError(
                "adafactor: use_ema must be False with gradient_accumulation_steps, "
                f"got gradient_accumulation_steps={steps!r} and use_ema=True. Keras "
                "would average in steps without an update, too; leave one out."
            )

    @property
    def gradient_steps(self) -> int:
        """Steps whose gradients one update averages."""
        return self.gradient_accumulation_steps or 1

    @property
    def moves_every_row(self) -> bool:
        """True if rows that the step does not look up change in the same step."""
        decays_all = self.mode == "exact" and self.weight_decay is not None
        return self.use_ema or self.gradient_steps > 1 or decays_all


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
    """Makes Adafactor as Keras defines it, for the rows of a table.

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

    A step takes two small all-reduces per table: `dim + 2` scalars, then 2. `RMS(w)` is
    tracked through the rule's own updates. So Adafactor must be the last transformation
    of a chain, and a table's values must be set before its slot variables are made.

    Options that move all rows need a pass over the table in each step, and keep the
    dense gradient as `every_row` does. They are `use_ema`,
    `gradient_accumulation_steps`, and `weight_decay` in mode `"exact"`. In mode
    `"lazy"` only touched rows decay.

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
      global_clipnorm: largest norm of the gradient of all tables of a stack, positive.
      use_ema: True keeps moving averages of the rows.
      ema_momentum: decay of these averages, in [0, 1].
      ema_overwrite_frequency: number of updates after which the averages replace the
        rows; None: never.
      loss_scale_factor: factor by which the loss was multiplied, positive; gradients
        are divided by it.
      gradient_accumulation_steps: number of steps, at least 2, whose mean gradient
        makes one update; None: each step updates.
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
    del name
    check_hyperparameters("adafactor", relative_step=flag(relative_step))
    settings = _Settings(
        learning_rate=checked_learning_rate("adafactor", learning_rate),
        beta_2_decay=beta_2_decay,
        epsilon_1=epsilon_1,
        epsilon_2=epsilon_2,
        clip_threshold=clip_threshold,
        weight_decay=weight_decay,
        clipnorm=clipnorm,
        clipvalue=clipvalue,
        global_clipnorm=global_clipnorm,
        use_ema=use_ema,
        ema_momentum=ema_momentum,
        ema_overwrite_frequency=ema_overwrite_frequency,
        loss_scale_factor=loss_scale_factor,
        gradient_accumulation_steps=gradient_accumulation_steps,
        mode=mode,
        ema_start=ema_start,
        clipnorm_of=clipnorm_of,
    )
    rule = for_each_array(
        lambda rows: _init(settings, rows),
        lambda gradient, state, rows: _update(settings, gradient, state, rows),
    )
    if settings.moves_every_row:
        return every_row(rule, gradient_steps=settings.gradient_steps)
    return rule


def _init(settings: _Settings, rows: Any) -> AdafactorState:
    """Returns the state for the rows of one stack. The rows come from `table_rows`."""
    tables = table_rows(rows)
    num_rows, dim = rows.shape
    is_exact = settings.mode == "exact"
    averages = None
    if settings.use_ema:
        averages = (
            rows if settings.ema_start == "initial_values" else jnp.zeros_like(rows)
        )
    return AdafactorState(
        count=jnp.zeros((), jnp.int32),
        row_accumulators=jnp.full(
            num_rows, settings.epsilon_1 if is_exact else 0.0, jnp.float32
        ),
        row_clocks=jnp.zeros(num_rows, jnp.float32),
        column_accumulators=jnp.zeros((tables.table_sizes.shape[0], dim), jnp.float32),
        squares=compensated_sum(tables.total(jnp.sum(jnp.square(rows), axis=1))),
        clock=compensated_sum(jnp.zeros(())) if is_exact else None,
        averages=averages,
    )


def _update(
    settings: _Settings, gradient: Any, state: AdafactorState, rows: Any
) -> tuple[Any, AdafactorState]:
    """Returns the updates of the rows at hand and the new state."""
    if settings.clipnorm is not None and settings.clipnorm_of == "occurrences":
        request_mode(OccurrenceNorm())
    tables = table_rows(gradient)
    dim = gradient.shape[1]
    t = (state.count + 1).astype(jnp.float32)
    # Keras' schedules count steps, of which an update may take several.
    step = state.count * settings.gradient_steps + settings.gradient_steps - 1
    rate = learning_rate_at(settings.learning_rate, step)
    gradient = _clip(settings, gradient, tables)
    decayed = _decay(settings, rate, rows, tables)
    accumulators, clocks, clock = _row_moments(settings, gradient, state, tables, t)
    columns, squares_change, num_elements = _column_moments(
        settings, gradient, state, tables, t, jnp.square(decayed) - jnp.square(rows)
    )
    means = jnp.mean(columns, axis=1, keepdims=True)
    # A table that was never touched has no column moments yet.
    profile = columns / jnp.where(means > 0, means, 1)
    scaled = gradient * jax.lax.rsqrt(accumulators)[:, None]
    scaled *= tables.per_row(jax.lax.rsqrt(jnp.where(means > 0, profile, 1)))
    scaled = jnp.where(_update_mask(settings, tables)[:, None], scaled, 0)
    sums = tables.total(
        jnp.stack([jnp.sum(jnp.square(scaled), 1), jnp.sum(decayed * scaled, 1)], 1)
    )
    rms = jnp.sqrt(sums[:, 0] / num_elements)
    squares = state.squares.plus(squares_change)
    mean_squares = jnp.maximum(squares.value, 0) / (tables.table_sizes * dim)
    scale = jnp.sqrt(mean_squares)
    alpha = jnp.maximum(settings.epsilon_2, scale) * jnp.minimum(rate, jax.lax.rsqrt(t))
    alpha /= jnp.maximum(1, rms / settings.clip_threshold)
    new = decayed - tables.per_row(alpha)[:, None] * scaled
    squares = squares.plus(alpha * (alpha * sums[:, 0] - 2 * sums[:, 1]))
    averages = None
    if settings.use_ema:
        new, averages, squares_change = _average(settings, new, state, tables)
        squares = squares.plus(squares_change)
    updates = new - rows
    request_mode(MustBeLast(updates))
    return updates, AdafactorState(
        count=state.count + 1,
        row_accumulators=accumulators,
        row_clocks=clocks,
        column_accumulators=columns,
        squares=squares,
        clock=clock,
        averages=averages,
    )


def _update_mask(settings: _Settings, tables: TableRows) -> Any:
    """Returns the mask of the rows to update: in mode "lazy" the touched ones."""
    return tables.is_touched if settings.mode == "lazy" else tables.is_used


def _clip(settings: _Settings, gradient: Any, tables: TableRows) -> Any:
    """Unscales the gradient, and clips it by value or by norm."""
    if settings.loss_scale_factor is not None:
        gradient = gradient / settings.loss_scale_factor
    if settings.clipvalue is not None:
        return jnp.clip(gradient, -settings.clipvalue, settings.clipvalue)
    bound = settings.global_clipnorm if settings.clipnorm is None else settings.clipnorm
    if bound is None:
        return gradient
    if settings.clipnorm_of == "occurrences" and tables.occurrence_squares is not None:
        squares = tables.occurrence_squares
        if settings.loss_scale_factor is not None:
            squares = squares / settings.loss_scale_factor**2
    else:
        squares = tables.total(jnp.sum(jnp.square(gradient), axis=1))
    if settings.clipnorm is None:
        squares = jnp.broadcast_to(jnp.sum(squares), squares.shape)
    factors = bound / jnp.maximum(jnp.sqrt(squares), bound)
    return gradient * tables.per_row(factors)[:, None]


def _decay(settings: _Settings, rate: Any, rows: Any, tables: TableRows) -> Any:
    """Returns the rows after weight decay."""
    if settings.weight_decay is None:
        return rows
    lost = jnp.where(
        _update_mask(settings, tables)[:, None], settings.weight_decay * rate * rows, 0
    )
    return rows - lost


def _row_moments(
    settings: _Settings, gradient: Any, state: AdafactorState, tables: TableRows, t: Any
) -> tuple[Any, Any, CompensatedSum | None]:
    """Returns the new `r`, the clock of each row, and the clock of the table."""
    mean = jnp.mean(jnp.square(gradient), axis=1) + settings.epsilon_1
    old = state.row_accumulators
    if state.clock is None:
        clocks = state.row_clocks + 1
        b = 1 - jnp.power(clocks, settings.beta_2_decay)
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
    b = 1 - jnp.power(t, settings.beta_2_decay)
    # The first step has b = 0, whose logarithm is infinite. It may be skipped: rows
    # that it does not touch stay at epsilon_1, their initial value.
    clock = state.clock.plus(jnp.where(b > 0, jnp.log(jnp.maximum(b, 1e-30)), 0.0))
    clocks = jnp.broadcast_to(clock.value, old.shape)
    return b * old + (1 - b) * mean, clocks, clock


def _column_moments(
    settings: _Settings,
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
    b = 1 - jnp.power(t, settings.beta_2_decay)
    mean = sums / num_rows[:, None] + settings.epsilon_1
    old = state.column_accumulators
    new = jnp.where(is_any[:, None], b * old + (1 - b) * mean, old)
    return new, change, num_rows * dim


def _average(
    settings: _Settings, rows: Any, state: AdafactorState, tables: TableRows
) -> tuple[Any, Any, Any]:
    """Returns the rows, their moving averages, and the change of the squares."""
    assert state.averages is not None
    momentum = settings.ema_momentum
    if settings.ema_start == "first_update":
        momentum = jnp.where(state.count == 0, 0.0, momentum)
    averages = momentum * state.averages + (1 - momentum) * rows
    if settings.ema_overwrite_frequency is None:
        return rows, averages, jnp.zeros_like(tables.table_sizes)
    is_due = (state.count + 1) % settings.ema_overwrite_frequency == 0
    new = jnp.where(is_due, averages, rows)
    change = tables.total(jnp.sum(jnp.square(new) - jnp.square(rows), axis=1))
    return new, averages, change
