"""Hyper-parameters that are values of the state, and so change without compilation."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax


def with_hyperparameters(state: Any, **values: Any) -> Any:
    """Returns an optimizer's state with other hyper-parameters.

    The rules in question are those made by `optax.inject_hyperparams`, anywhere in the
    state. Type and sharding of the values stay, so a compiled step is not compiled
    again.

    Args:
      state: of one optimizer, or any nest of states, such as that of `init_slots`.
      **values: name to number, or to a function without arguments that returns it.

    Returns:
      The new state.

    Raises:
      ValueError: if no rule in the state has a hyper-parameter of that name.

    Example:
      >>> from tpu_embedding import optimizers
      >>> rule = optax.inject_hyperparams(optimizers.adagrad)(learning_rate=0.1)
      >>> state = rule.init(jnp.ones((3, 2)))
      >>> state = with_hyperparameters(state, learning_rate=0.5)
      >>> float(state.hyperparams["learning_rate"])
      0.5
    """
    found: set[str] = set()
    state = _replace(state, values, found)
    for name in values:
        if name not in found:
            raise ValueError(
                f"The optimizer has no hyper-parameter {name!r} that can be set in its "
                f"state. Make it by optax.inject_hyperparams(rule)({name}=...), with "
                "a number and not a schedule."
            )
    return state


def _replace(state: Any, values: dict[str, Any], found: set[str]) -> Any:
    """Replaces values in all states made by `inject_hyperparams`, nested ones too."""

    def replace(part: Any) -> Any:
        if not _is_injected(part):
            return part
        scheduled = part.hyperparams_states
        changed = {
            name: _like(old, values[name])
            for name, old in part.hyperparams.items()
            if name in values and name not in scheduled
        }
        found.update(changed)
        return part._replace(
            hyperparams=part.hyperparams | changed,
            inner_state=_replace(part.inner_state, values, found),
        )

    return jax.tree.map(replace, state, is_leaf=_is_injected)


def _is_injected(part: Any) -> bool:
    return isinstance(part, optax.InjectStatefulHyperparamsState)


def _like(old: jax.Array, value: Any) -> jax.Array:
    new = jnp.asarray(value() if callable(value) else value, old.dtype)
    if isinstance(old, jax.core.Tracer):
        return new
    return jax.device_put(new, old.sharding)
