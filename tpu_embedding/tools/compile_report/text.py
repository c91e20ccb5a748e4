"""Text form of compile reports, which `tpu-embedding compile` prints."""

import collections
from collections.abc import Sequence
from typing import Final

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan.memory import format_bytes, format_table
from tpu_embedding.tools.compile_report.bandwidth import Cost
from tpu_embedding.tools.compile_report.device_memory import Memory
from tpu_embedding.tools.compile_report.step_report import (
    CompileReport,
    NamedOperation,
    ProgramTraffic,
)

_LOOPS_NOTE: Final = (
    "one iteration of each data-dependent loop, such as one later round under skew, or "
    "the gradients of repeated ids in one eighth of the places"
)
_COST_HEAD: Final = ("HBM", "HBM time", "links", "link time")


def format_report(report: CompileReport) -> str:
    """Returns a report as text of several lines.

    Args:
      report: report from `compile_report`.
    """
    sections = [_format_head(report), report.plan]
    if report.others:
        sections += [_format_programs(report)]
    sections += [_format_memory(report)]
    if report.traffic is not None:
        sections += [_format_traffic(report, report.traffic)]
        sections += [_format_operations(report.traffic)]
    return "\n\n".join(sections)


def _format_head(report: CompileReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions)
    options = report.hardware.compiler_options
    return (
        f"{report.title}; traced in {report.trace_seconds:.1f} s, compiled in "
        f"{report.compile_seconds:.1f} s by {versions}\n"
        "compiler options: "
        + (" ".join(f"{name}={value}" for name, value in options) or "none")
    )


def format_comparison(reports: Sequence[CompileReport]) -> str:
    """Returns a text table with a row for each report.

    Args:
      reports: reports of one step for several topologies.
    """
    rows: list[tuple[str, ...]] = [
        (
            "topology",
            "devices",
            "fits",
            "largest program",
            "memory",
            "of HBM",
            *_COST_HEAD,
            "embedding HBM / minimum",
            "compiled",
        )
    ]
    for report in reports:
        traffic = report.traffic
        largest = max(report.programs, key=lambda program: program.memory.required)
        memory = largest.memory
        slices = f"{report.num_slices} x " if report.num_slices > 1 else ""
        ratio, cost = "-", ("-",) * len(_COST_HEAD)
        if traffic is not None:
            ratio = _ratio(traffic.embedding.hbm_bytes, report.floor.hbm_bytes)
            cost = _cost_cells(traffic.total)
        rows.append(
            (
                slices + report.topology,
                str(report.num_devices),
                "yes" if report.fits else "NO",
                largest.name,
                format_bytes(memory.required),
                _share(memory.required, memory.capacity),
                *cost,
                ratio,
                f"{sum(p.compile_seconds for p in report.programs):.1f} s",
            )
        )
    return "per device and step; times are modelled\n" + format_table(rows)


def _needs(memory: Memory) -> str:
    """Returns required and available memory, and their difference."""
    assert memory.available is not None
    difference = format_bytes(abs(memory.available - memory.required))
    return (
        f"{format_bytes(memory.required)} of {format_bytes(memory.available)} HBM, "
        f"{difference} {'free' if memory.fits else 'too much'}"
    )


def _format_programs(report: CompileReport) -> str:
    remarks = [
        f"{program.name}: {remark}"
        for program in report.others
        for remark in (program.note, program.refusal)
        if remark
    ]
    return "\n".join(
        (
            _verdict(report),
            "memory per device; arguments include arrays that a program does not use",
            format_table(_program_rows(report)),
            *remarks,
        )
    )


def _verdict(report: CompileReport) -> str:
    """Returns the fit of the whole run, with the programs that do not fit."""
    refused = [program for program in report.programs if not program.memory.fits]
    if not refused:
        return f"every program of the run fits ({len(report.programs)} of them)"
    return "\n".join(
        f"THE RUN DOES NOT FIT: {program.name} needs {_needs(program.memory)}"
        for program in refused
    )


def _program_rows(report: CompileReport) -> list[tuple[str, ...]]:
    """Returns the cells of the table of a run's programs, under a head."""
    rows: list[tuple[str, ...]] = [
        (
            "program",
            "fits",
            "needs",
            "of HBM",
            "arguments",
            "outputs",
            "temporaries",
            "code",
            "compiled",
        )
    ]
    for program in report.programs:
        memory = program.memory
        arguments = memory.tables + memory.slots + memory.dense + memory.inputs
        parts = (memory.outputs, memory.temporaries, memory.code)
        has_run = program.compile_seconds > 0
        rows.append(
            (
                program.name,
                "yes" if memory.fits else "NO",
                format_bytes(memory.required),
                _share(memory.required, memory.capacity),
                format_bytes(arguments + (memory.padding or 0)),
                *("-" if size is None else format_bytes(size) for size in parts),
                f"{program.compile_seconds:.1f} s" if has_run else "-",
            )
        )
    return rows


