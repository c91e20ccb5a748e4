"""Returns the shardings of tables and optimizer states, as partition specs."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.update.lazy_update import is_slot


def table_specs(
    stack_names: Iterable[str], plan: EmbeddingPlan
) -> dict[str, PartitionSpec]:
    """Returns the partition of the rows of some stacks, by name."""
    specs = {stack.name: stack.rows_spec for stack in plan.stacks}
    return {name: specs[name] for name in stack_names}


def slot_specs(states: dict[str, Any], plan: EmbeddingPlan) -> dict[str, Any]:
    """Returns the partition of each part of the optimizer states of some stacks.

    Slot variables lie like the rows of their table; other values are replicated.
    """

    def specs_of(state: Any, spec: PartitionSpec) -> Any:
        return jax.tree.map(
            lambda leaf: spec if is_slot(leaf) else PartitionSpec(),
            state,
            is_leaf=is_slot,
        )

    return {
        name: specs_of(states[name], spec)
        for name, spec in table_specs(states, plan).items()
    }
