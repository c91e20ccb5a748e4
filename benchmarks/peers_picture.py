"""Draws the times of all libraries as an SVG; `record.py` writes it."""

import math
from typing import Any, Final

from results_file import Results
from sides import OURS, SIDES

PICTURE: Final = "peers.svg"
"""Name of the file, beside this one."""

WIDTH, LEFT, RIGHT = 420, 14, 392
"""Pixels. The picture is as narrow as a phone, where its words stay readable."""
LABEL, LINE = 16, 36  # Heights of a library's name, and of its name and times.
STYLE: Final = """
.t { font: 14px system-ui, sans-serif; fill: var(--pst-color-text-base, #444); }
.head { font-weight: 600; }
.ours { font-weight: 600; }
.end { text-anchor: end; }
.mid { text-anchor: middle; }
.grid { stroke: rgba(128, 128, 128, 0.35); }
.train { fill: #4285f4; }
.forward { fill: #e08214; }
@media (prefers-color-scheme: dark) { .t { fill: var(--pst-color-text-base, #ccc); } }
"""


def draw(results: Results) -> str:
    """Returns the picture: a panel for each setting, two lines for each library.

    Blue is a train step, orange a lookup. The axis of time is logarithmic. A library is
    shown if it was measured on the CPU that this package was measured on: times of two
    CPUs do not compare. Figures of accelerators are in the table only.
    """
    rows = [
        row
        for row in results["peers"]["results"]
        if "left_out" not in row and "device" not in row
    ]
    cpus = {row["setting"]: row.get("cpu") for row in rows if row["peer"] == OURS}
    rows = [row for row in rows if row.get("cpu") == cpus.get(row["setting"])]
    axis = _Axis([row[f"{m}_ms"] for row in rows for m in ("train", "forward")])
    parts, y = [], 8
    for setting in cpus:
        panel = [row for row in rows if row["setting"] == setting]
        y += LABEL
        parts.append(_text(LEFT, y, f"{setting}: {_show_shape(panel[0])}", "head"))
        top = y + 10
        for row in panel:
            y += LINE
            parts += _line(row, y, axis)
        y += LABEL + 10
        parts += axis.grid(top, y)
        y += 2 * LABEL
    legend = [
        f'<circle class="train" cx="{LEFT + 5}" cy="{y - 5}" r="5"/>',
        _text(LEFT + 16, y, "train step"),
        f'<circle class="forward" cx="{LEFT + 105}" cy="{y - 5}" r="5"/>',
        _text(LEFT + 116, y, "lookup; milliseconds, logarithmic"),
    ]
    title = "Times of a train step and of a lookup, by library"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 12}" '
        f'width="{WIDTH}" role="img" aria-label="{title}">'
    )
    return (
        "\n".join([head, f"<style>{STYLE}</style>", *parts, *legend, "</svg>"]) + "\n"
    )


def _show_shape(row: dict[str, Any]) -> str:
    shape = row.get("shape", {})
    if not shape:
        return "tables of equal sizes"
    size = f"{shape['tables']} x {shape['rows']:,} x {shape['dim']}"
    ids = f", {shape['valence']} ids" if shape["valence"] > 1 else ""
    return f"{size}, batch {shape['batch']:,}{ids}"


class _Axis:
    """Maps milliseconds to pixels; begins and ends at powers of ten."""

    def __init__(self, times: list[float]):
        # Half the shortest time, to leave room for its label on the left.
        self._first = math.floor(math.log10(min(times) / 2))
        self._last = max(math.ceil(math.log10(max(times))), self._first + 1)

    def x(self, milliseconds: float) -> float:
        part = (math.log10(milliseconds) - self._first) / (self._last - self._first)
        return round(LEFT + part * (RIGHT - LEFT), 1)

    def grid(self, top: float, bottom: float) -> list[str]:
        parts = []
        for power in range(self._first, self._last + 1):
            x = self.x(10.0**power)
            parts.append(f'<path class="grid" d="M{x} {top} L{x} {bottom - LABEL}"/>')
            parts.append(_text(x, bottom + 5, f"{10.0**power:,g}", "mid"))
        return parts


def _line(row: dict[str, Any], y: float, axis: _Axis) -> list[str]:
    style = "ours" if row["peer"] == OURS else ""
    name = f"{SIDES[row['peer']].title}: {row['optimizer'].replace('_', ' ')}"
    parts = [_text(LEFT, y - LABEL + 4, name, style)]
    for method in ("train", "forward"):
        x = axis.x(row[f"{method}_ms"])
        parts.append(f'<circle class="{method}" cx="{x}" cy="{y - 1}" r="5"/>')
    # The longer time has its figure on the right, the shorter one on the left.
    shorter, longer = sorted(row[f"{m}_ms"] for m in ("train", "forward"))
    parts.append(_text(axis.x(longer) + 9, y + 4, show_time(longer), style))
    parts.append(_text(axis.x(shorter) - 9, y + 4, show_time(shorter), f"{style} end"))
    return parts


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text class="t {style}" x="{x}" y="{y}">{words}</text>'


def show_time(milliseconds: float) -> str:
    """Returns a time as text, with three digits or the thousands apart."""
    if milliseconds < 10:
        return f"{milliseconds:.2f}"
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:,.0f}"
