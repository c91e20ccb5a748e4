"""Describes a plan for the records of a run."""

from typing import Any

from tpu_embedding.optimizers.rule_description import describe_rule
from tpu_embedding.plan.plan import EmbeddingPlan


def describe_plan(plan: EmbeddingPlan) -> dict[str, Any]:
    """Returns the stacks of a plan, their layouts and optimizers, as JSON values."""
    return {
        "num_shards": plan.num_shards,
        "stacks": {
            stack.name: {
                "dim": stack.dim,
                "dtype": stack.layout.dtype_name,
                "rows_per_shard": stack.rows_per_shard,
                "rows_per_line": stack.layout.rows_per_line,
                "lanes": stack.layout.lanes,
                "num_lines": stack.layout.num_lines,
                "optimizer": stack.optimizer
                and describe_rule(stack.optimizer.transformation),
                "slots": [
                    {"row_shape": list(slot.shape), "dtype": str(slot.dtype)}
                    for slot in stack.slots
                ],
                "tables": {
                    table.name: {
                        "vocabulary_size": table.config.vocabulary_size,
                        "row_offset": table.row_offset,
                    }
                    for table in stack.tables
                },
            }
            for stack in plan.stacks
        },
    }
