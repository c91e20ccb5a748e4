"""The times that a user waits, beside those of what he would pick instead.

`render_tables.py` makes a table and a picture of them. A wait without figures is left
out.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

from markdown_tables import Cells, Results, find_row, show_machine, show_time, table
from peers_picture import STYLE
from sides import OURS, SIDES

PICTURE: Final = "waiting.svg"
"""Name of the file, beside this one."""

WIDTH, LEFT, RIGHT = 820, 430, 730
LINE: Final = 24
RATIOS: Final = (0.125, 8.0)
"""Ends of the axis of the picture; a ratio beyond them is drawn at the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """One time that somebody waits for.

    Attributes:
      who: trainer, server, tester or newcomer.
      what: the work.
      ours: time or rate of this package, with its unit.
      peer: what the user would pick instead.
      theirs: time or rate of the peer.
      ratio: of the times, this package over the peer: below 1, it is faster.
      machine: that it was measured on.
      script: that repeats it.
    """

    who: str
    what: str
    ours: str
    peer: str
    theirs: str
    ratio: float
    machine: str
    script: str


def waits(results: Results) -> list[Wait]:
    """Returns all waits that have figures."""
    kinds = (_tables, _models, _serving, _checkpoints, _files, _starts, _emulation)
    return [wait for kind in kinds for wait in kind(results)]


def render(results: Results) -> str:
    """Returns the table of the page of figures."""
    head = ("who", "waits for", "here", "instead", "there", "ratio of times")
    rows: list[Cells] = [(*head, "CPU", "repeat with `benchmarks/`")]
    for wait in waits(results):
        cells = (wait.who, wait.what, wait.ours, wait.peer, wait.theirs)
        rows.append((*cells, f"{wait.ratio:.2f}", wait.machine, f"`{wait.script}`"))
    return table(rows)


