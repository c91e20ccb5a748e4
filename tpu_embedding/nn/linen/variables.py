"""Finds, replaces and saves the tables in the variables of a Linen model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import numpy as np
from flax import serialization

from tpu_embedding.argument_checks import check_mapping
from tpu_embedding.functional.derived_state import (
    check_has_slots,
    tables_with_derived_state,
)
from tpu_embedding.nn.model_tables import LayerTables as LayerTables
from tpu_embedding.nn.model_tables import ModelState, ModelTables, check_names
from tpu_embedding.tables.table_values import unstack_tables

TABLES: Final = "embedding_tables"
"""The collection of all tables; each layer has one `LayerTables` in it."""


_SET_WITH_SLOTS: Final = (
    "state = state.with_embedding_tables(values)\n"
    "Before TrainState.create, there is no state: write\n"
    "  variables, _ = te.linen.with_embedding_tables(variables, values, {})"
)


def embedding_tables(variables: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Reads all tables as NumPy arrays.

    Args:
      variables: from `model.init`, or `state.variables`.

    Returns:
      Layer path to table name to NumPy array `[vocabulary_size, dim]`.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.linen.TPUEmbedding(te.make_plan(te.FeatureConfig(table=table)))
      >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
      >>> embedding_tables(variables)[""]["movie"].shape
      (10, 4)
    """
    return {
        path: unstack_tables(tables.stacks, tables.plan)
        for path, tables in layer_tables(variables).items()
    }


def with_embedding_tables(
    variables: Mapping[str, Any],
    values: Mapping[str, Mapping[str, Any]],
    slots: Mapping[str, Any] | None = None,
) -> Any:
    """Replaces table values in variables.

    If you pass `slots`, optimizer state derived from the old values is reset to match
    the new values. See `tpu_embedding.functional.with_table_values`.

    Args:
      variables: from `model.init`, or `state.variables`.
      values: layer path to table name to array `[vocabulary_size, dim]`.
      slots: layer path to stack name to optimizer state, like `state.slots`. Before
        you have a `TrainState`, pass an empty dict. Only needed if an optimizer derives
        state from the values, as `adafactor` does.

    Returns:
      New variables, or `(variables, slots)` if you pass `slots`.

    Raises:
      TypeError: if `values`, or its values, are not dicts.
      ValueError: if a layer or table is unknown, or an array has the wrong shape. Also
        raised if `slots` is needed but missing. For a `TrainState`, call its
        `with_embedding_tables`.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.linen.TPUEmbedding(te.make_plan(te.FeatureConfig(table=table)))
      >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
      >>> ones = {"": {"movie": np.ones((10, 4))}}
      >>> variables = with_embedding_tables(variables, ones)
      >>> layer.apply(variables, jnp.array([1])).tolist()
      [[1.0, 1.0, 1.0, 1.0]]
    """
    line = "values={'embedding': {'movie': array}}, by layer path and table name"
    check_mapping("values", values, line)
    for layer_values in values.values():
        check_mapping("values of each layer", layer_values, line)
    layers = layer_tables(variables)
    check_names("Values", values, "layers", layers)
    if slots is None:
        for path, layer_values in values.items():
            derived = tables_with_derived_state(layers[path].plan)
            check_has_slots(derived & set(layer_values), _SET_WITH_SLOTS)
    state = ModelState(layers, dict(slots or {})).with_table_values(values)
    replaced = with_tables(variables, state.tables)
    return replaced if slots is None else (replaced, state.slots)


def layer_tables(variables: Mapping[str, Any]) -> dict[str, LayerTables]:
    """Finds the tables of each layer by its path, `"a/b"`. Raises without a layer."""
    layers: dict[str, LayerTables] = {}
    if isinstance(variables, Mapping):
        map_tables(layers.setdefault, variables)
    if not layers:
        collections = sorted(variables) if isinstance(variables, Mapping) else ()
        raise ValueError(
            f"variables must have the tables of a te.linen.TPUEmbedding in the "
            f"collection {TABLES!r}, got {type(variables).__name__} with collections "
            f"{collections}. Pass all variables that model.init returned."
        )
    return layers


def map_tables(
    function: Callable[[str, LayerTables], Any], variables: Mapping[str, Any]
) -> dict[str, Any]:
    """Replaces all tables in the variables with `function(path, tables)`."""

    def replace(keys: Any, leaf: Any) -> Any:
        if not isinstance(leaf, LayerTables):
            return leaf
        # The last key is the variable, "tables". The keys before it are the layer path.
        return function("/".join(str(key.key) for key in keys[:-1]), leaf)

    tables = jax.tree_util.tree_map_with_path(
        replace,
        variables.get(TABLES, {}),
        is_leaf=lambda leaf: isinstance(leaf, LayerTables),
    )
    return {**variables, TABLES: tables}


def with_tables(variables: Mapping[str, Any], tables: ModelTables) -> dict[str, Any]:
    return map_tables(lambda path, _: tables[path], variables)


def _state_of_tables(tables: LayerTables) -> dict[str, Any]:
    return {"stacks": serialization.to_state_dict(tables.stacks)}


def _with_state(tables: LayerTables, state: dict[str, Any]) -> LayerTables:
    stacks = serialization.from_state_dict(tables.stacks, state["stacks"])
    return dataclasses.replace(tables, stacks=stacks)


# Lets Flax save and restore tables; `functional/flax_states.py` does so for a stack.
serialization.register_serialization_state(LayerTables, _state_of_tables, _with_state)
