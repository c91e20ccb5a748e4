"""The arguments of Adafactor, checked once."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

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
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.rules._averages import catch_up
from tpu_embedding.optimizers.table_rows import TableRows, model_gradient_squares

AdafactorMode = Literal["lazy", "exact"]
EMAStart = Literal["first_update", "initial_values"]
ClipnormOf = Literal["sum", "occurrences"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdafactorSettings:
    """The validated arguments of `adafactor`, and what follows from them alone."""

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
        of_occurrences = self.clipnorm_of == "occurrences"
        if self.clipnorm is not None and of_occurrences and self.moves_every_row:
            raise ValueError(
                "adafactor: clipnorm_of must be 'sum' with weight_decay in mode "
                "'exact', ema_overwrite_frequency or gradient_accumulation_steps, got "
                "'occurrences'. They pass over every row, where only the summed "
                "gradients are known. Write clipnorm_of='sum', or turn them off."
            )
        steps = self.gradient_accumulation_steps
        if steps in (None, 0):
            return
        check_hyperparameters(
            "adafactor", gradient_accumulation_steps=int_from(2, steps)
        )
        if self.use_ema and self.ema_overwrite_frequency is not None:
            raise ValueError(
                "adafactor: ema_overwrite_frequency must be None with "
                f"gradient_accumulation_steps, got {self.ema_overwrite_frequency} and "
                f"{steps}. Keras would overwrite the rows in steps without an update, "
                "too. Leave one out, and call finalize_variable_values at the end."
            )

    @property
    def gradient_steps(self) -> int:
        """Steps whose gradients one update averages."""
        return self.gradient_accumulation_steps or 1

    @property
    def moves_every_row(self) -> bool:
        """True if rows that the step does not look up change in the same step."""
        decays_all = self.mode == "exact" and self.weight_decay is not None
        overwrites = self.use_ema and self.ema_overwrite_frequency is not None
        return self.gradient_steps > 1 or decays_all or overwrites

    def rate_at(self, count: jax.Array) -> jax.Array:
        """Returns the learning rate of an update, counted from 0.

        Keras' schedules count steps, of which an update may take several.
        """
        step = count * self.gradient_steps + self.gradient_steps - 1
        return learning_rate_at(self.learning_rate, step)

    def decay_at(self, t: jax.Array) -> jax.Array:
        """Returns the decay of the accumulators in update `t`, counted from 1."""
        return 1 - jnp.power(t, self.beta_2_decay)

    def new_averages(
        self, averages: Any, rows: Any, new: Any, count: jax.Array, missed_updates: Any
    ) -> jax.Array:
        """Returns the moving averages after an update.

        Args:
          averages: averages after some earlier update.
          rows: values since that update.
          new: values after this update.
          count: updates so far.
          missed_updates: updates since then that left the values as they are.
        """
        missed = missed_updates + self.gradient_steps - 1
        averages = catch_up(averages, rows, missed, self.ema_momentum)
        momentum = jnp.asarray(self.ema_momentum, jnp.float32)
        if self.ema_start == "first_update":
            momentum = jnp.where(count == 0, 0.0, momentum)
        return momentum * averages + (1 - momentum) * new

    def overwrites_at(self, count: jax.Array) -> jax.Array:
        """Returns True if the averages replace the rows in an update, from 0."""
        assert self.ema_overwrite_frequency is not None
        return (count + 1) % self.ema_overwrite_frequency == 0


def clipped(
    settings: AdafactorSettings, gradient: jax.Array, tables: TableRows | None
) -> jax.Array:
    """Unscales a gradient, and clips it by value or by norm.

    Args:
      settings: the bounds, and the factor of the loss.
      gradient: `[rows, dim]` of some tables; or a dense array of any rank.
      tables: the tables of the rows; None for a dense array, which is whole.
    """
    scale = settings.loss_scale_factor
    scale = 1.0 if scale is None else scale
    gradient = gradient / scale
    if settings.clipvalue is not None:
        return jnp.clip(gradient, -settings.clipvalue, settings.clipvalue)
    bound, squares = settings.clipnorm, None
    if settings.global_clipnorm is not None:
        bound, squares = settings.global_clipnorm, model_gradient_squares()
    elif settings.clipnorm_of == "occurrences" and tables is not None:
        squares = tables.occurrence_squares
    if bound is None:
        return gradient
    if squares is not None:
        squares = squares / scale**2
    elif tables is None:
        squares = jnp.sum(jnp.square(gradient))
    else:
        squares = tables.total(row_squares(gradient))
        if settings.global_clipnorm is not None:
            squares = jnp.sum(squares)
    norms = jnp.sqrt(squares)
    factors = jnp.where(norms > bound, bound / norms, 1)
    if factors.ndim and tables is not None:
        factors = tables.per_row(factors)[:, None]
    return gradient * factors


def row_squares(rows: jax.Array) -> jax.Array:
    """Returns the sum of squares of each row, `[rows]`."""
    return jnp.sum(jnp.square(rows), axis=1)
