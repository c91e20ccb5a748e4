"""Compile reports as text: what the command `tpu-embedding compile` prints.

`html.py` shows the same rows and lines, beside plots.
"""

from collections.abc import Sequence
from typing import Final

from tpu_embedding.aot.bandwidth import Cost
from tpu_embedding.aot.report import (
    CompileReport,
    Memory,
    NamedOperation,
    ProgramTraffic,
)
from tpu_embedding.aot.timeline import Timeline
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan.memory import format_bytes, format_table

LOOPS_NOTE: Final = (
    "loops that turn as often as data ask for (an eighth of the ids, where they "
    "repeat; a further round, under skew; ...); per turn"
)
_COST_HEAD: Final = ("HBM", "HBM time", "links", "link time")


def format_report(report: CompileReport) -> str:
    """Returns a report as text, several lines.

    Args:
      report: from `compile_report`.
    """
    head = [
        f"{title_of(report)}; traced in {report.trace_seconds:.1f} s, compiled in "
        f"{report.compile_seconds:.1f} s by {versions_of(report)}",
        f"compiler options: {options_of(report)}",
    ]
    parts = ["\n".join(head), report.plan, _format_memory(report)]
    if report.traffic is not None:
        parts += [_format_traffic(report, report.traffic)]
        parts += [_format_operations(report.traffic)]
    if report.timeline is not None:
        parts += [format_timeline(report.timeline)]
    return "\n\n".join(parts)


def title_of(report: CompileReport) -> str:
    """Returns what was compiled, and for which devices."""
    slices = f"{report.num_slices} slices of " if report.num_slices > 1 else ""
    count = report.num_devices
    devices = "device" if count == 1 else "devices"
    return f"{report.name} on {slices}{report.topology}: {count} {devices}"


def versions_of(report: CompileReport) -> str:
    """Returns what compiled the step."""
    return ", ".join(f"{name} {version}" for name, version in report.versions)


def options_of(report: CompileReport) -> str:
    """Returns the compiler options of the step."""
    options = report.hardware.compiler_options
    return " ".join(f"{name}={value}" for name, value in options) or "none"


def format_comparison(reports: Sequence[CompileReport]) -> str:
    """Returns a table with a row for each report.

    Args:
      reports: of the same step for several topologies.
    """
    rows = comparison_rows(reports)
    return "per device and step; times are modelled\n" + format_table(rows)


def comparison_rows(reports: Sequence[CompileReport]) -> list[tuple[str, ...]]:
    """Returns the cells of a table with a row for each report, under a head."""
    rows: list[tuple[str, ...]] = [
        (
            "topology",
            "devices",
            "fits",
            "memory",
            "of HBM",
            *_COST_HEAD,
            "embedding HBM / least",
            "compiled",
        )
    ]
    for report in reports:
        memory, traffic = report.memory, report.traffic
        slices = f"{report.num_slices} x " if report.num_slices > 1 else ""
        ratio, cost = "-", ("-",) * len(_COST_HEAD)
        if traffic is not None:
            ratio = _ratio(traffic.embedding.hbm_bytes, report.floor.hbm_bytes)
            cost = cost_cells(traffic.total)
        rows.append(
            (
                slices + report.topology,
                str(report.num_devices),
                "yes" if memory.fits else "NO",
                format_bytes(memory.required),
                _share(memory.required, memory.capacity),
                *cost,
                ratio,
                f"{report.compile_seconds:.1f} s",
            )
        )
    return rows


def memory_rows(memory: Memory) -> list[tuple[str, int]]:
    """Returns what takes a device's memory, with the bytes of each, where known."""
    rows = (
        ("tables", memory.tables),
        ("slots of the tables", memory.slots),
        ("dense parameters, their optimizer", memory.dense),
        ("inputs", memory.inputs),
        ("padding of the last two", memory.padding),
        ("results", memory.outputs),
        ("temporaries", memory.temporaries),
        ("program code", memory.code),
    )
    return [(name, size) for name, size in rows if size is not None]


def _format_memory(report: CompileReport) -> str:
    memory = report.memory
    verdict = "fits"
    if memory.available is not None:
        difference = format_bytes(abs(memory.available - memory.required))
        verdict = (
            f"fits: needs {format_bytes(memory.required)}, leaves {difference} of"
            if memory.fits
            else f"DOES NOT FIT: needs {format_bytes(memory.required)}, {difference} "
            "more than"
        )
        verdict += f" {format_bytes(memory.available)} HBM"
    if report.refusal:
        verdict += f"\n{report.refusal}"
    rows = [("memory per device", "", "of HBM")] + [
        (name, format_bytes(size), _share(size, memory.capacity))
        for name, size in memory_rows(memory)
    ]
    return f"{verdict}\n{format_table(rows)}"


def traffic_rows(
    report: CompileReport, traffic: ProgramTraffic
) -> list[tuple[str, str, Cost]]:
    """Returns what moves, how many operations move it, and the cost."""
    return [
        *((row.name, str(row.num_operations), row.cost) for row in traffic.classes),
        ("all of it", "", traffic.total),
        *(
            (f"  of it {row.name}", str(row.num_operations), row.cost)
            for row in traffic.parts
        ),
        ("least for the embedding part", "", report.floor),
    ]


