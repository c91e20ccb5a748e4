"""Hyper-parameters kept in the state, which change without recompilation."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.checks import check_hyperparameters, finite, step_size


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
      TypeError: if a value is no number.
      ValueError: if no optimizer in the state has a hyper-parameter of that name, or a
        value is not finite, has another shape, is a negative `learning_rate`, or is no
        integer where the state holds one.

    Example:
      >>> from tpu_embedding import optimizers
      >>> rule = optax.inject_hyperparams(optimizers.adagrad)(learning_rate=0.1)
      >>> state = rule.init(jnp.ones((3, 2)))
      >>> state = with_hyperparameters(state, learning_rate=0.5)
      >>> float(state.hyperparams["learning_rate"])
      0.5
    """
    found: set[str] = set()
    state = _replace_values(state, values, found)
    for name in values:
        if name not in found:
            raise ValueError(
                f"The state holds no hyper-parameter {name!r} that can be set. Make "
                "the optimizer by "
                f"optax.inject_hyperparams(optimizer)({name}=...), with a scalar and "
                "not a schedule."
            )
    return state


def _replace_values(state: Any, values: dict[str, Any], found: set[str]) -> Any:
    """Replaces values in all states made by `inject_hyperparams`, nested ones too.

    The names that it replaced are added to `found`.
    """

    def replace(node: Any) -> Any:
        if not _is_injected(node):
            return node
        scheduled = node.hyperparams_states
        changed = {
            name: _with_dtype_and_sharding(name, old, values[name])
            for name, old in node.hyperparams.items()
            if name in values and name not in scheduled
        }
        found.update(changed)
        return node._replace(
            hyperparams=node.hyperparams | changed,
            inner_state=_replace_values(node.inner_state, values, found),
        )

    return jax.tree.map(replace, state, is_leaf=_is_injected)


def _is_injected(node: Any) -> bool:
    """Returns True for a state that `optax.inject_hyperparams` made."""
    return isinstance(node, optax.InjectStatefulHyperparamsState)


def _with_dtype_and_sharding(name: str, old: jax.Array, value: Any) -> jax.Array:
    """Returns the value with the dtype and sharding of the old one."""
    check = step_size if name == "learning_rate" else finite
    check_hyperparameters(**{name: check(value)})
    is_int = jnp.issubdtype(old.dtype, jnp.integer)
    if is_int and not isinstance(value, jax.core.Tracer) and value != int(value):
        raise ValueError(
            f"{name} must be an integer, because the optimizer was made with one, got "
            f"{value}. Make the optimizer with a float, such as {name}=1.0."
        )
    new = jnp.asarray(value, old.dtype)
    if isinstance(old, jax.core.Tracer):
        return new
    return jax.device_put(new, old.sharding)
