"""Adafactor: second moments as a row and a column per table, in two sparse forms.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"
(ICML 2018), with Keras' formulas. Where Keras takes the mean of the row accumulators,
this takes that of the column accumulators. Both are the same moving average of the
mean square of the gradient, but the second is small and known on every shard.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.modes import (
    MustBeLast,
    OccurrenceNorm,
    every_row,
    request_mode,
)
from tpu_embedding.optimizers.rules._arrays import for_each_array
from tpu_embedding.optimizers.rules._checks import (
    check_hyperparameters,
    fraction,
    non_negative,
    non_positive,
    one_of,
    positive,
)
from tpu_embedding.optimizers.rules._rates import learning_rate_at
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
      row_clocks: `[rows]`; lazy: updates of the row so far; exact: sum of the
        logarithms of the decays up to the row's latest update.
      column_accumulators: `c`, `[tables, dim]`.
      squares: sum of the squares of all elements of each table.
      clock: exact: sum of the logarithms of the decays so far; else None.
      averages: moving averages of the rows `[rows, dim]`, or None.
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
    """The arguments of `adafactor`, by their names there."""

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
        positive_or_none = {
            name: positive(getattr(self, name))
            for name in (
                "clipnorm",
                "clipvalue",
                "global_clipnorm",
                "loss_scale_factor",
                "ema_overwrite_frequency",
            )
            if getattr(self, name) is not None
        }
        check_hyperparameters(
            "adafactor",
            beta_2_decay=non_positive(self.beta_2_decay),
            epsilon_1=non_negative(self.epsilon_1),
            epsilon_2=non_negative(self.epsilon_2),
            clip_threshold=positive(self.clip_threshold),
            ema_momentum=fraction(self.ema_momentum),
            mode=one_of(self.mode, AdafactorMode),
            ema_start=one_of(self.ema_start, EMAStart),
            clipnorm_of=one_of(self.clipnorm_of, ClipnormOf),
            **positive_or_none,
        )
        clips = [
            name
            for name in ("clipnorm", "clipvalue", "global_clipnorm")
            if getattr(self, name) is not None
        ]
        if len(clips) > 1:
            raise ValueError(
                f"adafactor takes one of clipnorm, clipvalue and global_clipnorm, got "
                f"{clips}."
            )
        steps = self.gradient_accumulation_steps
        if steps and (not hasattr(steps, "__index__") or steps < 2):
            raise ValueError(
                "gradient_accumulation_steps must be an int of at least 2, or None, "
                f"got {steps!r}."
            )
        if steps and self.use_ema:
            raise ValueError(
                "adafactor cannot have use_ema beside gradient_accumulation_steps, "
                "where Keras averages also in steps without an update; leave one out."
            )

    @property
    def gradient_steps(self) -> int:
        """Steps that one update sums up."""
        return self.gradient_accumulation_steps or 1

    @property
    def moves_every_row(self) -> bool:
        """Whether rows that are not touched change at once."""
        decays_all = self.mode == "exact" and self.weight_decay is not None
        return self.use_ema or self.gradient_steps > 1 or decays_all


def adafactor(
    learning_rate: optax.ScalarOrSchedule = 0.001,
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
    *,
    mode: AdafactorMode = "lazy",
    ema_start: EMAStart = "first_update",
    clipnorm_of: ClipnormOf = "sum",
) -> optax.GradientTransformation:
    """Adafactor as Keras has it, on the rows of a table.

    With V rows of D elements, t the step from 1, and b = 1 - t**beta_2_decay,

        S = g**2 + epsilon_1
        r = b * r + (1 - b) * mean of S over the row
        c = b * c + (1 - b) * mean of S over the column
        u = g / sqrt(r * c / mean(c))
        u = u / max(1, RMS(u) / clip_threshold)
        w -= max(epsilon_2, RMS(w)) * min(learning_rate, 1 / sqrt(t)) * u

    Keras: `keras.optimizers.Adafactor`, of Keras 3 and `tf_keras`. Its numbers come out
    in mode `"exact"` for any rows that are looked up, and in mode `"lazy"` if all are
    in each step. The modes differ in what the other rows do:

    * `"exact"`: their gradient is 0, so their r decays. The decays that a row missed
      are made up for when it is next touched, so a rare row has a small r and takes
      large steps, of up to t**0.4. Means over rows are over all V.
    * `"lazy"`: nothing. The b of a row counts the row's own updates instead of the
      steps, so that the first sets r to the mean of its S; means over rows are over
      those touched, except for RMS(w), the scale of the whole table.

    Slot variables: r and a clock, `[rows]`; c is per table. A step takes two small
    all-reduces: of D + 2 numbers per table, and of 2. RMS(w) is kept up to date by the
    rule's own updates: it must be the last of a chain, and the values of a table are
    to be set before its slots are made.

    Options that move all rows take a pass over the table in each step, and keep the
    dense gradient (`every_row`): `use_ema`, `gradient_accumulation_steps`, and
    `weight_decay` in mode `"exact"`; in mode `"lazy"` touched rows decay.

    Args:
      learning_rate: number or schedule of the step, counted from 0; with
        `gradient_accumulation_steps`, of the steps that are summed.
      beta_2_decay: exponent of b, not positive.
      epsilon_1: see above, not negative.
      epsilon_2: see above, not negative.
      clip_threshold: see above, positive.
      relative_step: without effect, as in Keras, where the smaller of `learning_rate`
        and 1 / sqrt(t) is taken in any case.
      weight_decay: part of the rows, times the learning rate, that is lost before the
        update.
      clipnorm: largest norm of a table's gradient.
      clipvalue: largest absolute value of its elements.
      global_clipnorm: largest norm of the gradient of all tables of a stack.
      use_ema: keeps moving averages of the rows.
      ema_momentum: of these, in [0, 1].
      ema_overwrite_frequency: updates from one to the next at which the averages
        replace the rows; None: never.
      loss_scale_factor: the loss was multiplied by; gradients are divided by it.
      gradient_accumulation_steps: steps whose mean gradient is one update; None: 1.
      name: without effect; Keras' argument.
      mode: see above.
      ema_start: `"first_update"`: averages begin with the rows after the first update,
        as in Keras 3; `"initial_values"`: with those before it, as in `tf_keras`.
      clipnorm_of: `"sum"`: the norm is that of the gradient with one entry per row;
        `"occurrences"`: that of the gradients of all occurrences of ids, as `tf_keras`
        has it for `tf.IndexedSlices`.

    Raises:
      ValueError: if a value is out of its range, or options exclude each other.

    Example:
      >>> optimizer = adafactor(0.1)
      >>> rows = jnp.ones((3, 2))
      >>> updates, _ = optimizer.update(rows, optimizer.init(rows), rows)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.1, -0.1]
    """
    del relative_step, name
    settings = _Settings(
        learning_rate=learning_rate,
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


def _init(s: _Settings, rows: Any) -> AdafactorState:
    known = table_rows(rows)
    num_rows, dim = rows.shape
    is_exact = s.mode == "exact"
    averages = None
    if s.use_ema:
        averages = rows if s.ema_start == "initial_values" else jnp.zeros_like(rows)
    return AdafactorState(
        count=jnp.zeros((), jnp.int32),
        row_accumulators=jnp.full(
            num_rows, s.epsilon_1 if is_exact else 0.0, jnp.float32
        ),
        row_clocks=jnp.zeros(num_rows, jnp.float32),
        column_accumulators=jnp.zeros((known.table_sizes.shape[0], dim), jnp.float32),
        squares=compensated_sum(known.total(jnp.sum(jnp.square(rows), axis=1))),
        clock=compensated_sum(jnp.zeros(())) if is_exact else None,
        averages=averages,
    )


def _update(
    s: _Settings, gradient: Any, state: AdafactorState, rows: Any
) -> tuple[Any, AdafactorState]:
    if s.clipnorm is not None and s.clipnorm_of == "occurrences":
        request_mode(OccurrenceNorm())
    known = table_rows(gradient)
    dim = gradient.shape[1]
    t = (state.count + 1).astype(jnp.float32)
    # With several steps to an update, Keras' schedules count the steps.
    step = state.count * s.gradient_steps + s.gradient_steps - 1
    rate = learning_rate_at(s.learning_rate, step)
    gradient = _clip(s, gradient, known)
    decayed = _decay(s, rate, rows, known)
    accumulators, clocks, clock = _row_moments(s, gradient, state, known, t)
    columns, change, size = _column_moments(
        s, gradient, state, known, t, jnp.square(decayed) - jnp.square(rows)
    )
    means = jnp.mean(columns, axis=1, keepdims=True)
    # A table that was never touched has no column profile.
    profile = columns / jnp.where(means > 0, means, 1)
    scaled = gradient * jax.lax.rsqrt(accumulators)[:, None]
    scaled *= known.per_row(jax.lax.rsqrt(jnp.where(means > 0, profile, 1)))
    scaled = jnp.where(_moves(s, known)[:, None], scaled, 0)
    sums = known.total(
        jnp.stack([jnp.sum(jnp.square(scaled), 1), jnp.sum(decayed * scaled, 1)], 1)
    )
    rms = jnp.sqrt(sums[:, 0] / size)
    squares = state.squares.plus(change)
    elements = known.table_sizes * dim
    scale = jnp.sqrt(jnp.maximum(squares.value, 0) / elements)
    alpha = jnp.maximum(s.epsilon_2, scale) * jnp.minimum(rate, jax.lax.rsqrt(t))
    alpha /= jnp.maximum(1, rms / s.clip_threshold)
    new = decayed - known.per_row(alpha)[:, None] * scaled
    squares = squares.plus(alpha * (alpha * sums[:, 0] - 2 * sums[:, 1]))
    averages = None
    if s.use_ema:
        new, averages, change = _average(s, new, state, known)
        squares = squares.plus(change)
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


def _moves(s: _Settings, known: TableRows) -> Any:
    """Returns which of the rows at hand are updated: lazily, the touched ones."""
    return known.is_touched if s.mode == "lazy" else known.is_used


def _clip(s: _Settings, gradient: Any, known: TableRows) -> Any:
    if s.loss_scale_factor is not None:
        gradient = gradient / s.loss_scale_factor
    if s.clipvalue is not None:
        return jnp.clip(gradient, -s.clipvalue, s.clipvalue)
    bound = s.global_clipnorm if s.clipnorm is None else s.clipnorm
    if bound is None:
        return gradient
    if s.clipnorm_of == "occurrences" and known.occurrence_squares is not None:
        squares = known.occurrence_squares
        if s.loss_scale_factor is not None:
            squares = squares / s.loss_scale_factor**2
    else:
        squares = known.total(jnp.sum(jnp.square(gradient), axis=1))
    if s.clipnorm is None:
        squares = jnp.broadcast_to(jnp.sum(squares), squares.shape)
    factors = bound / jnp.maximum(jnp.sqrt(squares), bound)
    return gradient * known.per_row(factors)[:, None]


def _decay(s: _Settings, rate: Any, rows: Any, known: TableRows) -> Any:
    if s.weight_decay is None:
        return rows
    lost = jnp.where(_moves(s, known)[:, None], s.weight_decay * rate * rows, 0)
    return rows - lost


def _row_moments(
    s: _Settings, gradient: Any, state: AdafactorState, known: TableRows, t: Any
) -> tuple[Any, Any, CompensatedSum | None]:
    """Returns the new r, the rows' clocks, and the clock of all."""
    mean = jnp.mean(jnp.square(gradient), axis=1) + s.epsilon_1
    old = state.row_accumulators
    if state.clock is None:
        clocks = state.row_clocks + 1
        b = 1 - jnp.power(clocks, s.beta_2_decay)
        new = b * old + (1 - b) * mean
        moves = known.is_touched
        return (
            jnp.where(moves, new, old),
            jnp.where(moves, clocks, state.row_clocks),
            None,
        )
    # What a row missed, with gradient 0: r = b * r + (1 - b) * epsilon_1 each time.
    missed = jnp.exp(state.clock.value - state.row_clocks)
    old = missed * old + (1 - missed) * s.epsilon_1
    b = 1 - jnp.power(t, s.beta_2_decay)
    # The first step has b = 0, and leaves every row that it does not touch at
    # epsilon_1, where all of them begin.
    clock = state.clock.plus(jnp.where(b > 0, jnp.log(jnp.maximum(b, 1e-30)), 0.0))
    clocks = jnp.broadcast_to(clock.value, old.shape)
    return b * old + (1 - b) * mean, clocks, clock


