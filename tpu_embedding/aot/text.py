"""Compile reports as text: what the command `tpu-embedding compile` prints."""

from collections.abc import Sequence

from tpu_embedding.aot.report import (
    CompileReport,
    Cost,
    NamedOperation,
    OperationCost,
    ProgramTraffic,
)
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.layout.memory import format_bytes, format_table

_COST_HEAD = ("HBM", "HBM time", "links", "link time")


def format_report(report: CompileReport) -> str:
    """Returns a report as text, several lines.

    Args:
      report: from `compile_report`.
    """
    slices = f"{report.num_slices} slices of " if report.num_slices > 1 else ""
    options = " ".join(f"{n}={value}" for n, value in report.hardware.compiler_options)
    count = report.num_devices
    head = [
        f"{report.name} on {slices}{report.topology}: {count} "
        f"{'device' if count == 1 else 'devices'}; "
        f"traced in {report.trace_seconds:.1f} s, compiled in "
        f"{report.compile_seconds:.1f} s by "
        + ", ".join(f"{name} {version}" for name, version in report.versions),
        f"compiler options: {options or 'none'}",
    ]
    parts = ["\n".join(head), report.plan, _format_memory(report)]
    if report.traffic is not None:
        parts += [_format_traffic(report, report.traffic)]
        parts += [_format_operations(report.traffic)]
    return "\n\n".join(parts)


def format_comparison(reports: Sequence[CompileReport]) -> str:
    """Returns a table with a row for each report.

    Args:
      reports: of the same step for several topologies.
    """
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
            cost = _cost_cells(traffic.total)
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
    return "per device and step; times are modelled\n" + format_table(rows)


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
        for name, size in (
            ("tables", memory.tables),
            ("slots of the tables", memory.slots),
            ("dense parameters, their optimizer", memory.dense),
            ("inputs", memory.inputs),
            ("padding of the last two", memory.padding),
            ("results", memory.outputs),
            ("temporaries", memory.temporaries),
            ("program code", memory.code),
        )
        if size is not None
    ]
    return f"{verdict}\n{format_table(rows)}"


def _format_traffic(report: CompileReport, traffic: ProgramTraffic) -> str:
    rows: list[tuple[str, ...]] = [("class of operation", "operations", *_COST_HEAD)]
    rows += [_operation_cells(row) for row in traffic.classes]
    rows.append(("all of it", "", *_cost_cells(traffic.total)))
    rows += [_operation_cells(row, "  of it ") for row in traffic.parts]
    rows.append(("least for the embedding part", "", *_cost_cells(report.floor)))
    least, found = report.floor, traffic.embedding
    ratios = (
        _ratio(found.hbm_bytes, least.hbm_bytes),
        _ratio(found.ici_bytes + found.dcn_bytes, least.ici_bytes),
    )
    rows.append(("embedding part / least", "", ratios[0], "", ratios[1], ""))
    lines = [
        f"modelled traffic per device and step, {_bandwidths(report.hardware)}",
        format_table(rows),
    ]
    if traffic.loops:
        loops: list[tuple[str, ...]] = [("loop", *_COST_HEAD)]
        loops += [
            (_origin(loop.source, loop.op_name), *_cost_cells(loop.per_turn))
            for loop in traffic.loops
        ]
        lines += [
            "",
            "not in it: loops that turn as often as data ask for (further rounds under "
            "skew, ...); per turn",
            format_table(loops),
        ]
    return "\n".join(lines)


def _bandwidths(hardware: HardwareInfo) -> str:
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
    blocks = []
    if traffic.sparse_core:
        blocks.append(_format_named("on SparseCore:", traffic.sparse_core))
    else:
        blocks.append("on SparseCore: nothing")
    if traffic.table_copies:
        blocks.append(
            _format_named("TABLES OR SLOTS COPIED WITHIN HBM:", traffic.table_copies)
        )
    else:
        blocks.append("tables or slots copied within HBM: none")
    if traffic.table_moves:
        blocks.append(
            _format_named(
                "tables or slots, being small, moved to VMEM or back:",
                traffic.table_moves,
            )
        )
    return "\n\n".join(blocks)


def _format_named(title: str, operations: Sequence[NamedOperation]) -> str:
    """Returns the operations as a table; equal ones take one row."""
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
    return f"{title}\n{format_table(rows, num_left_aligned=4)}"


def _origin(source: str, op_name: str) -> str:
    """Returns where an operation comes from; its name without the step's own."""
    _, _, name = op_name.partition("/")
    return " ".join(part for part in (source, name) if part) or "unknown"


def _operation_cells(row: OperationCost, prefix: str = "") -> tuple[str, ...]:
    return (prefix + row.name, str(row.num_operations), *_cost_cells(row.cost))


def _cost_cells(cost: Cost) -> tuple[str, ...]:
    """Returns HBM bytes and time, and those of the links; both networks together."""
    links = format_bytes(cost.ici_bytes + cost.dcn_bytes)
    seconds = cost.ici_seconds
    if cost.dcn_bytes:
        both = (cost.ici_seconds, cost.dcn_seconds)
        seconds = None if None in both else max(s for s in both if s is not None)
    return (
        format_bytes(cost.hbm_bytes),
        _time(cost.hbm_seconds),
        links,
        _time(seconds),
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"


def _ratio(value: float, least: float) -> str:
    return f"{value / least:.1f} x" if least else "-"


def _share(size: int, capacity: int | None) -> str:
    return "" if capacity is None else f"{100 * size / capacity:.1f} %"
