"""Checks learning rates, and sets hyper-parameters without recompiling a step."""

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
    """Evaluates a learning rate at a step, counted from 0, as a float32 scalar."""
    rate: Any = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate, jnp.float32)


def checked_schedule(
    owner: str,
    value: Any,
    name: str = "learning_rate",
    check: Callable[[Any], Check] = step_size,
) -> optax.ScalarOrSchedule:
    """Checks a scalar that may be a schedule, such as a learning rate.

    Returns the scalar, or a schedule that checks the type and shape of its values.
    `check` applies to scalars only. Errors contain the optimizer's name `owner` and the
    argument's name `name`.
    """
    if not callable(value):
        check_hyperparameters(owner, **{name: check(value)})
        return value
    check_takes_a_step(owner, value, name)

    def schedule(count: Any) -> Any:
        rate = value(count)
        # Under jit, only type and shape are known. So a rate that falls below 0 is not
        # noticed, and ascends the gradient.
        check_hyperparameters(owner, **{f"{name}(step)": real_scalar(rate)})
        return rate

    return schedule


def check_takes_a_step(owner: str, schedule: Callable[..., Any], name: str) -> None:
    """Rejects a schedule that cannot be called with the step alone."""
    try:
        signature = inspect.signature(schedule)
    except (ValueError, TypeError):  # Some builtins have no signature.
        return
    problem = ""
    first = next(iter(signature.parameters.values()), None)
    # TensorFlow calls `lambda rate=rate: rate` without arguments. If it were called
    # with the step, this lambda would return the step as the rate.
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
    """Sets hyper-parameters in an optimizer state without recompiling the step.

    The optimizers must be made with `optax.inject_hyperparams`. Their states may be
    anywhere in the given state. Dtypes and shardings are kept.

    Args:
      state: one optimizer state, or any pytree of states, such as the result of
        `init_slots`.
      **values: hyper-parameter names and their new scalar values. If a function
        computes a value, see `tpu_embedding.nn.set_each_step`.

    Raises:
      TypeError: if a value is not a number.
      ValueError: if no optimizer in the state has a hyper-parameter of that name. Also
        raised if a value is not a finite scalar, or if `learning_rate` is negative. If
        the old value is an integer, the new value must be an integer as well.

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
    """Replaces values in all injected states, and adds their names to `replaced`."""

    def is_injected(node: Any) -> bool:
        return isinstance(node, optax.InjectStatefulHyperparamsState)

    def replace(node: Any) -> Any:
        if not is_injected(node):
            return node
        # In the next step, a schedule would overwrite a value that is set here.
        scheduled = node.hyperparams_states
        changed = {
            name: _as_before(name, old, values[name])
            for name, old in node.hyperparams.items()
            if name in values and name not in scheduled
        }
        replaced.update(changed)
        return node._replace(
            hyperparams=node.hyperparams | changed,
            # `is_leaf` stops here, so wrapped optimizers need their own pass.
            inner_state=_replace_values(node.inner_state, values, replaced),
        )

    return jax.tree.map(replace, state, is_leaf=is_injected)


def _as_before(name: str, old: jax.Array, value: Any) -> jax.Array:
    """Converts a value to the old dtype and sharding, so that jit doesn't recompile."""
    check = step_size if name == "learning_rate" else finite
    check_hyperparameters(**{name: check(value)})
    is_int = jnp.issubdtype(old.dtype, jnp.integer)
    if is_int and not isinstance(value, jax.core.Tracer) and value != int(value):
        fix = f"For fractions, make the optimizer with a float, such as {name}=1.0."
        raise invalid(name, "be an integer like its initial value", value, fix)
    # A tracer has no committed sharding to keep.
    new = jnp.asarray(value, old.dtype)
    return (
        new if isinstance(old, jax.core.Tracer) else jax.device_put(new, old.sharding)
    )