def _column_moments(
    s: _Settings,
    gradient: Any,
    state: AdafactorState,
    known: TableRows,
    t: Any,
    decay: Any,
) -> tuple[Any, Any, Any]:
    """Returns the new c, the change of the squares by decay, and the size of RMS(u)."""
    dim = gradient.shape[1]
    moves = _moves(s, known)
    columns = jnp.where(moves[:, None], jnp.square(gradient), 0)
    count = moves.astype(jnp.float32)
    totals = known.total(
        jnp.concatenate(
            [columns, count[:, None], jnp.sum(decay, axis=1, keepdims=True)], axis=1
        )
    )
    sums, counts, change = totals[:, :dim], totals[:, dim], totals[:, dim + 1]
    over = known.table_sizes if s.mode == "exact" else counts
    is_any = over > 0
    over = jnp.maximum(over, 1)
    b = 1 - jnp.power(t, s.beta_2_decay)
    mean = sums / over[:, None] + s.epsilon_1
    old = state.column_accumulators
    new = jnp.where(is_any[:, None], b * old + (1 - b) * mean, old)
    return new, change, over * dim


def _average(
    s: _Settings, rows: Any, state: AdafactorState, known: TableRows
) -> tuple[Any, Any, Any]:
    """Returns rows, their averages, and the change of the squares of the table."""
    assert state.averages is not None
    momentum = s.ema_momentum
    if s.ema_start == "first_update":
        momentum = jnp.where(state.count == 0, 0.0, momentum)
    averages = momentum * state.averages + (1 - momentum) * rows
    if s.ema_overwrite_frequency is None:
        return rows, averages, jnp.zeros_like(known.table_sizes)
    is_due = (state.count + 1) % s.ema_overwrite_frequency == 0
    new = jnp.where(is_due, averages, rows)
    change = known.total(jnp.sum(jnp.square(new) - jnp.square(rows), axis=1))
    return new, averages, change
