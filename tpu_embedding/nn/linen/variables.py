"""The variables of a Linen model: its tables by layer, read and replaced."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import jax
import numpy as np

from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.table_values import unstack_tables, with_table_values

TABLES: Final = "embedding_tables"
"""The collection of all tables; each layer has one `LayerTables` in it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerTables:
    """The tables of one layer, with the plan that places them.

    Attributes:
      stacks: stack name to packed rows.
      plan: of the layer.
    """

    stacks: dict[str, PackedRows]
    plan: EmbeddingPlan = dataclasses.field(metadata={"static": True})


def embedding_tables(variables: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Returns the values of all tables.

    Args:
      variables: from `model.init`, or `state.variables`.

    Returns:
      Layer path to table name to NumPy `[vocabulary_size, dim]`.
    """
    return {
        path: unstack_tables(tables.stacks, tables.plan)
        for path, tables in layer_tables(variables).items()
    }


def with_embedding_tables(
    variables: Mapping[str, Any], values: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Returns the variables with the values of some tables replaced.

    Args:
      variables: from `model.init`, or `state.variables`.
      values: layer path to table name to array `[vocabulary_size, dim]`.

    Raises:
      ValueError: if a layer or table is unknown, or an array has the wrong shape.
    """
    check_names("Values", values, "layers", layer_tables(variables))

    def replace(path: str, tables: LayerTables) -> LayerTables:
        if path not in values:
            return tables
        stacks = with_table_values(tables.stacks, values[path], tables.plan)
        return dataclasses.replace(tables, stacks=stacks)

    return map_tables(replace, variables)


def layer_tables(variables: Mapping[str, Any]) -> dict[str, LayerTables]:
    """Returns the tables of each layer by its path in the model, `"a/b"`.

    Args:
      variables: from `model.init`, or `state.variables`.

    Raises:
      ValueError: if there are none.
    """
    found: dict[str, LayerTables] = {}
    if isinstance(variables, Mapping):
        map_tables(found.setdefault, variables)
    if not found:
        collections = sorted(variables) if isinstance(variables, Mapping) else ()
        raise ValueError(
            f"variables must have the tables of a te.linen.TPUEmbedding in the "
            f"collection {TABLES!r}, got {type(variables).__name__} with collections "
            f"{collections}. Pass all variables that model.init returned."
        )
    return found


def map_tables(
    function: Callable[[str, LayerTables], Any], variables: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the variables with `function(path, tables)` in place of tables."""

    def replace(keys: Any, leaf: Any) -> Any:
        if not isinstance(leaf, LayerTables):
            return leaf
        return function("/".join(str(key.key) for key in keys[:-1]), leaf)

    tables = jax.tree_util.tree_map_with_path(
        replace,
        variables.get(TABLES, {}),
        is_leaf=lambda leaf: isinstance(leaf, LayerTables),
    )
    return {**variables, TABLES: tables}


def check_names(
    owner: str, got: Iterable[str], kind: str, known: Iterable[str]
) -> None:
    """Raises ValueError if a name is not one of the model's."""
    unknown = sorted(set(got) - set(known))
    if unknown:
        raise ValueError(
            f"{owner} must name {kind} of the model, {sorted(known)}, got unknown "
            f"{kind} {unknown}."
        )
