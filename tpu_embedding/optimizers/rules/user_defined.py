"""Optimizers that the user writes as a function of one row."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import check_hyperparameters, finite
from tpu_embedding.optimizers.equal_calls import equal_calls_are_one
from tpu_embedding.optimizers.learning_rates import checked_schedule, learning_rate_at

SlotInitializer = float | Callable[..., jax.Array]
"""A scalar, or a function of `(shape, dtype)` that gives every row the same values."""

_SLOT_DIMS: Final = (1, 2)


class UserDefinedState(NamedTuple):
    """State of `user_defined`.

    Attributes:
      count: updates so far.
      slots: slot variables by name, `[rows, dim]` or `[rows]`.
    """

    count: jax.Array
    slots: dict[str, jax.Array]


@equal_calls_are_one
def user_defined(
    custom_computation: Callable[..., Any],
    learning_rate: optax.ScalarOrSchedule = 0.01,
    *,
    slot_names: Sequence[str] = (),
    slot_initializers: Sequence[SlotInitializer] = (),
    hyperparameters: Sequence[optax.ScalarOrSchedule] = (),
    slot_dims: Sequence[int] | None = None,
) -> optax.GradientTransformation:
    """Makes an optimizer from a function of one row.

    For a row `w` with the summed gradient `g` and the tuple `s` of its slot variables::

        w, *s = custom_computation(g, w, s, learning_rate, hyperparameters)

    The function is called by position, as TensorFlow does, with these arguments:

    * `gradient`: summed over the ids of the step, `(dim,)`.
    * `embedding_table`: the row, `(dim,)`.
    * `slot_variables`: a tuple of arrays `(dim,)`, or `()` for a slot of one dimension.
    * `learning_rate`: a float32 scalar.
    * `hyperparameters`: a tuple of float32 scalars.

    It returns the new row, or, if there are slot variables, the tuple
    `(new_row, *new_slots)` in the order of `slot_names`. `jax.vmap` maps it over the
    touched rows, so JAX must be able to trace it.

    Source: `tf.tpu.experimental.embedding.CustomOptimizer`, whose function is
    elementwise. Here it may use the whole row, for example its norm.

    Under `optax.inject_hyperparams`, name `custom_computation` in `static_args`.

    Args:
      custom_computation: the function.
      learning_rate: scalar, or schedule of the step counted from 0.
      slot_names: names of the slot variables, distinct strings.
      slot_initializers: one scalar, or function of `(shape, dtype)` such as `jnp.ones`,
        per slot. The function must give every row the same values; `shape` is that
        of one shard's slot.
      hyperparameters: scalars, or schedules of the step counted from 0.
      slot_dims: 2 for `[rows, dim]` or 1 for `[rows]`, per slot; None: all are 2.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if the lengths of the sequences differ, or a scalar is not finite.
        When the optimizer is used: if `custom_computation` returns the wrong number of
        arrays or wrong shapes.

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
        checked_schedule("user_defined", x, f"hyperparameters[{i}]", finite)
        for i, x in enumerate(hyperparameters)
    ]
    if not callable(custom_computation):
        raise TypeError(
            "user_defined: custom_computation must be a function of one row, got "
            f"{custom_computation!r}."
        )
    # A string is a sequence of letters.
    names = (slot_names,) if isinstance(slot_names, str) else tuple(slot_names)
    dims = (2,) * len(names) if slot_dims is None else tuple(slot_dims)
    _check_slots(names, tuple(slot_initializers), dims)

    def init(params):
        return UserDefinedState(
            count=jnp.zeros((), jnp.int32),
            slots={
                name: _initial_slot(name, initializer, params.shape[:dim], params.dtype)
                for name, initializer, dim in zip(
                    names, slot_initializers, dims, strict=True
                )
            },
        )

    def update(updates: Any, state: Any, params: Any):
        old = {"row": params, **{f"slot {x!r}": state.slots[x] for x in names}}
        results = jax.vmap(custom_computation, in_axes=(0, 0, 0, None, None))(
            updates,
            params,
            tuple(state.slots[name] for name in names),
            learning_rate_at(rate, state.count),
            tuple(learning_rate_at(x, state.count) for x in rates),
        )
        rows, *slots = _checked_results(results, old)
        new_slots = dict(zip(names, slots, strict=True))
        return rows - params, UserDefinedState(state.count + 1, new_slots)

    return for_each_array(init, update)


def _check_slots(
    names: tuple[Any, ...], initializers: tuple[Any, ...], dims: tuple[Any, ...]
) -> None:
    """Raises one ValueError that names every problem of the slots' arguments."""
    problems = []
    if len(set(names)) < len(names) or not all(isinstance(x, str) for x in names):
        problems.append(f"slot_names must be distinct strings, got {names}")
    for field, entries in (("slot_initializers", initializers), ("slot_dims", dims)):
        if len(entries) != len(names):
            problems.append(
                f"{field} must have one value for each of the {len(names)} slot_names, "
                f"got {len(entries)}"
            )
    if not all(dim in _SLOT_DIMS for dim in dims):
        problems.append(
            f"slot_dims must each be 1 (one scalar per row) or 2 (one per element), "
            f"got {dims}"
        )
    if problems:
        raise ValueError("user_defined: " + "; ".join(problems) + ".")
    check_hyperparameters(
        "user_defined",
        **{
            f"slot_initializers[{i}]": finite(value)
            for i, value in enumerate(initializers)
            if not callable(value)
        },
    )


def _initial_slot(
    name: str, initializer: SlotInitializer, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Returns the initial slot variable, of a given shape and dtype.

    Raises:
      ValueError: if the initializer returns another shape or dtype.
    """
    if not callable(initializer):
        return jnp.full(shape, initializer, dtype)
    slot = initializer(shape, dtype)
    if (slot.shape, slot.dtype) != (shape, dtype):
        raise ValueError(
            f"user_defined: the initializer of slot {name!r} must return shape {shape} "
            f"and dtype {dtype}, which it is called with, got {slot.shape} and "
            f"{slot.dtype}."
        )
    return slot


def _checked_results(results: Any, old: dict[str, jax.Array]) -> list[jax.Array]:
    """Returns the new row and slots as a list, cast to the dtypes of the old ones.

    Raises:
      ValueError: if their number or a shape differs from that of the old ones.
    """
    given = list(results) if isinstance(results, tuple | list) else [results]
    if len(given) != len(old):
        raise ValueError(
            f"user_defined: custom_computation must return {len(old)} arrays, the "
            f"{', the '.join(old)}, got {len(given)}."
        )
    problems = [
        f"the {name} with shape {before.shape[1:]}, got {after.shape[1:]}"
        for (name, before), after in zip(old.items(), given, strict=True)
        if before.shape != after.shape
    ]
    if problems:
        raise ValueError(
            f"user_defined: custom_computation must return {'; '.join(problems)}."
        )
    return [
        after.astype(before.dtype)
        for before, after in zip(old.values(), given, strict=True)
    ]
