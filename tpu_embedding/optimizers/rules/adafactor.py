"""Adafactor: second moments as one row and one column vector per table.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (ICML
2018), with Keras' formulas. Keras divides by the mean of the row accumulators. This
rule divides by the mean of the column accumulators. Both means are the same moving
average of the mean squared gradient, but the second is known on every shard.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import check_hyperparameters, flag
from tpu_embedding.optimizers.equal_calls import equal_calls_are_one
from tpu_embedding.optimizers.learning_rates import checked_schedule
from tpu_embedding.optimizers.row_optimizer import DeclaredRule, RowOptimizer
from tpu_embedding.optimizers.rules._accumulation import collect_gradients
from tpu_embedding.optimizers.rules._adafactor_moments import (
    plus_total,
    rows_to_update,
    scale_array,
    scale_rows,
    sum_of_squares,
)
from tpu_embedding.optimizers.rules._adafactor_settings import (
    AdafactorMode,
    AdafactorSettings,
    ClipnormOf,
    EMAStart,
    clipped,
)
from tpu_embedding.optimizers.rules._adafactor_state import AdafactorState
from tpu_embedding.optimizers.rules._sums import NO_SUM, compensated_sum
from tpu_embedding.optimizers.table_rows import (
    TableRows,
    is_in_layer,
    model_gradient_context,
    model_gradient_squares,
    table_rows,
)


@equal_calls_are_one
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
    stores: an update of a narrow table counts as it is rounded, and a new row of a
    dynamic table replaces the one before. A restore measures it anew. In a dynamic
    table, means and `RMS(w)` are over the rows that ids have, and the learned default
    row. So the table equals one of that many rows. Adafactor must be the last
    transformation of a chain. Values of a table that are set later are set with the
    optimizer, by `tpu_embedding.Optimizer.set_embedding_tables`, so that the scale
    follows.

    It is also an optax transformation of dense arrays of any rank, in either mode with
    Keras' numbers. So one `adafactor(...)` trains the tables and the dense parameters
    of a model. An array of rank 2 or more is factored over its last two axes. One of
    rank 0 or 1 keeps its second moments as they are.

    `use_ema` keeps a moving average of each row. Rows that a step does not look up stay
    as they are, so their averages follow in closed form, when they are next touched or
    read. `tpu_embedding.Optimizer.finalize_variable_values` sets a model to its
    averages after training. `tpu_embedding.functional.finalize_variable_values` does so
    for tables alone, and `tpu_embedding.optimizers.finalize_variable_values` for dense
    arrays.

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
        rows; None: never. It excludes `gradient_accumulation_steps`.
      loss_scale_factor: factor by which the loss was multiplied, positive; gradients
        are divided by it.
      gradient_accumulation_steps: number of steps, at least 2, whose mean gradient
        makes one update; None: each step updates. As in Keras, averages advance in
        each of these steps.
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
    settings = AdafactorSettings(
        learning_rate=checked_schedule("adafactor", learning_rate),
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
    rule = _with_norm_of_all(settings, _rule_of(settings))
    clips_table = settings.clipnorm is not None
    row_optimizer = RowOptimizer(
        transformation=rule,
        rows="every" if settings.moves_every_row else "touched",
        duplicates="norm" if clips_table and clipnorm_of == "occurrences" else "sum",
        gradient_steps=settings.gradient_steps,
        takes_model_norm=settings.global_clipnorm is not None,
    )
    # A layer collects the gradients of its tables itself.
    on_arrays = collect_gradients(rule, settings.gradient_steps)
    return DeclaredRule(row_optimizer, on_arrays)


def _rule_of(settings: AdafactorSettings) -> optax.GradientTransformation:
    """Returns the rule, of the rows of tables and of dense arrays of any rank."""

    def init(array: Any) -> AdafactorState:
        return _initial_state(settings, array)

    def update(gradient: Any, state: Any, array: Any) -> tuple[Any, Any]:
        tables = table_rows(gradient) if gradient.ndim == 2 else None
        rate = settings.rate_at(state.count)
        gradient = clipped(settings, jnp.asarray(gradient, jnp.float32), tables)
        old = jnp.asarray(array, jnp.float32)
        decayed = _decayed(settings, rate, old, tables)
        if tables is None:
            scaled = scale_array(settings, gradient, state, decayed)
        else:
            scaled = scale_rows(settings, gradient, state, (old, decayed), tables)
        t = (state.count + 1).astype(jnp.float32)
        alpha = jnp.maximum(settings.epsilon_2, scaled.scale)
        alpha *= jnp.minimum(rate, jax.lax.rsqrt(t))
        alpha /= jnp.maximum(1, scaled.rms / settings.clip_threshold)
        if tables is not None:
            alpha = tables.per_row(alpha)[:, None]
        new, state = decayed - alpha * scaled.values, scaled.state
        if settings.use_ema:
            new, state = _averaged(settings, old, new, state, tables)
        updates = new - old
        if tables is not None:
            # The sum follows the values that the table will hold, as they are rounded.
            stored = tables.stored(old, updates).astype(jnp.float32)
            change = (stored - old) * (stored + old)
            total = plus_total(state.squares, change, tables, state.squares.value)
            state = state._replace(squares=total)
        return updates, state._replace(count=state.count + 1)

    return for_each_array(init, update)


def _initial_state(settings: AdafactorSettings, array: Any) -> AdafactorState:
    """Returns the state of the rows of one stack, or of a dense array."""
    shape, is_table = array.shape, array.ndim == 2
    is_exact = settings.mode == "exact"
    state = AdafactorState(
        count=jnp.zeros((), jnp.int32),
        row_accumulators=None,
        row_clocks=None,
        column_accumulators=None,
        velocities=None,
        # All rows of a dense array are at hand in each step, so nothing is tracked. The
        # sums stand there, empty, so that all states have one structure.
        squares=NO_SUM,
        clock=NO_SUM if is_exact else None,
        averages=None,
        average_counts=None,
        average_momentum=None,
    )
    if is_table:
        tables = table_rows(array)
        start = settings.epsilon_1 if is_exact else 0.0
        state = state._replace(
            row_accumulators=jnp.full(shape[0], start, jnp.float32),
            row_clocks=jnp.zeros(shape[0], jnp.float32),
            column_accumulators=jnp.zeros(
                (tables.table_sizes.shape[0], shape[1]), jnp.float32
            ),
            squares=sum_of_squares(array, tables),
            clock=compensated_sum(jnp.zeros(())) if is_exact else None,
        )
    elif len(shape) < 2:
        state = state._replace(velocities=jnp.zeros(shape, jnp.float32))
    else:
        state = state._replace(
            row_accumulators=jnp.zeros(shape[:-1], jnp.float32),
            column_accumulators=jnp.zeros((*shape[:-2], shape[-1]), jnp.float32),
        )
    if not settings.use_ema:
        return state
    return state._replace(
        averages=jnp.array(array, jnp.float32),
        average_counts=jnp.zeros(shape[0], jnp.int32) if is_table else None,
        average_momentum=jnp.asarray(settings.ema_momentum, jnp.float32),
    )


def _decayed(
    settings: AdafactorSettings, rate: Any, old: Any, tables: TableRows | None
) -> Any:
    """Returns the values after weight decay."""
    if settings.weight_decay is None:
        return old
    lost = settings.weight_decay * rate * old
    if tables is not None:
        lost = jnp.where(rows_to_update(settings, tables)[:, None], lost, 0)
    return old - lost


def _averaged(
    settings: AdafactorSettings,
    old: Any,
    new: Any,
    state: AdafactorState,
    tables: TableRows | None,
) -> tuple[Any, AdafactorState]:
    """Returns the new values, and the state with their moving averages."""
    missed, counts = 0, state.average_counts
    if tables is not None:
        new = tables.stored(old, new - old)
        missed = (state.count - counts)[:, None]
        counts = jnp.broadcast_to(state.count + 1, counts.shape)
    averages = settings.new_averages(state.averages, old, new, state.count, missed)
    state = state._replace(
        averages=averages,
        average_counts=counts,
        average_momentum=jnp.asarray(settings.ema_momentum, jnp.float32),
    )
    if settings.ema_overwrite_frequency is None:
        return new, state
    return jnp.where(settings.overwrites_at(state.count), averages, new), state


def _with_norm_of_all(
    settings: AdafactorSettings, rule: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Tells the rule the norm of all dense arrays, if no model knows that of more."""
    if settings.global_clipnorm is None:
        return rule

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if is_in_layer() or model_gradient_squares() is not None:
            return rule.update(updates, state, params)
        arrays = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(updates)]
        with model_gradient_context(
            lambda: sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.zeros(()))
        ):
            return rule.update(updates, state, params)

    return optax.GradientTransformation(rule.init, update)
