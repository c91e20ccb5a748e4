"""Learning rates and schedules, and values that change without recompilation."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax

from tpu_embedding.argument_checks import about, describe_value, invalid
from tpu_embedding.optimizers.checks import (
    Check,
    check_hyperparameters,
    finite,
    real_scalar,
    step_size,
)
from tpu_embedding.transfers import moves_arrays


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

    A schedule's values are not known before the step runs, so their sign is not
    checked: a learning rate that falls below 0 ascends the gradient.

    Args:
      owner: name of the optimizer, for errors.
      value: the user's scalar or schedule.
      name: name of the argument, for errors.
      check: checks a scalar. By default it must be at least 0.

    Returns:
      The scalar, or a schedule that checks the type and shape of each value it returns.

    Raises:
      TypeError: if the value is neither a number nor a function of one argument, or if
        that argument has a default.
      ValueError: if the value is not a scalar or is out of range.
    """
    if not callable(value):
        check_hyperparameters(owner, **{name: check(value)})
        return value
    check_takes_a_step(owner, value, name)

    def schedule(count: Any) -> Any:
        rate = value(count)
        # Only type and shape can be checked: under jit the value is not known yet.
        check_hyperparameters(owner, **{f"{name}(step)": real_scalar(rate)})
        return rate

    return schedule


def check_takes_a_step(owner: str, schedule: Callable[..., Any], name: str) -> None:
    """Raises TypeError if a schedule cannot be called with the step alone.

    A first argument with a default is also rejected. TensorFlow calls a function such
    as `lambda rate=rate: rate` without arguments. Called with the step, such a function
    would return the step as the rate.
    """
    try:
        signature = inspect.signature(schedule)
    except (ValueError, TypeError):  # Some builtins have no signature.
        return
    problem = ""
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.default is not first.empty:
        problem = (
            f", whose argument {first.name!r} has a default. Remove the default if it "
            "is the step"
        )
    else:
        try:
            signature.bind(0)
            return
        except TypeError:
            problem = f" with the arguments {signature}"
    text = (
        f"{owner}: {name} must be a number or a function of the step, counted from 0, "
        f"got {describe_value(schedule)}{problem}. For a function without arguments, "
        f"use optax.inject_hyperparams and te.nn.set_each_step(train_step, {name}=...)."
    )
    raise about(TypeError(text), f"{owner}: {name}", schedule)


@moves_arrays
def with_hyperparameters(state: Any, **values: Any) -> Any:
    """Returns an optimizer's state with new hyper-parameter values.

    The optimizers must be made with `optax.inject_hyperparams`; their states may be
    anywhere in the given state. Dtypes and shardings are kept, so the step is not
    recompiled.

    Args:
      state: state of one optimizer, or any pytree of states, such as the result of
        `init_slots`.
      **values: new scalar for each named hyper-parameter. To get the value from a
        function without arguments, see `tpu_embedding.nn.set_each_step`.

    Raises:
      TypeError: if a value is not a number.
      ValueError: if no optimizer in the state has a hyper-parameter of that name. Also
        if a value is not a finite scalar, is a negative `learning_rate`, or is not an
        integer although the old value is an integer.

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
            text = (
                f"The optimizer's state has no hyper-parameter {name!r} to set. Make "
                f"the optimizer with optax.inject_hyperparams(optimizer)({name}=...), "
                "and pass a scalar instead of a schedule."
            )
            raise about(ValueError(text), name, values[name])
    return state


def _replace_values(state: Any, values: dict[str, Any], replaced: set[str]) -> Any:
    """Replaces values in all states made by `inject_hyperparams`, even nested states.

    Adds the replaced names to `replaced`.
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
    """Checks a value, and returns it with the old value's dtype and sharding."""
    check = step_size if name == "learning_rate" else finite
    check_hyperparameters(**{name: check(value)})
    is_int = jnp.issubdtype(old.dtype, jnp.integer)
    if is_int and not isinstance(value, jax.core.Tracer) and value != int(value):
        fix = f"For fractions, make the optimizer with a float, such as {name}=1.0."
        raise invalid(name, "be an integer like its initial value", value, fix)
    new = jnp.asarray(value, old.dtype)
    return (
        new if isinstance(old, jax.core.Tracer) else jax.device_put(new, old.sharding)
    )
