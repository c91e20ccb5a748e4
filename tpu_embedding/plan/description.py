"""Prints a plan: memory and placement of its tables."""

from typing import TYPE_CHECKING

from tpu_embedding.hardware import GIBIBYTE
from tpu_embedding.plan import memory
from tpu_embedding.plan.dynamic_rows import (
    directory_bytes,
    dynamic_tables,
    share_without_place,
)
from tpu_embedding.plan.replicas import describe_reduction
from tpu_embedding.rows.packed_rows import LANE_BYTES

if TYPE_CHECKING:
    from tpu_embedding.plan.plan import EmbeddingPlan
    from tpu_embedding.plan.stack_plan import StackPlan


def describe(plan: "EmbeddingPlan") -> str:
    """Returns the text of `print(plan)`: tables of memory and placement."""
    return "\n".join(
        [
            memory.format_table(_memory_rows(plan), num_left_aligned=2),
            _summary(plan),
            *_whole_initial_values(plan),
            *_array_limit(plan),
            *_dynamic_tables(plan),
            "",
            memory.format_table(_placement_rows(plan), num_left_aligned=5),
        ]
    )


def _whole_initial_values(plan: "EmbeddingPlan") -> list[str]:
    """Returns a line for each table whose initial values are computed all at once."""
    lines = []
    for stack in plan.stacks:
        for table in stack.tables:
            if table.row_initializer is None:
                num_bytes = memory.whole_table_init_bytes(
                    table.num_rows, stack.num_shards, stack.layout
                )
                lines.append(
                    f"initial values of table {table.name!r} take at least "
                    f"{memory.format_bytes(num_bytes)} more per device: its "
                    "initializer needs the whole shape; see te.initializers"
                )
    return lines


def _array_limit(plan: "EmbeddingPlan") -> list[str]:
    """Returns a warning for each stack with an array above the hardware's limit."""
    limit = plan.hardware.max_offloaded_bytes
    if limit is None:
        return []
    lines = []
    for stack in plan.stacks:
        size = max(memory.array_sizes(stack.layout, stack.slots, plan.hardware))
        if size > limit:
            lines.append(
                f"warning: the largest array of {stack.name} takes "
                f"{memory.format_bytes(size)} per device, more than the "
                f"{memory.format_bytes(limit)} that a SparseCore is said to take; "
                "more devices make it smaller"
            )
    return lines


def _dynamic_tables(plan: "EmbeddingPlan") -> list[str]:
    """Returns lines about the memory of ids, and about full buckets."""
    lines = []
    for stack in plan.stacks:
        if not stack.is_dynamic:
            continue
        num_places = sum(t.dynamic.num_places for t in dynamic_tables(stack))
        losses = ", ".join(
            f"{share_without_place(load):.2%} at {load:.0%} load"
            for load in (0.75, 0.9)
        )
        num_bytes = directory_bytes(stack, plan.hardware)
        lines.append(
            f"{stack.name}: {num_places:,} places for ids, which take "
            f"{memory.format_bytes(num_bytes)} per device; without "
            f"eviction, so many ids find none: {losses}"
        )
    return lines


def _placement_rows(plan: "EmbeddingPlan") -> list[tuple[str, ...]]:
    """Returns the cells of the table of placements, a row per stack and reason."""
    rows = [("stack", "rows over", "copies", "why", "how copies add gradients")]
    for stack in plan.stacks:
        axes = ", ".join(stack.shard_axes) or "no axis"
        copies = f"{stack.num_replicas:,}"
        if stack.replica_axes:
            copies += f" over {', '.join(stack.replica_axes)}"
        reduction = describe_reduction(stack)
        reasons = dict.fromkeys(table.placement_reason for table in stack.tables)
        rows += [(stack.name, axes, copies, reason, reduction) for reason in reasons]
    return rows


def _memory_rows(plan: "EmbeddingPlan") -> list[tuple[str, ...]]:
    head = (
        *("stack", "table", "rows", "dim", "dtype", "first row"),
        *("rows/shard", "packing"),
    )
    rows: list[tuple[str, ...]] = [(*head, "bytes/device")]
    for stack in plan.stacks:
        for table in stack.tables:
            num_rows = f"{table.config.max_rows:,}"
            facts = (str(stack.dim), table.config.dtype_name, f"{table.row_offset:,}")
            rows.append((stack.name, table.name, num_rows, *facts, "", "", ""))
        rows.append((stack.name, "(whole stack)", *_stack_cells(stack, plan)))
    return rows


def _stack_cells(stack: "StackPlan", plan: "EmbeddingPlan") -> tuple[str, ...]:
    layout = stack.layout
    table_bytes = memory.rows_bytes(layout, plan.hardware, LANE_BYTES)
    size = memory.format_bytes(table_bytes)
    size += f" + {memory.format_bytes(plan.slot_bytes_of(stack))} slots"
    elements = layout.rows_per_lane * layout.lanes
    packing = f"{layout.rows_per_line} x {layout.row_lanes} of {elements}"
    rows_per_shard = f"{stack.rows_per_shard:,}"
    dtype = layout.dtype_name
    facts = (str(stack.dim), dtype, "", rows_per_shard, packing)
    return f"{stack.num_rows:,}", *facts, size


def _summary(plan: "EmbeddingPlan") -> str:
    total = plan.table_bytes_per_device + plan.slot_bytes_per_device
    summary = (
        f"{plan.num_shards} devices, {plan.hardware.name}; per device: tables "
        f"{memory.format_bytes(plan.table_bytes_per_device)}, slots "
        f"{memory.format_bytes(plan.slot_bytes_per_device)}"
    )
    if plan.hardware.hbm_capacity_bytes is not None:
        hbm = plan.hardware.hbm_capacity_bytes / plan.hardware.devices_per_chip
        summary += f", {100 * total / hbm:.1f} % of {hbm / GIBIBYTE:.0f} GiB HBM"
    return summary
