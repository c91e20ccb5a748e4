"""HTML form of compile reports: plots of memory, traffic and timeline, with figures.

`tpu-embedding compile ... --html FILE` writes it. The page is one self-contained file:
it embeds its style and SVG plots, and needs no script and no other resource. It is also
well-formed XML. Its rows and figures come from `text.py`.
"""

import html
import math
from collections.abc import Iterator, Sequence
from typing import Final

from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.tools.compile_report.bandwidth import Cost
from tpu_embedding.tools.compile_report.cost import Part
from tpu_embedding.tools.compile_report.memory import Memory
from tpu_embedding.tools.compile_report.report import (
    PARTS,
    CompileReport,
    ProgramTraffic,
)
from tpu_embedding.tools.compile_report.text import (
    LOOPS_NOTE,
    PROGRAMS_NOTE,
    bandwidths_of,
    comparison_rows,
    cost_cells,
    format_timeline,
    loop_rows,
    memory_rows,
    operation_blocks,
    options_of,
    program_remarks,
    program_rows,
    title_of,
    traffic_rows,
    verdict_of,
    versions_of,
)
from tpu_embedding.tools.compile_report.timeline import LANES, Interval, Timeline

Bar = tuple[str, Memory]
"""The label of a bar in a plot of memory, and its parts."""

# From Okabe and Ito, "Color Universal Design" (2008): safe for colour-blind readers.
_MEMORY_COLOURS: Final = {
    "tables": "#0072b2",
    "slot variables": "#56b4e9",
    "dense parameters and optimizer state": "#e69f00",
    "inputs": "#f0e442",
    "tile padding of dense and inputs": "#999999",
    "outputs": "#cc79a7",
    "temporaries": "#009e73",
    "program code": "#5d3a9b",
}
_NOT_ITEMISED: Final = "not itemised by the compiler"
_NOT_ITEMISED_COLOUR: Final = "#dddddd"
_RESERVED: Final = "reserved for the system; known only if a step does not fit"
_RESERVED_COLOUR: Final = "#f0b6bd"
_SHADE: Final = "#f3d9ea"
# Light colours, because labels are drawn on them.
_PART_COLOURS: Final[dict[Part, str]] = {
    "embedding": "#8cc4ec",
    "dense": "#f2b84b",
    "unattributed": "#c8c8c8",
}

# Sizes and positions in plots, in pixels.
_WIDTH: Final = 960
_LEFT: Final = 180
_RIGHT: Final = 930
_ROW: Final = 44
_BAR: Final = 26
_LETTER_WIDTH: Final = 6.6
_NUM_TICKS: Final = 8

