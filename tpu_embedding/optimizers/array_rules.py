"""Lifts a rule for one array `[rows, dim]` to pytrees of arrays.

optax wrappers such as `optax.masked` and `optax.multi_transform` call a transformation
with a pytree, and Flax's optimizers call it with a model's parameters. In these cases,
the state has the form of optax's own states: a named tuple whose fields are pytrees
with the structure of the parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from tpu_embedding.optimizers.table_rows import table_rows_context


def for_each_array(
    init: Callable[[Any], Any], update: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> optax.GradientTransformation:
    """Returns a transformation of pytrees that applies a rule to each array.

    Args:
      init: `params -> state` for one array. All states have the same structure; a field
        that only some arrays need is `None` for other arrays.
      update: `(updates, state, params) -> (updates, state)` for one array; `params` may
        be `None`.

    Returns:
      A transformation. For a single array, its state is the result of `init`. For a
      pytree of arrays, each field of its state is a pytree with one value per array.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = for_each_array(lambda x: {"sum": x}, lambda u, s, x: (u, s))
      >>> rule.init({"a": jnp.ones(2), "b": jnp.zeros(1)})["sum"]["a"].tolist()
      [1.0, 1.0]
    """

    def init_tree(params: Any) -> Any:
        arrays, tree = jax.tree.flatten(params)
        return outside_in(tree, [init(x) for x in arrays])

    def update_tree(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        arrays, tree = jax.tree.flatten(updates)
        states = inside_out(tree, state, arrays)
        rows = [None] * len(arrays) if params is None else tree.flatten_up_to(params)
        results = [update(*parts) for parts in zip(arrays, states, rows, strict=True)]
        new_updates = tree.unflatten([new for new, _ in results])
        return new_updates, outside_in(tree, [new_state for _, new_state in results])

    def outside_in(tree: Any, states: list[Any]) -> Any:
        """Combines the arrays' states into one state with a pytree in each field."""
        if not states:
            return tree.unflatten([])
        return jax.tree.map(
            lambda *leaves: tree.unflatten(leaves), *states, is_leaf=_is_none
        )

    def inside_out(tree: Any, state: Any, arrays: list[Any]) -> list[Any]:
        """Splits a state into one state per array; the inverse of `outside_in`."""
        if not arrays:
            return []
        if jax.tree.structure(0) == tree:
            return [state]
        # Only the structure of the state matters, so the rule doesn't need a layer's
        # rows.
        with table_rows_context(None):
            example = jax.eval_shape(init, arrays[0])
        structure = jax.tree.structure(example, is_leaf=_is_none)
        fields = [tree.flatten_up_to(field) for field in structure.flatten_up_to(state)]
        return [
            structure.unflatten([leaves[i] for leaves in fields])
            for i in range(len(arrays))
        ]

    return optax.GradientTransformation(init_tree, update_tree)


def _is_none(value: Any) -> bool:
    return value is None
