"""A canvas that makes SVG, in the colours of the documentation's theme."""

from typing import Final

# Variables are those of the Sphinx theme; the values behind them are for viewers
# that show the file by itself.
STYLE: Final = """
.t { font: 16px system-ui, sans-serif; fill: var(--pst-color-text-base, #444);
     text-anchor: middle; }
.left { text-anchor: start; }
.end { text-anchor: end; }
.head { font-weight: 600; font-size: 17px; }
.small { font-size: 14px; }
.box { fill: rgba(128, 128, 128, 0.10); stroke: rgba(128, 128, 128, 0.8); }
.blue { fill: rgba(66, 133, 244, 0.28); stroke: #4285f4; }
.orange { fill: rgba(240, 140, 30, 0.30); stroke: #e08214; }
.green { fill: rgba(52, 168, 83, 0.28); stroke: #34a853; }
.lane { fill: rgba(128, 128, 128, 0.07); }
.empty { fill: none; stroke: rgba(128, 128, 128, 0.5); stroke-dasharray: 3 3; }
.arrow { stroke: var(--pst-color-text-muted, #777); stroke-width: 1.6; fill: none; }
.wire { stroke: #e08214; stroke-width: 2.4; fill: none; }
.tip { fill: var(--pst-color-text-muted, #777); }
.wiretip { fill: #e08214; }
"""

CHART_STYLE: Final = """
.code { font-family: ui-monospace, monospace; }
.mark { fill: none; stroke: var(--pst-color-text-base, #444); stroke-width: 1.6; }
.dashed { stroke-dasharray: 6 4; }
.grid { stroke: rgba(128, 128, 128, 0.35); fill: none; }
.trained { stroke: #4285f4; stroke-width: 2; fill: none; }
.held { stroke: #e08214; stroke-width: 2.4; fill: none; }
.helddot { fill: #e08214; }
.tables { fill: #4285f4; }
.slots { fill: #8ab4f8; }
.dense { fill: #e08214; }
.inputs { fill: #c77ac0; }
.temporaries { fill: #34a853; }
.rest { fill: #999; }
"""


class Picture:
    """An SVG under construction; coordinates are pixels from the upper left."""

    def __init__(self, width: int, height: int, title: str, more_style: str = ""):
        """Begins a picture; the title is what screen readers say."""
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'role="img" aria-label="{title}">',
            f"<style>{STYLE}{more_style}</style>",
        ]

    def box(
        self, x: float, y: float, width: float, height: float, style: str = "box"
    ) -> None:
        """Draws a rectangle."""
        self._parts.append(
            f'<rect class="{style}" x="{x}" y="{y}" width="{width}" '
            f'height="{height}" rx="5"/>'
        )

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Writes one line, centred at x unless the style has `left`."""
        self._parts.append(f'<text class="t {style}" x="{x}" y="{y}">{words}</text>')

    def stage(
        self, x: float, y: float, name: str, *lines: str, style: str = "box"
    ) -> None:
        """Draws a box of 150 x 76 with a name and up to two lines below it."""
        self.box(x, y, 150, 76, style)
        self.text(x + 75, y + (46 if not lines else 25), name, "head")
        for i, line in enumerate(lines):
            self.text(x + 75, y + 47 + 18 * i, line, "small")

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Draws a step within a device; horizontal."""
        self._parts.append(f'<path class="arrow" d="M{x0} {y0} L{x1 - 7} {y1}"/>')
        self._tip(x1, y1, "tip")

    def drop(self, x: float, y0: float, y1: float) -> None:
        """Draws a step within a device; downwards."""
        self._parts.append(f'<path class="arrow" d="M{x} {y0} L{x} {y1 - 7}"/>')
        corners = f"{x},{y1} {x - 5},{y1 - 9} {x + 5},{y1 - 9}"
        self._parts.append(f'<polygon class="tip" points="{corners}"/>')

    def row(
        self, x: float, y: float, width: float, name: str, phrase: str, style: str
    ) -> None:
        """Draws a box 34 high with a name and, at its right half, a phrase."""
        self.box(x, y, width, 34, style)
        self.text(x + 12, y + 22, name, "head left")
        self.text(x + 165, y + 22, phrase, "small left")

    def wire(self, x0: float, y0: float, x1: float, y1: float, words: str) -> None:
        """Draws an exchange between devices: down or up, then into a box."""
        down = 1 if y1 > y0 else -1
        self._parts.append(
            f'<path class="wire" d="M{x0} {y0} L{x0} {y1 - 12 * down} '
            f'Q{x0} {y1} {x0 + 12} {y1} L{x1 - 8} {y1}"/>'
        )
        self._tip(x1, y1, "wiretip")
        self.text(x0 + 8, (y0 + y1) / 2 + 4, words, "small left")

    def exchange(self, x0: float, y: float, x1: float) -> None:
        """Draws an exchange between devices; horizontal."""
        self._parts.append(f'<path class="wire" d="M{x0} {y} L{x1 - 8} {y}"/>')
        self._tip(x1, y, "wiretip")

    def back(self, x0: float, y: float, x1: float) -> None:
        """Draws an arrow to the left."""
        self._parts.append(f'<path class="arrow" d="M{x0} {y} L{x1 + 7} {y}"/>')
        self._tip(x1, y, "tip", -1)

    def _tip(self, x: float, y: float, style: str, sign: int = 1) -> None:
        corners = f"{x},{y} {x - 9 * sign},{y - 5} {x - 9 * sign},{y + 5}"
        self._parts.append(f'<polygon class="{style}" points="{corners}"/>')

    def path(self, points: list[tuple[float, float]], style: str) -> None:
        """Draws a line through points."""
        steps = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="{style}" d="M{steps}"/>')

    def dot(self, x: float, y: float, style: str) -> None:
        """Draws a small disc."""
        self._parts.append(f'<circle class="{style}" cx="{x:g}" cy="{y:g}" r="3.5"/>')

    def tinted(
        self, x: float, y: float, width: float, height: float, tint: int
    ) -> None:
        """Draws a rectangle in one of eight colours."""
        hue = 205 + 45 * tint
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="hsla({hue % 360}, 75%, 55%, 0.35)" '
            f'stroke="hsl({hue % 360}, 55%, 50%)"/>'
        )

    def svg(self) -> str:
        """Returns the file's text."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"