_STYLE: Final = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  max-width: 960px; margin: 24px auto; padding: 0 12px; }
h1 { font-size: 22px; } h2 { font-size: 18px; margin-top: 40px;
  border-top: 1px solid #bbb; padding-top: 16px; } h3 { font-size: 15px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 10px 2px 0; text-align: right; white-space: pre; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; border-bottom: 1px solid #bbb; }
.wrapped td, .wrapped th { white-space: normal; vertical-align: top; }
.wrapped :nth-child(3) { text-align: left; overflow-wrap: anywhere; }
td.plot div { position: relative; width: 128px; height: 13px; margin-right: 8px;
  background: #f1f1f1; }
td.plot i { position: absolute; left: 0; height: 100%; background: #0072b2; }
td.plot b { position: absolute; height: 19px; top: -3px;
  border-left: 2px dashed #b00020; }
.scroll { overflow-x: auto; }
.swatch { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
.bad { color: #b00020; font-weight: 700; }
pre { overflow-x: auto; font-size: 12px; background: #f7f7f7; padding: 8px; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: #1a1a1a; }
rect.box { stroke: #fff; stroke-width: 0.5; }
"""


def render_html(reports: Sequence[CompileReport]) -> str:
    """Returns an HTML page of one or several reports.

    Args:
      reports: reports from `compile_report`, of one step for one or more topologies.

    Returns:
      Self-contained HTML. All times in it are modelled.

    Raises:
      ValueError: if there are no reports.
    """
    if not reports:
        raise ValueError(
            "reports: render_html takes at least one report, got none; pass a list of "
            "results of compile_report."
        )
    names = dict.fromkeys(report.name for report in reports)
    title = f"{', '.join(names)}: compile report"
    body = [
        _element("h1", _text(title)),
        _element(
            "p",
            "Compiled ahead of time, without the devices. All figures are per device "
            "and step. Times are modelled: bytes over peak bandwidth, a lower bound. "
            "Arithmetic and latency come on top.",
        ),
        _comparison(reports),
        _element("h2", "Memory per device"),
        *_memory_blocks([(report.topology, report.memory) for report in reports]),
        *(_section(report) for report in reports),
    ]
    head = (
        '<meta charset="utf-8"/>'
        + _element("title", _text(title))
        + _element("style", _STYLE)
    )
    page = _element("html", _element("head", head), _element("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _section(report: CompileReport) -> str:
    """Returns the section of one report, after the memory of all reports."""
    parts = [
        _element("h2", _text(title_of(report))),
        _element(
            "p",
            _text(
                f"Compiled by {versions_of(report)}; "
                f"compiler options: {options_of(report)}."
            ),
        ),
    ]
    if report.refusal:
        parts.append(_element("p", _text(report.refusal), class_="bad"))
    if report.others:
        parts += _programs(report)
    if report.traffic is not None:
        parts += [_traffic_table(report, report.traffic)]
        if report.timeline is not None:
            parts += [_timeline_plot(report.timeline)]
        for title, rows in operation_blocks(report.traffic):
            parts += [_element("h3", _text(title))]
            cells = [[_text(cell) for cell in row] for row in rows]
            parts += [_table(cells[0], cells[1:], style="wrapped")] if cells else []
    parts += [_element("h3", "Plan"), _element("pre", _text(report.plan))]
    return "\n".join(parts)


def _programs(report: CompileReport) -> list[str]:
    """Returns the memory of the run's programs: verdict, table, bars, remarks."""
    head, *rows = program_rows(report)
    style = "plain" if report.fits else "bad"
    bars = [(program.name, program.memory) for program in report.programs]
    return [
        _element("h3", "Programs of the run"),
        *(
            _element("p", _text(line), class_=style)
            for line in verdict_of(report).splitlines()
        ),
        _element("p", _text(PROGRAMS_NOTE) + "."),
        _table([_text(cell) for cell in head], [list(map(_text, row)) for row in rows]),
        *_memory_blocks(bars),
        *(_element("p", _text(remark)) for remark in program_remarks(report)),
    ]


def _comparison(reports: Sequence[CompileReport]) -> str:
    head, *rows = comparison_rows(reports)
    fits = head.index("fits")
    cells = [[_text(cell) for cell in row] for row in rows]
    for row, report in zip(cells, reports, strict=True):
        if not report.fits:
            row[fits] = _element("span", row[fits], class_="bad")
    return _table([_text(cell) for cell in head], cells)


def _memory_blocks(bars: Sequence[Bar]) -> list[str]:
    """Returns plot, legend and table of memory figures."""
    return [
        _memory_plot(bars),
        _element("p", _swatch(_RESERVED_COLOUR), _RESERVED),
        _memory_table(bars),
    ]


def _memory_plot(bars: Sequence[Bar]) -> str:
    """Returns a plot with a stacked bar for each name and memory."""
    memories = [memory for _, memory in bars]
    known = [m.capacity for m in memories if m.capacity is not None]
    largest = max(memory.required for memory in memories)
    wholes = known if len(known) == len(bars) else [largest] * len(bars)
    shares = [m.required / whole for m, whole in zip(memories, wholes, strict=True)]
    # Leaves room for text to the right of the bars.
    scale = (_RIGHT - _LEFT) / (1.17 * max(1.0, *shares))
    axis_y = 22 + _ROW * len(bars)
    name = "% of the device's HBM"
    if wholes != known:
        name = f"% of {format_bytes(largest)}; the device's memory is not known"
    shapes = list(_axis(100 * (_RIGHT - _LEFT) / scale, axis_y, name))
    for i, ((label, memory), whole) in enumerate(zip(bars, wholes, strict=True)):
        shapes += _memory_bar(label, memory, 22 + _ROW * i, scale / whole)
    if wholes == known:
        shapes += [
            _line(_LEFT + scale, 4, _LEFT + scale, axis_y, stroke_width=2),
            _label(_LEFT + scale + 5, 14, "HBM"),
        ]
    return _svg(axis_y + 36, shapes)


def _memory_bar(label: str, memory: Memory, y: float, scale: float) -> Iterator[str]:
    """Yields the shapes of one bar; `scale` is in pixels per byte."""
    yield _label(_LEFT - 8, y + 17, label, text_anchor="end")
    if memory.available is not None and memory.capacity is not None:
        reserved = scale * max(0, memory.capacity - memory.available)
        x = _LEFT + scale * memory.available
        yield _rect(x, y - 8, reserved, _RESERVED_COLOUR, _RESERVED, height=_BAR + 16)
    x = float(_LEFT)
    for part, size in _segments(memory):
        colour = _MEMORY_COLOURS.get(part, _NOT_ITEMISED_COLOUR)
        yield _rect(x, y, scale * size, colour, part)
        x += scale * size
    if not memory.fits:
        end = _LEFT + scale * max(memory.required, memory.capacity or 0)
        words = _label(end + 8, y + 17, "DOES NOT FIT", fill="#b00020")
        yield _element("g", words, class_="bad")


def _segments(memory: Memory) -> list[tuple[str, int]]:
    """Returns name and bytes of each segment of a memory bar, from the left."""
    rows = memory_rows(memory)
    rest = memory.required - sum(size for _, size in rows)
    return [*rows, (_NOT_ITEMISED, max(0, rest))]


def _memory_table(bars: Sequence[Bar]) -> str:
    """Returns the table of the memory figures, which is also the bars' legend."""
    found = [dict(_segments(memory)) for _, memory in bars]
    rows = [
        [
            _swatch(_MEMORY_COLOURS.get(part, _NOT_ITEMISED_COLOUR)) + _text(part),
            *(format_bytes(f[part]) if part in f else "-" for f in found),
        ]
        for part in (*_MEMORY_COLOURS, _NOT_ITEMISED)
        if any(f.get(part) for f in found)
    ]
    return _table(["", *(_text(label) for label, _ in bars)], rows)


def _traffic_table(report: CompileReport, traffic: ProgramTraffic) -> str:
    """Returns bytes and times by class, with bars that mark the minimum traffic."""

    def sizes(cost: Cost) -> tuple[float, float]:
        return cost.hbm_bytes, cost.ici_bytes + cost.dcn_bytes

    minimum = sizes(report.floor)
    scale = [max(pair) for pair in zip(sizes(traffic.total), minimum, strict=True)]
    rows = []
    for name, count, cost in traffic_rows(report, traffic):
        bars = [
            _bar(size / limit, floor / limit) if limit else ""
            for size, floor, limit in zip(sizes(cost), minimum, scale, strict=True)
        ]
        hbm, hbm_time, links, link_time = cost_cells(cost)
        rows.append(
            [_text(name), count, hbm, hbm_time, bars[0], links, link_time, bars[1]]
        )
    head = ["class of operation", "operations", "HBM", "time", "", "links", "time", ""]
    return (
        _element("h3", "Modelled traffic")
        + _element(
            "p",
            _text(f"Per device and step, {bandwidths_of(report.hardware)}. ")
            + "Dashed line: minimum traffic of the embedding part.",
        )
        + _table(head, rows, plots=(4, 7))
        + _loops_table(traffic)
    )


def _loops_table(traffic: ProgramTraffic) -> str:
    if not traffic.loops:
        return ""
    head, *rows = ([_text(cell) for cell in row] for row in loop_rows(traffic))
    note = _element("p", _text(f"Not in the total: {LOOPS_NOTE}."))
    return note + _table(head, rows)


def _bar(share: float, floor: float) -> str:
    return _element(
        "div",
        _element("i", style=f"width:{100 * share:.2f}%"),
        _element("b", style=f"left:{100 * floor:.2f}%"),
    )


def _timeline_plot(timeline: Timeline) -> str:
    """Returns the plot of a timeline, with a row for each lane."""
    limit = timeline.length or 1.0
    factor, name = 1.0, "places in the order of the schedule"
    if timeline.axis == "modelled seconds":
        factor, name = (1e3, "ms") if limit >= 1e-3 else (1e6, "us")
        name += " after the start of the step, modelled"
    axis_y = 8 + _ROW * len(LANES)
    shapes = list(_axis(limit * factor, axis_y, name))
    top = {lane: 8 + _ROW * i for i, lane in enumerate(LANES)}
    scale = (_RIGHT - _LEFT) / limit
    for interval in timeline.intervals:
        if interval.lane == "SparseCore":
            x, width = _LEFT + scale * interval.begin, scale * interval.length
            height = top["SparseCore"] - top["TensorCore"]
            shapes.append(_rect(x, top["TensorCore"], width, _SHADE, "", height=height))
    for lane, y in top.items():
        shapes.append(_label(_LEFT - 8, y + 17, lane, text_anchor="end"))
    boxes = [_box(i, scale, top[i.lane]) for i in timeline.intervals]
    names = [_name(i, scale, top[i.lane]) for i in timeline.intervals]
    shapes += boxes + names
    swatches = [_swatch(_PART_COLOURS[part]) + f"{part} &#160; " for part in PARTS]
    shaded = _swatch(_SHADE) + (
        "SparseCore is busy; the TensorCore runs in parallel, or waits if its row is "
        "empty"
    )
    left_out = timeline.num_left_out
    return "".join(
        (
            _element("h3", "Modelled timeline"),
            _element("p", _text(format_timeline(timeline)) + "."),
            _element("p", *swatches, shaded),
            _svg(axis_y + 36, shapes),
            _element("p", f"{left_out} shorter operations are not shown.")
            if left_out
            else "",
        )
    )


def _box(interval: Interval, scale: float, y: float) -> str:
    x, width = _LEFT + scale * interval.begin, scale * interval.length
    words = f"{interval.operation_class}, {interval.part}"
    if interval.num_operations > 1:
        words += f", {interval.num_operations} operations, the longest"
    hint = f"{words}: {interval.op_name or 'no origin given'}"
    return _rect(x, y, width, _PART_COLOURS[interval.part], hint, class_="box")


def _name(interval: Interval, scale: float, y: float) -> str:
    """Returns the label of an interval's box, or "" if it does not fit."""
    x, width = _LEFT + scale * interval.begin, scale * interval.length
    name = interval.operation_class
    if width < _LETTER_WIDTH * len(name):
        return ""
    return _label(x + width / 2, y + 17, name, text_anchor="middle")


def _axis(limit: float, y: float, name: str) -> Iterator[str]:
    """Yields the shapes of a horizontal axis from 0 to `limit`, at height `y`."""
    step = 10 ** math.floor(math.log10(limit / _NUM_TICKS))
    step *= next(n for n in (1, 2, 5, 10) if n * step * _NUM_TICKS >= limit)
    yield _line(_LEFT, y, _RIGHT, y)
    for i in range(math.floor(limit / step) + 1):
        x = _LEFT + (_RIGHT - _LEFT) * i * step / limit
        yield _line(x, 4, x, y + 4, stroke="#e2e2e2")
        yield _label(x, y + 16, f"{i * step:.6g}", text_anchor="middle")
    yield _label((_LEFT + _RIGHT) / 2, y + 32, name, text_anchor="middle")


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    plots: Sequence[int] = (),
    style: str = "plain",
) -> str:
    """Returns a table of markup cells; the columns `plots` hold bars."""
    lines = [_element("tr", *(_element("th", cell) for cell in head))]
    for row in rows:
        cells = [
            _element("td", cell, class_="plot") if i in plots else _element("td", cell)
            for i, cell in enumerate(row)
        ]
        lines.append(_element("tr", *cells))
    table = _element("table", "\n".join(lines), class_=style)
    return _element("div", table, class_="scroll")


def _svg(height: float, shapes: Sequence[str]) -> str:
    body = "\n".join(shapes)
    return _element("svg", body, viewBox=f"0 0 {_WIDTH} {height:.0f}", role="img")


def _rect(
    x: float,
    y: float,
    width: float,
    fill: str,
    hint: str,
    *,
    height: float = _BAR,
    **attributes: str,
) -> str:
    """Returns a rectangle that shows a hint under the pointer."""
    title = _element("title", _text(hint)) if hint else ""
    place = {"x": x, "y": y, "width": width, "height": height}
    return _element("rect", title, **place, fill=fill, **attributes)


def _line(x1: float, y1: float, x2: float, y2: float, **style: str | float) -> str:
    place = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return _element("line", **place, **{"stroke": "#1a1a1a", **style})


def _label(x: float, y: float, text: str, **style: str) -> str:
    return _element("text", _text(text), x=x, y=y, **style)


def _swatch(colour: str) -> str:
    return _element("span", class_="swatch", style=f"background:{colour}")


def _element(name: str, *children: str, **attributes: str | float) -> str:
    """Returns an element of markup children and text or number attributes."""
    written = ""
    for key, value in attributes.items():
        value = f"{value:.2f}" if isinstance(value, float) else str(value)
        key = key.rstrip("_").replace("_", "-")
        written += f' {key}="{html.escape(value)}"'
    return f"<{name}{written}>{''.join(children)}</{name}>"


def _text(text: str) -> str:
    return html.escape(text)
