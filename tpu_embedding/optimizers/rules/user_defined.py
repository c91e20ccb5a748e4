"""A rule of the user's own, written for one row."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.rules._arrays import for_each_array
from tpu_embedding.optimizers.rules._rates import learning_rate_at

SlotInitializer = float | Callable[..., jax.Array]
"""A number, or a function of `(shape, dtype)` that gives every row the same values."""

_SLOT_DIMS: Final = (1, 2)


class UserDefinedState(NamedTuple):
    """Slot variables by name, `[rows, dim]` or `[rows]`; number of updates so far."""

    count: jax.Array
    slots: dict[str, jax.Array]


def user_defined(
    custom_computation: Callable[..., Any],
    learning_rate: optax.ScalarOrSchedule = 0.01,
    *,
    slot_names: Sequence[str] = (),
    slot_initializers: Sequence[SlotInitializer] = (),
    hyperparameters: Sequence[optax.ScalarOrSchedule] = (),
    slot_dims: Sequence[int] | None = None,
) -> optax.GradientTransformation:
    """A rule given as a function of one row, which is applied to all touched rows.

    TensorFlow: `tf.tpu.experimental.embedding.CustomOptimizer`, and its convention:

        custom_computation(
            gradient, embedding_table, slot_variables, learning_rate, hyperparameters
        ) -> new_row                      without slot variables, or
          -> (new_row, *new_slots)        in the order of `slot_names`

    with, for one row, `gradient` (the sum over the ids of the step) and
    `embedding_table` of shape `(dim,)`; `slot_variables` a tuple of arrays of shape
    `(dim,)`, or `()` where the slot has one dimension; `learning_rate` a float32
    scalar; `hyperparameters` a tuple of such. It is mapped over rows by `jax.vmap`, so
    it must be traceable by JAX. Unlike TensorFlow's, it may see the whole row at once.

    Under `optax.inject_hyperparams`, name `custom_computation` in `static_args`.

    Args:
      custom_computation: the function.
      learning_rate: number or schedule of the step, counted from 0.
      slot_names: names of the slot variables.
      slot_initializers: of each slot, a number, or a function of `(shape, dtype)` such
        as `jnp.ones` that gives every row the same; shape is that of this shard's
        slot.
      hyperparameters: numbers or schedules.
      slot_dims: of each slot, 2 for `[rows, dim]`, 1 for `[rows]`; None: all 2.

    Raises:
      ValueError: if the sequences do not fit each other, or, when the rule is used, if
        `custom_computation` does not return what is described above.

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
    names = tuple(slot_names)
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
            learning_rate_at(learning_rate, state.count),
            tuple(learning_rate_at(x, state.count) for x in hyperparameters),
        )
        rows, *slots = _checked_results(results, old)
        new_slots = dict(zip(names, slots, strict=True))
        return rows - params, UserDefinedState(state.count + 1, new_slots)

    return for_each_array(init, update)


def _check_slots(
    names: tuple[Any, ...], initializers: tuple[Any, ...], dims: tuple[Any, ...]
) -> None:
    problems = []
    if len(set(names)) < len(names) or not all(isinstance(x, str) for x in names):
        problems.append(f"slot_names must be distinct strings, got {names}")
    for field, values in (("slot_initializers", initializers), ("slot_dims", dims)):
        if len(values) != len(names):
            problems.append(
                f"{field} must have one value for each of the {len(names)} slot_names, "
                f"got {len(values)}"
            )
    if not all(dim in _SLOT_DIMS for dim in dims):
        problems.append(
            f"slot_dims must each be 1 (one number per row) or 2 (one per element), "
            f"got {dims}"
        )
    if problems:
        raise ValueError("user_defined: " + "; ".join(problems) + ".")


def _initial_slot(
    name: str, initializer: SlotInitializer, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    if not callable(initializer):
        return jnp.full(shape, initializer, dtype)
    slot = initializer(shape, dtype)
    if (slot.shape, slot.dtype) != (shape, dtype):
        raise ValueError(
            f"user_defined: the initializer of slot {name!r} must return shape {shape} "
            f"and dtype {dtype}, as it was asked for, got {slot.shape} and "
            f"{slot.dtype}."
        )
    return slot


def _checked_results(results: Any, old: dict[str, jax.Array]) -> list[jax.Array]:
    """Returns row and slots as a list, if they are shaped as the old ones."""
    given = list(results) if isinstance(results, tuple | list) else [results]
    if len(given) != len(old):
        raise ValueError(
            f"user_defined: custom_computation must return {len(old)} arrays, the "
            f"{', the '.join(old)}, got {len(given)}."
        )
    problems = [
        f"the {name} in shape {before.shape[1:]}, as it was given, got "
        f"{after.shape[1:]}"
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
