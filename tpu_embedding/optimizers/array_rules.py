"""Lifts a rule for one array `[rows, dim]` to pytrees of arrays.

optax wrappers such as `optax.masked` and `optax.multi_transform` call a transformation
with a pytree.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

InitArray = Callable[[Any], Any]
UpdateArray = Callable[[Any, Any, Any], tuple[Any, Any]]


def for_each_array(
    init: InitArray, update: UpdateArray
) -> optax.GradientTransformation:
    """Returns a transformation of pytrees that applies a rule to each array.

    Args:
      init: `params -> state` for one array.
      update: `(updates, state, params) -> (updates, state)` for one array; `params` may
        be None.

    Returns:
      A transformation whose state is a pytree of the states of `init`.
    """

    def init_tree(params: Any) -> Any:
        return jax.tree.map(init, params)

    def update_tree(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        arrays, tree = jax.tree.flatten(updates)
        states = tree.flatten_up_to(state)
        rows = [None] * len(arrays) if params is None else tree.flatten_up_to(params)
        results = [update(*parts) for parts in zip(arrays, states, rows, strict=True)]
        return (
            tree.unflatten([new for new, _ in results]),
            tree.unflatten([new for _, new in results]),
        )

    return optax.GradientTransformation(init_tree, update_tree)
