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
    states = [
        part
        for part in jax.tree.leaves(state, is_leaf=_is_injected)
        if _is_injected(part)
    ]
    known = sorted({name for part in states for name in part.hyperparams})
    for name in values:
        if name not in known:
            raise ValueError(
                f"The optimizer has no hyper-parameter {name!r} in its state, only "
                f"{known}. Make it by optax.inject_hyperparams(rule)({name}=...), with "
                "a number and not a schedule."
            )

    def replace(part: Any) -> Any:
        if not _is_injected(part):
            return part
        changed = {
            name: _like(part.hyperparams[name], value)
            for name, value in values.items()
            if name in part.hyperparams
        }
        return part._replace(hyperparams=part.hyperparams | changed)

    return jax.tree.map(replace, state, is_leaf=_is_injected)


def _is_injected(part: Any) -> bool:
    return isinstance(part, optax.InjectStatefulHyperparamsState)


def _like(old: jax.Array, value: Any) -> jax.Array:
    new = jnp.asarray(value() if callable(value) else value, old.dtype)
    if isinstance(old, jax.core.Tracer):
        return new
    return jax.device_put(new, old.sharding)
