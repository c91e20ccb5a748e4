"""Prints a plan: memory and placement of its tables."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tpu_embedding.hardware import GIBIBYTE
from tpu_embedding.plan import memory
from tpu_embedding.rows.packed_rows import LANE_BYTES

if TYPE_CHECKING:
    from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan


def describe(plan: "EmbeddingPlan") -> str:
    """Returns the text of `print(plan)`: tables of memory and placement."""
    return "\n".join(
        [
            memory.format_table(_memory_rows(plan), num_left_aligned=2),
            _summary(plan),
            *(note for stack in plan.stacks for note in _notes(stack, plan)),
            "",
            memory.format_table(_placement_rows(plan), num_left_aligned=4),
            "",
            memory.format_table(_backend_rows(plan), num_left_aligned=4),
        ]
    )


def summarize(plan: "EmbeddingPlan") -> str:
    """Returns one line on the tables, features and devices of a plan."""
    tables = [table for stack in plan.stacks for table in stack.tables]
    rows = count_of(sum(table.config.max_rows for table in tables), "row")
    parts = [
        f"{count_of(len(tables), 'table')} of {rows}",
        count_of(len(plan.stacks), "stack"),
        count_of(len(plan.features), "feature"),
        count_of(plan.mesh.size, "device"),
    ]
    return ", ".join(parts)


def count_of(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `"2 rows"`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _notes(stack: "StackPlan", plan: "EmbeddingPlan") -> Iterator[str]:
    """Yields what to know about the memory and the optimizer of a stack."""
    if stack.optimizer is not None and stack.optimizer.named:
        yield f"{stack.name}: trained by {stack.optimizer.named}"
    for table in stack.tables:
        if table.row_initializer is None:
            num_bytes = memory.whole_table_init_bytes(
                table.num_rows, stack.num_shards, stack.layout
            )
            yield (
                f"initial values of table {table.name!r} take at least "
                f"{memory.format_bytes(num_bytes)} more per device: its "
                "initializer needs the whole shape; see te.initializers"
            )
    largest = max(memory.array_sizes(stack.layout, stack.slots, plan.hardware))
    if largest > plan.hardware.max_array_bytes:
        yield (
            f"warning: the largest array of {stack.name} takes "
            f"{memory.format_bytes(largest)} per device, more than the "
            f"{memory.format_bytes(plan.hardware.max_array_bytes)} that "
            f"{plan.hardware.name} is said to take; more devices make it smaller"
        )
    yield from (f"{stack.name}: {note}" for note in stack.backend.notes(plan.hardware))
    yield from stack.vocabulary.stacks.notes(stack, plan.hardware)


def _placement_rows(plan: "EmbeddingPlan") -> list[tuple[str, ...]]:
    """Returns the cells of the table of placements, a row per stack and reason."""
    rows = [("stack", "rows over", "copies", "why")]
    for stack in plan.stacks:
        axes = ", ".join(stack.shard_axes) or "no axis"
        copies = f"{stack.num_replicas:,}"
        if stack.replica_axes:
            copies += f" over {', '.join(stack.replica_axes)}"
        reasons = dict.fromkeys(table.placement_reason for table in stack.tables)
        rows += [(stack.name, axes, copies, reason) for reason in reasons]
    return rows


def _backend_rows(plan: "EmbeddingPlan") -> list[tuple[str, ...]]:
    """Returns the cells of the table of backends, a row per stack."""
    rows = [("stack", "lookup by", "update by", "why")]
    for stack in plan.stacks:
        backend = stack.backend
        rows.append((stack.name, backend.lookups, backend.updates, backend.reason))
    return rows


def _memory_rows(plan: "EmbeddingPlan") -> list[tuple[str, ...]]:
    """Returns the cells of the table of memory, a row per table and per stack."""
    head = "stack,table,rows,dim,dtype,first row,rows/shard,packing,bytes/device"
    rows: list[tuple[str, ...]] = [tuple(head.split(","))]
    for stack in plan.stacks:
        layout = stack.layout
        facts = (str(stack.dim), layout.dtype_name)
        for table in stack.tables:
            num_rows, offset = f"{table.config.max_rows:,}", f"{table.row_offset:,}"
            rows.append((stack.name, table.name, num_rows, *facts, offset, "", "", ""))
        elements = layout.rows_per_lane * layout.lanes
        packing = f"{layout.rows_per_line} x {layout.row_lanes} of {elements}"
        if layout.lines_per_row > 1:
            packing = f"1 x {layout.row_lanes} of {layout.lines_per_row} x {elements}"
        table_bytes = memory.rows_bytes(layout, plan.hardware, LANE_BYTES)
        sizes = (
            f"{memory.format_bytes(table_bytes)} + "
            f"{memory.format_bytes(plan.slot_bytes_of(stack))} slots"
        )
        of_stack = ("", f"{stack.rows_per_shard:,}", packing, sizes)
        whole = (stack.name, "(whole stack)", f"{stack.num_rows:,}")
        rows.append((*whole, *facts, *of_stack))
    return rows


def _summary(plan: "EmbeddingPlan") -> str:
    total = plan.table_bytes_per_device + plan.slot_bytes_per_device
    summary = (
        f"{count_of(plan.num_shards, 'device')}, {plan.hardware.name}; per device: "
        f"tables {memory.format_bytes(plan.table_bytes_per_device)}, slots "
        f"{memory.format_bytes(plan.slot_bytes_per_device)}"
    )
    if plan.hardware.hbm_capacity_bytes is not None:
        hbm = plan.hardware.hbm_capacity_bytes / plan.hardware.devices_per_chip
        summary += f", {100 * total / hbm:.1f} % of {hbm / GIBIBYTE:.0f} GiB HBM"
    return summary