def _format_traffic(report: CompileReport, traffic: ProgramTraffic) -> str:
    rows: list[tuple[str, ...]] = [("class of operation", "operations", *_COST_HEAD)]
    rows += [
        (name, count, *cost_cells(cost))
        for name, count, cost in traffic_rows(report, traffic)
    ]
    least, found = report.floor, traffic.embedding
    ratios = (
        _ratio(found.hbm_bytes, least.hbm_bytes),
        _ratio(found.ici_bytes + found.dcn_bytes, least.ici_bytes),
    )
    rows.append(("embedding part / least", "", ratios[0], "", ratios[1], ""))
    lines = [
        f"modelled traffic per device and step, {bandwidths_of(report.hardware)}",
        format_table(rows),
    ]
    if traffic.loops:
        lines += [
            "",
            f"not in it: {LOOPS_NOTE}",
            format_table(loop_rows(traffic)),
        ]
    return "\n".join(lines)


def loop_rows(traffic: ProgramTraffic) -> list[tuple[str, ...]]:
    """Returns the cells of a table of the loops in no total, under a head."""
    rows: list[tuple[str, ...]] = [("loop", *_COST_HEAD)]
    rows += [
        (_origin(loop.source, loop.op_name), *cost_cells(loop.per_turn))
        for loop in traffic.loops
    ]
    return rows


def bandwidths_of(hardware: HardwareInfo) -> str:
    """Returns what bytes are divided by."""
    known = [
        f"{name} {1e-9 * value / hardware.devices_per_chip:,.0f} GB/s"
        for name, value in (
            ("HBM", hardware.hbm_bytes_per_second),
            ("links of the slice", hardware.ici_bytes_per_second),
            ("to other slices", hardware.dcn_bytes_per_second),
        )
        if value is not None
    ]
    return f"at {', '.join(known)}" if known else "bandwidths unknown"


def _format_operations(traffic: ProgramTraffic) -> str:
    return "\n\n".join(
        f"{title}:\n{format_table(rows, num_left_aligned=4)}" if rows else title
        for title, rows in operation_blocks(traffic)
    )


def operation_blocks(
    traffic: ProgramTraffic,
) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Returns what runs on SparseCore, and which tables are copied.

    Each is a title with the cells of a table under a head, or with none.
    """
    blocks = []
    if traffic.sparse_core:
        blocks.append(("on SparseCore", _named_rows(traffic.sparse_core)))
    else:
        blocks.append(("on SparseCore: nothing", []))
    if traffic.table_copies:
        title = "TABLES OR SLOTS COPIED WITHIN HBM"
        blocks.append((title, _named_rows(traffic.table_copies)))
    else:
        blocks.append(("tables or slots copied within HBM: none", []))
    if traffic.table_moves:
        title = "tables or slots, being small, moved to VMEM or back"
        blocks.append((title, _named_rows(traffic.table_moves)))
    return blocks


def format_timeline(timeline: Timeline) -> str:
    """Returns how long a step is, and how much of it SparseCore works; one line."""
    title, show = "modelled timeline", format_seconds
    if timeline.axis == "order of the schedule":
        title = "timeline by the order of the schedule, since bandwidths are unknown"
        show = lambda places: f"{places:.0f} places"  # noqa: E731
    return (
        f"{title}: a step of {show(timeline.length)}; SparseCore works "
        f"{show(timeline.sparse_core)}, {show(timeline.overlap)} of it beside the "
        "TensorCore"
    )


def _named_rows(operations: Sequence[NamedOperation]) -> list[tuple[str, ...]]:
    """Returns the cells of a table, under a head; equal operations take one row."""
    counts: dict[tuple[str, ...], int] = {}
    for operation in operations:
        dims = ",".join(map(str, operation.dims))
        row = (
            operation.operation_class,
            f"[{dims}]",
            _origin(operation.source, operation.op_name),
            operation.runs,
            format_bytes(operation.hbm_bytes),
        )
        counts[row] = counts.get(row, 0) + 1
    rows: list[tuple[str, ...]] = [
        ("", "result", "from", "runs in", "HBM per turn", "times")
    ]
    rows += [(*row, str(count)) for row, count in counts.items()]
    return rows


def _origin(source: str, op_name: str) -> str:
    """Returns where an operation comes from; its name without the step's own."""
    _, _, name = op_name.partition("/")
    return " ".join(part for part in (source, name) if part) or "unknown"


def cost_cells(cost: Cost) -> tuple[str, str, str, str]:
    """Returns HBM bytes and time, and those of the links; both networks together."""
    links = format_bytes(cost.ici_bytes + cost.dcn_bytes)
    seconds = cost.ici_seconds
    if cost.dcn_bytes:
        both = (cost.ici_seconds, cost.dcn_seconds)
        seconds = None if None in both else max(s for s in both if s is not None)
    return (
        format_bytes(cost.hbm_bytes),
        format_seconds(cost.hbm_seconds),
        links,
        format_seconds(seconds),
    )


def format_seconds(seconds: float | None) -> str:
    """Returns a time with its unit."""
    if seconds is None:
        return "unknown"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"


def _ratio(value: float, least: float) -> str:
    return f"{value / least:.1f} x" if least else "-"


def _share(size: int, capacity: int | None) -> str:
    return "" if capacity is None else f"{100 * size / capacity:.1f} %"
