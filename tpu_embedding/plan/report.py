"""Describes a plan as text, for `print(plan)` and for logs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tpu_embedding.hardware import GIBIBYTE
from tpu_embedding.plan.memory import format_bytes, format_table
from tpu_embedding.rows.packed_rows import LANE_BYTES, round_up

if TYPE_CHECKING:
    from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan


def describe(plan: "EmbeddingPlan") -> str:
    columns = "stack,table,rows,dim,dtype,first row,rows/shard,packing,bytes/device"
    memory: list[tuple[str, ...]] = [tuple(columns.split(","))]
    placements: list[tuple[str, ...]] = [("stack", "rows over", "copies", "why")]
    backends: list[tuple[str, ...]] = [("stack", "lookup by", "update by", "why")]
    for stack in plan.stacks:
        facts = (str(stack.dim), stack.tables[0].config.dtype_name)
        for table in stack.tables:
            num_rows, offset = f"{table.config.max_rows:,}", f"{table.row_offset:,}"
            names = stack.name, table.name
            memory.append((*names, num_rows, *facts, offset, "", "", ""))
        layout = stack.layout
        line = f"{layout.rows_per_lane * layout.lanes_per_line}"
        if layout.lines_per_row > 1:
            line = f"{layout.lines_per_row} x {line}"
        packing = f"{layout.rows_per_line} x {layout.lanes_per_row} of {line}"
        table_bytes, *slot_bytes = stack.array_bytes
        sizes = f"{format_bytes(table_bytes)} + {format_bytes(sum(slot_bytes))} slots"
        whole = (stack.name, "(whole stack)", f"{stack.num_rows:,}", *facts, "")
        memory.append((*whole, f"{stack.rows_per_shard:,}", packing, sizes))

        axes = ", ".join(stack.shard_axes) or "no axis"
        copies = f"{stack.num_replicas:,}"
        if stack.replica_axes:
            copies += f" over {', '.join(stack.replica_axes)}"
        reasons = dict.fromkeys(table.placement_reason for table in stack.tables)
        placements += [(stack.name, axes, copies, reason) for reason in reasons]

        backend = stack.backend
        backends.append((stack.name, backend.lookups, backend.updates, backend.reason))
    return "\n".join(
        [
            format_table(memory, num_left_aligned=2),
            summarize_memory(plan),
            *(note for stack in plan.stacks for note in _notes(stack)),
            "",
            format_table(placements, num_left_aligned=4),
            "",
            format_table(backends, num_left_aligned=4),
        ]
    )


def _notes(stack: "StackPlan") -> Iterator[str]:
    for table in stack.tables:
        if table.row_initializer is None:
            # A device holds its share of the rows twice, in whole lines: before rows
            # are sent to their owners, and after.
            lanes = round_up(stack.dim, stack.layout.tile_lanes or 1)
            num_rows = -(-table.num_rows // stack.num_shards)
            num_bytes = 2 * num_rows * LANE_BYTES * lanes
            yield (
                f"initial values of table {table.name!r} take at least "
                f"{format_bytes(num_bytes)} more per device: its "
                "initializer needs the whole shape; see te.initializers"
            )
    largest = max(stack.array_bytes)
    if largest > stack.hardware.max_array_bytes:
        yield (
            f"warning: the largest array of {stack.name} takes "
            f"{format_bytes(largest)} per device, more than the "
            f"{format_bytes(stack.hardware.max_array_bytes)} that "
            f"{stack.hardware.name} is said to support; use more devices"
        )
    yield from (f"{stack.name}: {note}" for note in stack.notes)


def summarize(plan: "EmbeddingPlan") -> str:
    tables = [table for stack in plan.stacks for table in stack.tables]
    rows = count_of(sum(table.config.max_rows for table in tables), "row")
    parts = [
        f"{count_of(len(tables), 'table')} of {rows}",
        count_of(len(plan.stacks), "stack"),
        count_of(len(plan.features), "feature"),
        count_of(plan.mesh.size, "device"),
    ]
    return ", ".join(parts)


def summarize_memory(plan: "EmbeddingPlan") -> str:
    total = plan.table_bytes_per_device + plan.slot_bytes_per_device
    summary = (
        f"{count_of(plan.num_shards, 'device')}, {plan.hardware.name}; per device: "
        f"tables {format_bytes(plan.table_bytes_per_device)}, slots "
        f"{format_bytes(plan.slot_bytes_per_device)}"
    )
    hbm = plan.hardware.device_memory_bytes
    if hbm is not None:
        summary += f", {100 * total / hbm:.1f} % of {hbm / GIBIBYTE:.0f} GiB HBM"
    return summary


def count_of(number: int, noun: str) -> str:
    """Formats a number with its noun, such as `"2 rows"`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
