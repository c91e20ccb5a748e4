"""Reads tables that are variables of their own in orbax checkpoints.

Keras saves the state of a model as nested dicts. A table of keras-rs that is not on
SparseCores is `trainable_variables/.../NAME/embeddings`. The names of slot variables
begin with the path of their table, joined with `_`, such as
`optimizer_variables/adagrad/..._NAME_embeddings_accumulator`.

Other pytrees are read by the paths of their leaves.
"""

from collections.abc import Mapping
from typing import Final

from tpu_embedding.checkpoint.imports.arrays import tables_by_name
from tpu_embedding.checkpoint.imports.orbax import LeafPath
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    RuleSlots,
    SourceTable,
    TableSource,
)

_TABLE: Final = "embeddings"
_VARIABLES: Final = ("trainable_variables", "non_trainable_variables")
_OPTIMIZER: Final = "optimizer_variables"

_RULES: Final = (
    RuleSlots(rule="adagrad", names={"accumulators": "accumulator"}),
    RuleSlots(rule="adam", names={"momenta": "momentum", "velocities": "velocity"}),
    RuleSlots(rule="ftrl", names={"accumulators": "accumulator", "linears": "linear"}),
)


def tables_of_state(arrays: Mapping[LeafPath, RowArray], origin: str) -> TableSource:
    """Returns the tables of a Keras model's state, or of any other pytree.

    Args:
      arrays: by path.
      origin: format and path, for messages.
    """
    tables = {
        path: array
        for path, array in arrays.items()
        if len(path) > 2 and path[-1] == _TABLE and path[0] in _VARIABLES
    }
    if not tables:
        return tables_by_name({"/".join(p): a for p, a in arrays.items()}, origin)
    names = [path[-2] for path in tables]
    return TableSource(
        origin=origin,
        tables={
            "/".join(path[1:-1]) if names.count(path[-2]) > 1 else path[-2]: (
                SourceTable(values=array, slots=_slots(path, arrays))
            )
            for path, array in tables.items()
        },
        rules=_RULES,
    )


def _slots(table: LeafPath, arrays: Mapping[LeafPath, RowArray]) -> dict[str, RowArray]:
    prefix = "_".join(table[1:]) + "_"
    return {
        path[-1].removeprefix(prefix): array
        for path, array in arrays.items()
        if path[0] == _OPTIMIZER and path[-1].startswith(prefix)
    }
