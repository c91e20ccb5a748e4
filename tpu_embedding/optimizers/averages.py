"""Moving averages of rows for any optimizer, like Keras' `use_ema`.

If a row does not change for `k` steps, its average `a` becomes
`momentum**k * a + (1 - momentum**k) * row`. So a step updates an average only if it
changes the row. Code that reads the averages applies this formula first.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import (
    RANGES,
    check_hyperparameters,
    check_rule,
    equal_calls_are_one,
    one_of,
    or_none,
)
from tpu_embedding.optimizers.row_optimizer import (
    InSequence,
    declare,
    row_optimizer_of,
    wrap_rule,
)

EMAStart = Literal["first_update", "initial_values"]


class AveragesState(NamedTuple):
    """The state that `with_ema` adds.

    `average_counts`, `[rows]`, holds the `count` at each average's last update. It is
    None for dense arrays that aren't matrices.
    """

    count: jax.Array
    averages: Any = None
    average_counts: Any = None
    average_momentum: Any = None


@dataclasses.dataclass(frozen=True)
class Averages:
    """Arithmetic for `with_ema` and Adafactor's averages.

    States are named tuples with at least the fields of `AveragesState`.
    """

    momentum: Any
    overwrite_frequency: Any
    start: EMAStart
    gradient_steps: int

    def __post_init__(self):
        if self.overwrite_frequency is not None and self.gradient_steps > 1:
            raise ValueError(
                "ema_overwrite_frequency, or overwrite_frequency of with_ema, must be "
                "None with gradient_accumulation_steps or gradient_steps, got "
                f"{self.overwrite_frequency} and {self.gradient_steps}. Keras would "
                "also overwrite the rows in steps without an update. Remove one of "
                "them, and call finalize_variable_values at the end."
            )

    def init(self, state: Any, array: Any) -> Any:
        """Starts the averages at the array itself."""
        # Any matrix may be a table, and a table's rows miss different steps.
        is_table = array.ndim == 2
        return state._replace(
            averages=jnp.array(array, jnp.float32),
            average_counts=jnp.zeros(array.shape[0], jnp.int32) if is_table else None,
            average_momentum=jnp.asarray(self.momentum, jnp.float32),
        )

    def update(self, old: Any, new: Any, state: Any) -> tuple[Any, Any]:
        """Advances the averages, and decides which values to store.

        Every `overwrite_frequency` updates, the averages are stored. Otherwise, `new`
        is stored.
        """
        missed, counts = 0, state.average_counts
        if counts is not None:
            missed = (state.count - counts)[:, None]
            counts = jnp.broadcast_to(state.count + 1, counts.shape)
        # Averages advance in every step, but `update` runs only once in
        # `gradient_steps` steps.
        missed = missed + self.gradient_steps - 1
        momentum = jnp.asarray(self.momentum, jnp.float32)
        # During all missed steps, the row had its old value.
        averages = catch_up(state.averages, old, missed, momentum)
        weight = momentum
        if self.start == "first_update":
            weight = jnp.where(state.count == 0, 0.0, momentum)
        averages = weight * averages + (1 - weight) * new
        state = state._replace(
            averages=averages, average_counts=counts, average_momentum=momentum
        )
        if self.overwrite_frequency is None:
            return new, state
        overwrites = (state.count + 1) % self.overwrite_frequency == 0
        return jnp.where(overwrites, averages, new), state


def catch_up(
    averages: jax.Array, rows: jax.Array, missed_steps: Any, momentum: Any
) -> jax.Array:
    """Advances averages over steps in which their rows did not change.

    Example:
      >>> catch_up(jnp.zeros(1), jnp.ones(1), 2, 0.5).tolist()
      [0.75]
    """
    missed_steps = jnp.asarray(missed_steps, jnp.float32)
    weight = jnp.power(jnp.asarray(momentum, jnp.float32), missed_steps)
    return weight * averages + (1 - weight) * rows


@equal_calls_are_one
def with_ema(
    rule: optax.GradientTransformation,
    *,
    momentum: float = 0.99,
    overwrite_frequency: int | None = None,
    start: EMAStart = "first_update",
) -> optax.GradientTransformation:
    """Adds a moving average of each row to any optimizer, like Keras' `use_ema`.

    After each step, for every table row `w`::

        average = momentum * average + (1 - momentum) * w

    The averages are a slot variable, `[rows, dim]`, plus one int32 per row. Note that a
    step updates only the averages whose rows it changes. An average that was not
    updated catches up when its row is next touched, or when you read the averages. Up
    to rounding, the result is the same as averaging the whole table in each step.

    `te.Optimizer.finalize_variable_values` sets a model's values to their averages.
    `te.functional.finalize_variable_values` does the same for tables or dense arrays
    without a model. To evaluate the averages during training, copy your model and
    optimizer with `nnx.clone`, and finalize the copies. You can also wrap the optimizer
    for dense parameters in `with_ema`.

    Note that `with_ema` must be the outermost wrapper. Don't wrap `adafactor`, which
    has its own options for averages. If the table's dtype is narrow, averages use the
    new rows before rounding.

    Args:
      rule: an optimizer of this package, or a row-local optax transformation.
      momentum: decay rate in [0, 1]. Keras calls it `ema_momentum`.
      overwrite_frequency: number of steps after which the averages replace all rows, at
        least 1. Keras calls it `ema_overwrite_frequency`. Defaults to never.
        Overwriting changes all rows, so a table needs
        `with_ema(every_row(rule), overwrite_frequency=...)`.
      start: `"first_update"` starts the averages at the rows after the first step, as
        Keras 3 does. `"initial_values"` starts them at the rows before the first step,
        as `tf_keras` does.

    Raises:
      TypeError: if `rule` is not a transformation.
      ValueError: if a value is out of range, if the rule already has averages or runs
        once per occurrence of an id, or if `overwrite_frequency` is combined with
        `gradient_steps`. Also raised when the plan is made, if the rule is Adafactor or
        if `overwrite_frequency` is used without `every_row`.

    Example:
      >>> rule = with_ema(optax.sgd(1.0), momentum=0.5)
      >>> rows = jnp.zeros((1, 2))
      >>> state = rule.init(rows)
      >>> for _ in range(2):
      ...     updates, state = rule.update(-jnp.ones((1, 2)), state, rows)
      ...     rows = rows + updates
      >>> rows.tolist(), state[1].averages.tolist()
      ([[2.0, 2.0]], [[1.5, 1.5]])
    """
    check_rule("with_ema", rule)
    check_hyperparameters(
        "with_ema",
        momentum=RANGES["ema_momentum"](momentum),
        overwrite_frequency=or_none(
            RANGES["ema_overwrite_frequency"], overwrite_frequency
        ),
        start=one_of(start, EMAStart),
    )
    inner = row_optimizer_of(rule)
    if isinstance(inner.driver, InSequence):
        raise ValueError(
            "with_ema: rule must run once per row and step, got a rule that runs once "
            "per occurrence of an id. Remove in_sequence or "
            "use_gradient_accumulation=False."
        )
    kept = Averages(momentum, overwrite_frequency, start, inner.gradient_steps)

    def init(array: Any) -> AveragesState:
        return kept.init(AveragesState(jnp.zeros((), jnp.int32)), array)

    def update(update: Any, state: Any, array: Any) -> tuple[Any, AveragesState]:
        if array is None:
            raise ValueError(
                "with_ema: update needs params, got None. Write rule.update(gradients, "
                "state, params)."
            )
        old = jnp.asarray(array, jnp.float32)
        new, state = kept.update(old, old + update, state)
        # Without overwriting, return the rule's own update bit for bit.
        if overwrite_frequency is not None:
            update = (new - old).astype(update.dtype)
        return update, state._replace(count=state.count + 1)

    averaging = for_each_array(init, update)
    wrapped = wrap_rule(rule, lambda inner: optax.chain(inner, averaging))
    averages = "kept" if overwrite_frequency is None else "overwriting"
    return declare(wrapped, averages=averages)