def draw(results: Results) -> str:
    """Returns the picture: a bar for each wait, from ratio 1 to its own."""
    shown = waits(results)
    height = 40 + LINE * len(shown)
    title = "Times of this package over those of other libraries"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 20}" '
        f'role="img" aria-label="{title}">',
        f"<style>{STYLE}.slow {{ fill: #e08214; }} .fast {{ fill: #4285f4; }}</style>",
    ]
    for power in range(-3, 4):
        x = _x(2.0**power)
        parts.append(f'<path class="grid" d="M{x} 10 L{x} {height - 15}"/>')
        parts.append(f'<text class="t mid" x="{x}" y="{height}">{2.0**power:g}</text>')
    for i, wait in enumerate(shown):
        y = 28 + LINE * i
        one, x = _x(1.0), _x(wait.ratio)
        style = "slow" if wait.ratio > 1 else "fast"
        label = f"{wait.what}, over {wait.peer}"
        parts.append(f'<text class="t end" x="{LEFT - 12}" y="{y}">{label}</text>')
        parts.append(
            f'<rect class="{style}" x="{min(one, x)}" y="{y - 12}" '
            f'width="{max(1.0, abs(x - one)):.1f}" height="14"/>'
        )
        parts.append(
            f'<text class="t" x="{RIGHT + 12}" y="{y}">{wait.ratio:.2f}</text>'
        )
    words = "time here / time there, logarithmic; blue: faster here"
    parts.append(f'<text class="t end" x="{RIGHT}" y="{height + 17}">{words}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(ratio: float) -> float:
    low, high = map(math.log2, RATIOS)
    place = min(max(math.log2(ratio), low), high)
    return round(LEFT + (place - low) / (high - low) * (RIGHT - LEFT), 1)


def _rows(results: Results, benchmark: str) -> list[dict[str, Any]]:
    return results.get(benchmark, {"results": []})["results"]


def _machine(results: Results, benchmark: str) -> str:
    return show_machine(results[benchmark])


def _ms(milliseconds: float) -> str:
    return f"{show_time(milliseconds)} ms"


def _tables(results: Results) -> Iterator[Wait]:
    works = {"train": ("trainer", "step"), "forward": ("server", "lookup")}
    for row in _rows(results, "peers"):
        if row["peer"] not in ("torch", "fbgemm") or "left_out" in row:
            continue
        for method, (who, work) in works.items():
            yield Wait(
                who=who,
                what=f"{work} on tables, {row['setting']}",
                ours=_ms(row[f"{method}_ours_ms"]),
                peer=SIDES[row["peer"]].title.partition(",")[0],
                theirs=_ms(row[f"{method}_ms"]),
                ratio=row[f"{method}_ratio"],
                machine=_machine(results, "peers"),
                script="peers.py",
            )


def _models(results: Results) -> Iterator[Wait]:
    try:
        ours, peer = (
            find_row(results, "dlrm_speed", side=side)["step_ms"]
            for side in (OURS, "torch")
        )
    except KeyError:
        return
    yield Wait(
        who="trainer",
        what="step of a DLRM",
        ours=_ms(ours),
        peer="PyTorch",
        theirs=_ms(peer),
        ratio=ours / peer,
        machine=_machine(results, "dlrm_speed"),
        script="dlrm_speed.py",
    )


def _serving(results: Results) -> Iterator[Wait]:
    rows = _rows(results, "serving_latency")
    for row in rows:
        if row["side"] != "stablehlo" or row["dtype"] != "float32":
            continue
        case = {name: row[name] for name in ("setting", "batch", "dtype")}
        try:
            peer = find_row(results, "serving_latency", side="torch", **case)
        except KeyError:
            continue
        yield Wait(
            who="server",
            what=f"exported lookup, {row['setting']}, batch {row['batch']:,}",
            ours=_ms(row["p50_ms"]),
            peer="TorchScript",
            theirs=_ms(peer["p50_ms"]),
            ratio=row["p50_ms"] / peer["p50_ms"],
            machine=_machine(results, "serving_latency"),
            script="serving_latency.py",
        )


def _checkpoints(results: Results) -> Iterator[Wait]:
    for row in _rows(results, "checkpoint_speed"):
        if row["side"] != "tpu_embedding":
            continue
        yield Wait(
            who="trainer",
            what=f"{row['work']} of {row['gb']:g} GB",
            ours=f"{row['seconds']:.2f} s",
            peer="orbax",
            theirs=f"{row['seconds'] / row['ratio']:.2f} s",
            ratio=row["ratio"],
            machine=_machine(results, "checkpoint_speed"),
            script="checkpoint_speed.py",
        )


def _files(results: Results) -> Iterator[Wait]:
    for row in _rows(results, "input_speed"):
        ours, peer = row["samples_per_second"], row["peer_samples_per_second"]
        yield Wait(
            who="trainer",
            what=f"samples from {row['format']}, shuffled",
            ours=f"{ours / 1e3:,.0f} thousand/s",
            peer=f"{row['peer']}, in file order",
            theirs=f"{peer / 1e3:,.0f} thousand/s",
            ratio=peer / ours,
            machine=_machine(results, "input_speed"),
            script="input_speed.py",
        )


def _starts(results: Results) -> Iterator[Wait]:
    titles = {
        "command": "first step of the command",
        "model": "first step, 26 features",
    }
    for row in _rows(results, "first_step"):
        if row["start"] != "second":
            continue
        yield Wait(
            who="newcomer",
            what=titles[row["program"]],
            ours=f"{row['until_step_ms'] / 1e3:.1f} s",
            peer="its first start",
            theirs=f"{row['until_step_ms'] / row['ratio'] / 1e3:.1f} s",
            ratio=row["ratio"],
            machine=_machine(results, "first_step"),
            script="first_step.py",
        )


def _emulation(results: Results) -> Iterator[Wait]:
    rows = _rows(results, "device_count")
    for row in rows:
        if row["devices"] not in (2, 8):
            continue
        yield Wait(
            who="tester",
            what=f"step on {row['devices']} emulated devices",
            ours=_ms(row["train_ms"]),
            peer="1 device",
            theirs=_ms(row["train_ms"] / row["train_ratio"]),
            ratio=row["train_ratio"],
            machine=_machine(results, "device_count"),
            script="device_count.py",
        )
