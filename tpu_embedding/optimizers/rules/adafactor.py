"""Adafactor: second moments as one row and one column vector per table.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (ICML
2018), with Keras' formulas. Keras divides by the mean of the row accumulators. This
rule divides by the mean of the column accumulators. Both means are the same moving
average of the mean squared gradient, but the second is known on every shard.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import (
    PASSED,
    finite,
    positive_bound,
)
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import takes_own_options
from tpu_embedding.optimizers.row_optimizer import (
    DeclaredRule,
    Driver,
    EveryRow,
    RowOptimizer,
    Touched,
)
from tpu_embedding.optimizers.rules._adafactor_moments import (
    AdafactorMode,
    Moments,
    plus_total,
)
from tpu_embedding.optimizers.rules._adafactor_state import (
    AdafactorState,
    CollectedGradients,
)
from tpu_embedding.optimizers.rules._averages import Averages, EMAStart
from tpu_embedding.optimizers.rules._clipping import (
    ClipnormOf,
    Clipping,
    with_norm_of_arrays,
)
from tpu_embedding.optimizers.table_rows import TableRows, table_rows


@takes_own_options(
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
    for tables or dense arrays alone.

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
    del name, relative_step
    steps = gradient_accumulation_steps or 1
    rule = _Adafactor(
        learning_rate=learning_rate,
        epsilon_2=epsilon_2,
        clip_threshold=clip_threshold,
        weight_decay=weight_decay,
        clip=Clipping(
            loss_scale_factor, clipvalue, clipnorm, global_clipnorm, clipnorm_of
        ),
        moments=Moments(beta_2_decay, epsilon_1, mode),
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
    driver: Driver = Touched(occurrence_norm=of_occurrences)
    if rule.moves_every_row:
        driver = EveryRow(gradient_steps=steps)
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

    Attributes:
      learning_rate: scalar, or schedule of the step.
      epsilon_2: see `adafactor`; so are the next two.
      clip_threshold: largest root mean square of `u`.
      weight_decay: fraction of the rows, times the learning rate, lost in a step.
      clip: unscales and clips a gradient.
      moments: scales a gradient by its second moments.
      averages: keeps moving averages of the rows; None: it does not.
      gradient_steps: steps whose gradients one update averages.
    """

    learning_rate: optax.ScalarOrSchedule
    epsilon_2: Any
    clip_threshold: Any
    weight_decay: Any
    clip: Clipping
    moments: Moments
    averages: Averages | None
    gradient_steps: int

    @property
    def moves_every_row(self) -> bool:
        """True if rows that the step does not look up change in the same step."""
        decays_all = self.moments.mode == "exact" and self.weight_decay is not None
        overwrites = self.averages and self.averages.overwrite_frequency is not None
        return self.gradient_steps > 1 or decays_all or bool(overwrites)

    def init(self, array: Any) -> AdafactorState:
        """Returns the state of the rows of one stack, or of a dense array."""
        state = self.moments.init(array)
        return state if self.averages is None else self.averages.init(state, array)

    def update(self, gradient: Any, state: Any, array: Any) -> tuple[Any, Any]:
        """Returns the updates of the rows or the array, and the new state."""
        tables = table_rows(gradient) if gradient.ndim == 2 else None
        # Keras' schedules count steps, of which an update may take several.
        step = state.count * self.gradient_steps + self.gradient_steps - 1
        rate = learning_rate_at(self.learning_rate, step)
        gradient = self.clip(jnp.asarray(gradient, jnp.float32), tables)
        old = jnp.asarray(array, jnp.float32)
        decayed = self._decayed(rate, old, tables)
        if tables is None:
            scaled = self.moments.scale_array(gradient, state, decayed)
        else:
            scaled = self.moments.scale_rows(gradient, state, (old, decayed), tables)
        t = (state.count + 1).astype(jnp.float32)
        alpha = jnp.maximum(self.epsilon_2, scaled.scale)
        alpha *= jnp.minimum(rate, jax.lax.rsqrt(t))
        alpha /= jnp.maximum(1, scaled.rms / self.clip_threshold)
        if tables is not None:
            alpha = tables.per_row(alpha)[:, None]
        new, state = decayed - alpha * scaled.values, scaled.state
        if self.averages is not None:
            new, state = self.averages.update(old, new, state, tables)
        updates = new - old
        if tables is not None:
            # The sum follows the values that the table will hold, as they are rounded.
            stored = tables.stored(old, updates).astype(jnp.float32)
            change = (stored - old) * (stored + old)
            total = plus_total(state.squares, change, tables, state.squares.value)
            state = state._replace(squares=total)
        return updates, state._replace(count=state.count + 1)

    def _decayed(self, rate: Any, old: Any, tables: TableRows | None) -> Any:
        """Returns the values after weight decay."""
        if self.weight_decay is None:
            return old
        lost = self.weight_decay * rate * old
        if tables is not None:
            lost = jnp.where(self.moments.rows_to_update(tables)[:, None], lost, 0)
        return old - lost


def _check_together(rule: _Adafactor) -> None:
    """Refuses arguments that exclude each other."""
    clip, steps = rule.clip, rule.gradient_steps
    bounds = ("clipnorm", "clipvalue", "global_clipnorm")
    given = [name for name in bounds if getattr(clip, name) is not None]
    if len(given) > 1:
        raise ValueError(
            "adafactor: at most one of clipnorm, clipvalue and global_clipnorm may be "
            f"given, got {given}. Set the others to None."
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
            "the rows in steps without an update, too. Leave one out, and call "
            "finalize_variable_values at the end."
        )