def _format_memory(report: CompileReport) -> str:
    memory = report.memory
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    if memory.available is not None:
        verdict += f": needs {_needs(memory)}"
    if report.refusal:
        verdict += f"\n{report.refusal}"
    rows = [("memory of the train step per device", "", "of HBM")] + [
        (name, format_bytes(size), _share(size, memory.capacity))
        for name, size in memory.parts.items()
    ]
    return f"{verdict}\n{format_table(rows)}"


def _format_traffic(report: CompileReport, traffic: ProgramTraffic) -> str:
    rows: list[tuple[str, ...]] = [("class of operation", "operations", *_COST_HEAD)]
    costs = [
        *((row.name, str(row.num_operations), row.cost) for row in traffic.classes),
        ("total", "", traffic.total),
        *(
            (f"  of which {row.name}", str(row.num_operations), row.cost)
            for row in traffic.parts
        ),
        ("minimum of the embedding part", "", report.floor),
    ]
    rows += [(name, count, *_cost_cells(cost)) for name, count, cost in costs]
    minimum, found = report.floor, traffic.embedding
    ratios = (
        _ratio(found.hbm_bytes, minimum.hbm_bytes),
        _ratio(
            found.ici_bytes + found.dcn_bytes, minimum.ici_bytes + minimum.dcn_bytes
        ),
    )
    rows.append(("embedding part / minimum", "", ratios[0], "", ratios[1], ""))
    lines = [
        f"modelled traffic per device and step, {_format_bandwidths(report.hardware)}",
        format_table(rows),
    ]
    if traffic.loops:
        lines += [
            "",
            f"not in the total: {_LOOPS_NOTE}",
            format_table(_loop_rows(traffic)),
        ]
    return "\n".join(lines)


def _loop_rows(traffic: ProgramTraffic) -> list[tuple[str, ...]]:
    """Returns the cells of the table of data-dependent loops, under a head."""
    rows: list[tuple[str, ...]] = [("loop", *_COST_HEAD)]
    rows += [
        (_origin(loop.source, loop.op_name), *_cost_cells(loop.per_iteration))
        for loop in traffic.loops
    ]
    return rows


def _format_bandwidths(hardware: HardwareInfo) -> str:
    """Returns the peak bandwidths of one device as text."""
    known = [
        f"{name} {1e-9 * value / hardware.devices_per_chip:,.0f} GB/s"
        for name, value in (
            ("HBM", hardware.hbm_bytes_per_second),
            ("links within the slice", hardware.ici_bytes_per_second),
            ("links to other slices", hardware.dcn_bytes_per_second),
        )
        if value is not None
    ]
    return f"at peak {', '.join(known)}" if known else "bandwidths unknown"


def _format_operations(traffic: ProgramTraffic) -> str:
    """Returns the lists of operations on SparseCore and of copied or moved tables."""
    blocks = [
        _block("operations on SparseCore", traffic.sparse_core),
        _block(
            "TABLES OR SLOT VARIABLES COPIED WITHIN HBM"
            if traffic.table_copies
            else "tables or slot variables copied within HBM",
            traffic.table_copies,
        ),
    ]
    if traffic.table_moves:
        title = "small tables or slot variables moved between HBM and VMEM"
        blocks.append(_block(title, traffic.table_moves))
    return "\n\n".join(blocks)


def _block(title: str, operations: Sequence[NamedOperation]) -> str:
    """Returns a title and a table of the operations below it, or "none"."""
    if not operations:
        return f"{title}: none"
    return f"{title}:\n{format_table(_operation_rows(operations), num_left_aligned=4)}"


def _operation_rows(operations: Sequence[NamedOperation]) -> list[tuple[str, ...]]:
    """Returns the cells of a table of operations; equal operations share a row."""
    counts = collections.Counter(
        (
            operation.operation_class,
            f"[{','.join(map(str, operation.dims))}]",
            _origin(operation.source, operation.op_name),
            operation.runs,
            format_bytes(operation.hbm_bytes),
        )
        for operation in operations
    )
    head = ("operation", "result", "source", "runs in", "HBM per run", "count")
    return [head, *((*row, str(count)) for row, count in counts.items())]


def _origin(source: str, op_name: str) -> str:
    """Returns source line and JAX name of an operation, without the step's name."""
    _, _, name = op_name.partition("/")
    return " ".join(part for part in (source, name) if part) or "unknown"


def _cost_cells(cost: Cost) -> tuple[str, str, str, str]:
    """Returns bytes and time over HBM, then over the links of both networks."""
    links = format_bytes(cost.ici_bytes + cost.dcn_bytes)
    seconds = cost.ici_seconds
    if cost.dcn_bytes:
        both = (cost.ici_seconds, cost.dcn_seconds)
        seconds = None if None in both else max(s for s in both if s is not None)
    return (
        format_bytes(cost.hbm_bytes),
        _format_seconds(cost.hbm_seconds),
        links,
        _format_seconds(seconds),
    )


def _format_seconds(seconds: float | None) -> str:
    """Returns a time as text, in ms or us."""
    if seconds is None:
        return "unknown"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"


def _ratio(value: float, minimum: float) -> str:
    return f"{value / minimum:.1f}x" if minimum else "-"


def _share(size: int, capacity: int | None) -> str:
    return "" if capacity is None else f"{100 * size / capacity:.1f} %"
