"""Lifts a rule for one array `[rows, dim]` to pytrees of arrays.

optax wrappers such as `optax.masked` and `optax.multi_transform` call a transformation
with a pytree, and Flax's optimizers with the parameters of a model. The state then has
the form that optax's own states have: the fields outside, and in each field a pytree
like that of the parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from tpu_embedding.optimizers.table_rows import table_rows_context

InitArray = Callable[[Any], Any]
UpdateArray = Callable[[Any, Any, Any], tuple[Any, Any]]


def for_each_array(
    init: InitArray, update: UpdateArray
) -> optax.GradientTransformation:
    """Returns a transformation of pytrees that applies a rule to each array.

    Args:
      init: `params -> state` for one array. All states have one structure; a field that
        only some arrays need is None for the others.
      update: `(updates, state, params) -> (updates, state)` for one array; `params` may
        be None.

    Returns:
      A transformation. Its state for a single array is that of `init`. For a pytree it
      has the structure of that state, with a pytree of arrays in the place of each.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = for_each_array(lambda x: {"sum": x}, lambda u, s, x: (u, s))
      >>> rule.init({"a": jnp.ones(2), "b": jnp.zeros(1)})["sum"]["a"].tolist()
      [1.0, 1.0]
    """

    def init_tree(params: Any) -> Any:
        arrays, tree = jax.tree.flatten(params)
        return _outside_in(tree, [init(x) for x in arrays])

    def update_tree(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        arrays, tree = jax.tree.flatten(updates)
        states = _inside_out(tree, state, init, arrays)
        rows = [None] * len(arrays) if params is None else tree.flatten_up_to(params)
        results = [update(*parts) for parts in zip(arrays, states, rows, strict=True)]
        return (
            tree.unflatten([new for new, _ in results]),
            _outside_in(tree, [new for _, new in results]),
        )

    return optax.GradientTransformation(init_tree, update_tree)


def _outside_in(tree: Any, states: list[Any]) -> Any:
    """Returns one state that holds a pytree in each field, from a state per array."""
    if not states:
        return tree.unflatten([])
    if jax.tree.structure(0) == tree:
        return states[0]
    fields = [jax.tree.leaves(state, is_leaf=_is_none) for state in states]
    structure = jax.tree.structure(states[0], is_leaf=_is_none)
    return structure.unflatten(
        [tree.unflatten(of_arrays) for of_arrays in zip(*fields, strict=True)]
    )


def _inside_out(tree: Any, state: Any, init: InitArray, arrays: list[Any]) -> list[Any]:
    """Returns one state per array; the inverse of `_outside_in`."""
    if not arrays:
        return []
    if jax.tree.structure(0) == tree:
        return [state]
    # Only the structure matters here, so the rule need not see the rows of a layer.
    with table_rows_context(None):
        example = jax.eval_shape(init, arrays[0])
    structure = jax.tree.structure(example, is_leaf=_is_none)
    fields = [tree.flatten_up_to(field) for field in structure.flatten_up_to(state)]
    return [
        structure.unflatten(of_array)
        for of_array in (zip(*fields, strict=True) if fields else [()] * len(arrays))
    ]


def _is_none(value: Any) -> bool:
    return value is None
