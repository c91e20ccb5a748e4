"""Lets `flax.serialization` save and restore the tables of Linen layers.

`functional/flax_states.py` does so for each stack of them.
"""

import dataclasses
from typing import Any

from flax import serialization

from tpu_embedding.nn.linen.variables import LayerTables


def _state_of_tables(tables: LayerTables) -> dict[str, Any]:
    return {"stacks": serialization.to_state_dict(tables.stacks)}


def _tables_of_state(tables: LayerTables, state: dict[str, Any]) -> LayerTables:
    stacks = serialization.from_state_dict(tables.stacks, state["stacks"])
    return dataclasses.replace(tables, stacks=stacks)


serialization.register_serialization_state(
    LayerTables, _state_of_tables, _tables_of_state
)
