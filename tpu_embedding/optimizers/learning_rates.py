"""Learning rates in a formula, and values that change without recompilation."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.optimizers.checks import (
    Check,
    check_hyperparameters,
    finite,
    real_scalar,
    step_size,
)


def learning_rate_at(
    learning_rate: optax.ScalarOrSchedule, count: jax.Array
) -> jax.Array:
    """Returns the learning rate of a step, counted from 0, as a float32 scalar."""
    rate: Any = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate, jnp.float32)


def checked_schedule(
    owner: str,
    value: Any,
    name: str = "learning_rate",
    check: Callable[[Any], Check] = step_size,
) -> optax.ScalarOrSchedule:
    """Checks a learning rate, or another scalar that may be a schedule of the step.

    The values of a schedule are not known before the step runs, so a learning rate that
    falls below 0 ascends the gradient.

    Args:
      owner: name of the optimizer, for errors.
      value: the user's scalar or schedule.
      name: name of the argument, for errors.
      check: returns the check of a scalar. A learning rate must be at least 0.

    Returns:
      The scalar; or a schedule that checks each value before it returns it.

    Raises:
      TypeError: if the value is neither a number nor a function of one argument; or
        if its argument has a default.
      ValueError: if the value is not a scalar, or out of range.
    """
    if not callable(value):
        check_hyperparameters(owner, **{name: check(value)})
        return value
    check_takes_a_step(owner, value, name)

    def schedule(count: Any) -> Any:
        rate = value(count)
        # Checks the type and shape only: under jit, a rate is not known yet.
        check_hyperparameters(owner, **{f"{name}(step)": real_scalar(rate)})
        return rate

    return schedule


def check_takes_a_step(owner: str, schedule: Callable[..., Any], name: str) -> None:
    """Raises TypeError if a schedule cannot be called with the step alone.

    A function whose first argument has a default is also rejected: TensorFlow calls
    `lambda rate=rate: rate` without arguments, and here the step would be its rate.
    """
    try:
        signature = inspect.signature(schedule)
    except (ValueError, TypeError):  # A builtin may have none.
        return
    problem = ""
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.default is not first.empty:
        problem = (
            f", whose argument {first.name!r} has a default, so it may be meant to be "
            "called without arguments. Remove the default if it is the step"
        )
    else:
        try:
            signature.bind(0)
            return
        except TypeError:
            problem = f" with the arguments {signature}"
    raise TypeError(
        f"{owner}: {name} must be a number or a function of the step, counted from 0, "
        f"got {describe_value(schedule)}{problem}. For a function without arguments, "
        f"use optax.inject_hyperparams and te.nn.set_each_step(train_step, {name}=...)."
    )


def with_hyperparameters(state: Any, **values: Any) -> Any:
    """Returns an optimizer's state with other hyper-parameters.

    It changes hyper-parameters of optimizers made by `optax.inject_hyperparams`,
    anywhere in the state. Dtypes and shardings stay, so the compiled step runs without
    recompilation.

    Args:
      state: state of one optimizer, or any pytree of states, such as `init_slots`
        returns.
      **values: name of a hyper-parameter to its new value, a scalar. For a function
        without arguments, see `tpu_embedding.nn.set_each_step`.

    Returns:
      The new state.

    Raises:
      TypeError: if a value is not a number.
      ValueError: if no optimizer in the state has a hyper-parameter of that name, or a
        value is not finite, has another shape, is a negative `learning_rate`, or is
        not an integer where the state holds one.

    Example:
      >>> from tpu_embedding import optimizers
      >>> rule = optax.inject_hyperparams(optimizers.adagrad)(learning_rate=0.1)
      >>> state = rule.init(jnp.ones((3, 2)))
      >>> state = with_hyperparameters(state, learning_rate=0.5)
      >>> float(state.hyperparams["learning_rate"])
      0.5
    """
    replaced: set[str] = set()
    state = _replace_values(state, values, replaced)
    for name in values:
        if name not in replaced:
            raise ValueError(
                f"The state holds no hyper-parameter {name!r} that can be set. Make "
                "the optimizer by "
                f"optax.inject_hyperparams(optimizer)({name}=...), with a scalar and "
                "not a schedule."
            )
    return state


def _replace_values(state: Any, values: dict[str, Any], replaced: set[str]) -> Any:
    """Replaces values in all states made by `inject_hyperparams`, nested ones too.

    Their names are added to `replaced`.
    """

    def is_injected(node: Any) -> bool:
        return isinstance(node, optax.InjectStatefulHyperparamsState)

    def replace(node: Any) -> Any:
        if not is_injected(node):
            return node
        scheduled = node.hyperparams_states
        changed = {
            name: _as_before(name, old, values[name])
            for name, old in node.hyperparams.items()
            if name in values and name not in scheduled
        }
        replaced.update(changed)
        return node._replace(
            hyperparams=node.hyperparams | changed,
            inner_state=_replace_values(node.inner_state, values, replaced),
        )

    return jax.tree.map(replace, state, is_leaf=is_injected)


def _as_before(name: str, old: jax.Array, value: Any) -> jax.Array:
    """Returns a value, once it is checked, with the old one's dtype and sharding."""
    check = step_size if name == "learning_rate" else finite
    check_hyperparameters(**{name: check(value)})
    is_int = jnp.issubdtype(old.dtype, jnp.integer)
    if is_int and not isinstance(value, jax.core.Tracer) and value != int(value):
        raise ValueError(
            f"{name} must be an integer, because the optimizer was made with one, got "
            f"{value}. Make the optimizer with a float, such as {name}=1.0."
        )
    new = jnp.asarray(value, old.dtype)
    return (
        new if isinstance(old, jax.core.Tracer) else jax.device_put(new, old.sharding)
    )
