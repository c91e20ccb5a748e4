"""Optimizers that the user writes as a function of one row."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.argument_checks import about, invalid
from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import equal_calls_are_one, finite
from tpu_embedding.optimizers.learning_rates import checked_schedule, learning_rate_at
from tpu_embedding.optimizers.options import (
    SlotInitializer,
    check_initializers,
    initial_values,
)


class UserDefinedState(NamedTuple):
    """Update count, and slot variables `[rows, dim]` or `[rows]` by name."""

    count: jax.Array
    slots: dict[str, jax.Array]


@equal_calls_are_one
def user_defined(
    custom_computation: Callable[..., Any],
    learning_rate: optax.ScalarOrSchedule,
    *,
    slot_names: Sequence[str] = (),
    slot_initializers: Sequence[SlotInitializer] = (),
    hyperparameters: Sequence[optax.ScalarOrSchedule] = (),
    slot_dims: Sequence[int] | None = None,
) -> optax.GradientTransformation:
    """Makes an optimizer from a function that you write for one row.

    For a row `w` with summed gradient `g` and the tuple `s` of its slot variables::

        w, *s = custom_computation(g, w, s, learning_rate, hyperparameters)

    As in TensorFlow, your function is called with these positional arguments:

    * `gradient`: the row's gradient, summed over the step, `(dim,)`.
    * `embedding_table`: the row, `(dim,)`.
    * `slot_variables`: a tuple with one array per slot. Each array has shape `(dim,)`,
      or shape `()` if the slot's entry in `slot_dims` is 1.
    * `learning_rate`: a float32 scalar.
    * `hyperparameters`: a tuple of float32 scalars.

    Return the new row or, if there are slot variables, the tuple
    `(new_row, *new_slots)` in the order of `slot_names`. `jax.vmap` maps your function
    over the touched rows, so JAX must be able to trace it.

    Source: `tf.tpu.experimental.embedding.CustomOptimizer`, whose function is
    elementwise. Here, your function may use the whole row, for example its norm.

    With `optax.inject_hyperparams`, list `custom_computation` in `static_args`.

    Args:
      custom_computation: function of one row, see above.
      learning_rate: scalar or optax schedule.
      slot_names: slot variable names, distinct strings.
      slot_initializers: one entry per slot, a scalar or a function of
        `(shape, dtype)`, such as `jnp.ones`. The function must return the same values
        for every row. `shape` is the slot variable's shape on one shard.
      hyperparameters: scalars or optax schedules.
      slot_dims: one entry per slot: 2 for `[rows, dim]` or 1 for `[rows]`. By default,
        all are 2.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if the sequences' lengths differ, or a scalar is not finite. Also
        raised when the optimizer runs, if `custom_computation` returns the wrong number
        or shapes of arrays.

    Example:
      >>> def adagrad(gradient, embedding_table, slot_variables, learning_rate, _):
      ...     accumulator = slot_variables[0] + gradient**2
      ...     step = learning_rate * gradient / jnp.sqrt(accumulator)
      ...     return embedding_table - step, accumulator
      >>> optimizer = user_defined(
      ...     adagrad, 0.1, slot_names=["accumulators"], slot_initializers=[0.0]
      ... )
      >>> rows = jnp.zeros((1, 2))
      >>> updates, state = optimizer.update(rows + 2.0, optimizer.init(rows), rows)
      >>> state.slots["accumulators"].tolist()
      [[4.0, 4.0]]
    """
    rate = checked_schedule("user_defined", learning_rate)
    rates = [
        # Unlike a learning rate, hyper-parameters may be negative.
        checked_schedule("user_defined", x, f"hyperparameters[{i}]", finite)
        for i, x in enumerate(hyperparameters)
    ]
    if not callable(custom_computation):
        field, rule = "user_defined: custom_computation", "be a function of one row"
        raise invalid(field, rule, custom_computation, kind=TypeError)
    names, initializers = tuple(slot_names), tuple(slot_initializers)
    dims = (2,) * len(names) if slot_dims is None else tuple(slot_dims)
    is_one_each = len(set(names)) == len(names) == len(initializers) == len(dims)
    if not is_one_each or not {1, 2}.issuperset(dims):
        text = (
            "user_defined: slot_names must be distinct, with one slot_initializers "
            "entry and one slot_dims entry (1 per row, 2 per element) each, got "
            f"{names}, {initializers} and {dims}."
        )
        raise about(ValueError(text), "user_defined: slot_names", names)
    check_initializers("user_defined", dict(enumerate(initializers)))

    def init(params):
        slots = {
            name: initial_values(value, params.shape[:dim], params.dtype)
            for name, value, dim in zip(names, initializers, dims, strict=True)
        }
        return UserDefinedState(count=jnp.zeros((), jnp.int32), slots=slots)

    def update(updates: Any, state: Any, params: Any):
        old = {"the row": params, **{x: state.slots[x] for x in names}}
        results = jax.vmap(custom_computation, in_axes=(0, 0, 0, None, None))(
            updates,
            params,
            tuple(state.slots[name] for name in names),
            learning_rate_at(rate, state.count),
            tuple(learning_rate_at(x, state.count) for x in rates),
        )
        results = list(results) if isinstance(results, tuple | list) else [results]
        shapes = [x.shape[1:] for x in results]
        expected = {name: x.shape[1:] for name, x in old.items()}
        if shapes != list(expected.values()):
            field = "user_defined: custom_computation"
            raise invalid(field, f"return arrays with shapes {expected}", shapes)
        # A state with different dtypes would make the next step recompile.
        rows, *slots = (
            after.astype(before.dtype)
            for before, after in zip(old.values(), results, strict=True)
        )
        new_slots = dict(zip(names, slots, strict=True))
        return rows - params, UserDefinedState(state.count + 1, new_slots)

    return for_each_array(init, update)
