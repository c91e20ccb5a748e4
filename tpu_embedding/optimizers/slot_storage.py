"""Chooses how slot variables are stored: their initial values and type."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import check_hyperparameters, finite
from tpu_embedding.optimizers.probe import slot_row_shapes
from tpu_embedding.optimizers.row_optimizer import wrap_rule

SlotInitializer = float | Callable[[tuple[int, ...], Any], jax.Array]
SlotInitializers = Mapping[str, SlotInitializer]
"""Maps the name of a slot to a number, or to a function of shape and dtype."""


def with_slot_storage(
    owner: str,
    rule: optax.GradientTransformation,
    dtype: Any,
    initializers: SlotInitializers | None,
) -> optax.GradientTransformation:
    """Chooses initial values and type of a rule's slot variables; see `with_options`.

    Args:
      owner: the function that takes the other arguments, for errors.
      rule: an optax transformation of `[rows, dim]`.
      dtype: `slot_dtype`.
      initializers: `slot_initializers`.
    """
    _check_slot_storage(owner, dtype, initializers)
    values = dict(initializers or {})

    def store(inner: optax.GradientTransformation) -> optax.GradientTransformation:
        def init(rows: Any) -> Any:
            # A tree like the state: None for leaves that are no slots.
            shapes = slot_row_shapes(inner, rows.shape[1:])
            _check_names(values, shapes)
            return jax.tree_util.tree_map_with_path(
                lambda path, shape, leaf: _initial(path, shape, leaf, values, dtype),
                shapes,
                inner.init(rows),
                is_leaf=lambda leaf: leaf is None,
            )

        def update(updates: Any, state: Any, rows: Any) -> tuple[Any, Any]:
            wide = jax.tree.map(lambda leaf: _cast(leaf, jnp.float32), state)
            updates, new = inner.update(updates, wide, rows)
            stored = jax.tree.map(lambda x, old: _cast(x, old.dtype), new, state)
            return updates, stored

        return for_each_array(init, update)

    return wrap_rule(rule, store)


def _check_slot_storage(owner: str, dtype: Any, initializers: Any) -> None:
    """Raises an error if these cannot be `slot_dtype` and `slot_initializers`."""
    if dtype is not None and not _is_floating(dtype):
        raise ValueError(
            f"{owner}: slot_dtype must be a floating type such as jnp.bfloat16, got "
            f"{dtype!r}."
        )
    if initializers is None:
        return
    if not isinstance(initializers, Mapping):
        raise TypeError(
            f"{owner}: slot_initializers must map names of slots to values, such as "
            f"{{'accumulators': 0.5}}, got {initializers!r}."
        )
    check_hyperparameters(
        owner,
        **{
            f"slot_initializers[{name!r}]": finite(value)
            for name, value in initializers.items()
            if not callable(value)
        },
    )


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        return False


def _initial(
    path: Any, shape: Any, leaf: Any, values: dict[str, Any], dtype: Any
) -> Any:
    """Returns the first values of a part of the state, of the type to store it in."""
    if shape is None:
        return leaf
    value = values.get(_name(path), leaf)
    if callable(value):
        value = value(leaf.shape, leaf.dtype)
    value = jnp.broadcast_to(jnp.asarray(value, leaf.dtype), leaf.shape)
    return value if dtype is None else _cast(value, dtype)


def _cast(leaf: Any, dtype: Any) -> Any:
    """Returns floats of another type; integers and random keys as they are."""
    return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _check_names(values: dict[str, Any], shapes: Any) -> None:
    names = sorted(
        _name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
    )
    for name in values:
        if name not in names:
            raise ValueError(
                f"slot_initializers must name slots of the rule, {names}, got {name!r}."
            )


def _name(path: Any) -> str:
    """Returns the last field name, key or index of a path."""
    last = path[-1] if path else None
    return str(getattr(last, "name", getattr(last, "key", getattr(last, "idx", ""))))
