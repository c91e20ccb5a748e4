"""Lets `flax.serialization` save and restore tables and their slot variables.

Flax can only serialize containers that it knows.
"""

import dataclasses
from typing import Any

import jax
from flax import serialization

from tpu_embedding.rows.arithmetic_guard import ArithmeticGuard
from tpu_embedding.rows.packed_rows import PackedRows


def _state_of_rows(rows: PackedRows) -> dict[str, Any]:
    # The key names the layout, so that a model with another layout rejects the state.
    return {rows.layout.leaf_name: serialization.to_state_dict(rows.lines)}


def _rows_of_state(rows: PackedRows, state: dict[str, Any]) -> PackedRows:
    """Places the saved rows on the devices that hold `rows`."""
    name = rows.layout.leaf_name
    if set(state) != {name}:
        raise ValueError(
            "The state must have been saved under the plan of the model, which stores "
            f"{name!r} here, got {sorted(state)}. To move tables between plans, use "
            "te.functional.unstack_tables and with_table_values, or "
            "te.linen.embedding_tables and with_embedding_tables."
        )
    lines = serialization.from_state_dict(rows.lines, state[name])
    saved = dataclasses.replace(rows, lines=lines)
    return jax.tree.map(
        lambda old, new: (
            jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else new
        ),
        rows,
        saved,
    )


serialization.register_serialization_state(PackedRows, _state_of_rows, _rows_of_state)
serialization.register_serialization_state(
    ArithmeticGuard, lambda guard: {}, lambda guard, state: guard
)
