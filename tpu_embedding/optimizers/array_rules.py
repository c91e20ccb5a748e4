"""Lifts a rule for one array `[rows, dim]` to pytrees of arrays.

A layer runs a rule on one array, but `optax.masked`, `optax.multi_transform` and Flax
optimizers pass pytrees. For a pytree, the state is a named tuple, as in optax. It holds
one step count, and pytrees structured like the parameters.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.table_rows import table_rows_context

_SHARED: Final = ("count", "average_momentum")
"""Fields that are equal for all arrays, so a state holds them only once."""


class PerArray(NamedTuple):
    """A field with one value per array, whose shape differs from the array's shape."""

    # In a pytree structured like the parameters, Flax would give each value the
    # sharding of its parameter, which doesn't fit the value's shape.

    values: tuple[Any, ...]


def for_each_array(
    init: Callable[[Any], Any], update: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> optax.GradientTransformation:
    """Applies a rule to each array in a pytree.

    `init` maps one array to its state. All states must have the same structure. A
    field that an array doesn't need is None. `update` maps the updates, state and
    params for one array to new updates and state. The params may be None.

    The state of a single array is the result of `init`. A pytree also has one state, in
    which all arrays share `count`. If a field's values are shaped like their arrays,
    the field becomes a pytree. Any other field becomes a `PerArray`.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = for_each_array(lambda x: {"sum": x}, lambda u, s, x: (u, s))
      >>> rule.init({"a": jnp.ones(2), "b": jnp.zeros(1)})["sum"]["a"].tolist()
      [1.0, 1.0]
    """

    def init_tree(params: Any) -> Any:
        arrays, tree = jax.tree.flatten(params)
        return outside_in(tree, arrays, [init(x) for x in arrays])

    def update_tree(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        arrays, tree = jax.tree.flatten(updates)
        states = inside_out(tree, state, arrays)
        rows = [None] * len(arrays) if params is None else tree.flatten_up_to(params)
        results = [update(*parts) for parts in zip(arrays, states, rows, strict=True)]
        new_updates = tree.unflatten([new for new, _ in results])
        new_state = outside_in(tree, arrays, [new for _, new in results])
        return new_updates, new_state

    def outside_in(tree: Any, arrays: list[Any], states: list[Any]) -> Any:
        # A bare array keeps `init`'s own state, in which a layer finds slots by shape.
        if not states or jax.tree.structure(0) == tree:
            return tree.unflatten(states)

        def combine(path: Any, *leaves: Any) -> Any:
            if _is_shared(path):
                return leaves[0]
            # None can stay in the pytree, because it doesn't have a sharding.
            fits = all(
                leaf is None or jnp.shape(leaf) == jnp.shape(array)
                for leaf, array in zip(leaves, arrays, strict=True)
            )
            return tree.unflatten(leaves) if fits else PerArray(leaves)

        return jax.tree_util.tree_map_with_path(combine, *states, is_leaf=_is_none)

    def inside_out(tree: Any, state: Any, arrays: list[Any]) -> list[Any]:
        """Inverts `outside_in`."""
        if not arrays:
            return []
        if jax.tree.structure(0) == tree:
            return [state]
        # Only the structure of the state matters, so the rule doesn't need a layer's
        # rows.
        with table_rows_context(None):
            example = jax.eval_shape(init, arrays[0])
        by_path, structure = jax.tree.flatten_with_path(example, is_leaf=_is_none)
        fields = []
        split = zip(by_path, structure.flatten_up_to(state), strict=True)
        for (path, _), field in split:
            if _is_shared(path):
                fields.append([field] * len(arrays))
            elif isinstance(field, PerArray):
                fields.append(field.values)
            else:
                fields.append(tree.flatten_up_to(field))
        return [
            structure.unflatten([leaves[i] for leaves in fields])
            for i in range(len(arrays))
        ]

    return optax.GradientTransformation(init_tree, update_tree)


def initial_state(
    kind: Any, *, by_row: tuple[str, ...] = (), **start_values: Any
) -> Callable[[Any], Any]:
    """Builds `init` for a rule whose state is the named tuple `kind`.

    A field `count` is an int32 that starts at 0. Fields in `by_row` have one value per
    row, and other fields have the array's shape. Both have the array's dtype. Start
    values default to 0. A field whose start value is None remains None.

    Example:
      >>> import collections
      >>> kind = collections.namedtuple("State", ["count", "sums", "means"])
      >>> state = initial_state(kind, sums=0.5, means=None)(jnp.ones(2))
      >>> int(state.count), state.sums.tolist(), state.means
      (0, [0.5, 0.5], None)
    """

    def init(array: Any) -> Any:
        fields: dict[str, Any] = {}
        for name in kind._fields:
            value = start_values.get(name, 0)
            shape = array.shape[:1] if name in by_row else None
            if value is not None:
                value = jnp.full_like(array, value, shape=shape)
            fields[name] = value
        if "count" in fields:
            fields["count"] = jnp.zeros((), jnp.int32)
        return kind(**fields)

    return init


def descent(
    init: Callable[[Any], Any],
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
    """Applies a rule to each array, and scales steps by minus the learning rate."""
    steps = for_each_array(init, update)
    return optax.chain(steps, optax.scale_by_learning_rate(learning_rate))


def _is_none(value: Any) -> bool:
    return value is None


def _is_shared(path: Any) -> bool:
    return bool(path) and getattr(path[-1], "name", None) in _SHARED
