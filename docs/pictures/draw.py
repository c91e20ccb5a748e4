"""Draws the pictures of the documentation as SVG.

    python docs/pictures/draw.py

The pages include the files inline, so the colours follow the theme, light or dark.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Final

from canvas import Picture
from charts import draw_curves, draw_memory
from mesh_pictures import draw_mesh, draw_overview, draw_placement
from timeline import draw_pipeline

DIRECTORY: Final = pathlib.Path(__file__).parent


def draw_bucket() -> str:
    """Draws the bucket of an id: its lines of keys and scores, and its rows."""
    picture = Picture(
        760, 420, "An id, its bucket of 64 places, and the row of each place"
    )
    picture.text(20, 34, "id: 64 bits, mixed", "left head")
    picture.box(20, 46, 130, 38, "orange")
    picture.text(85, 71, "first word")
    picture.box(150, 46, 130, 38, "blue")
    picture.text(215, 71, "second word")
    picture.drop(85, 84, 132)
    picture.text(98, 112, "bucket = first x buckets / 2^32", "left small")
    picture.box(10, 132, 740, 278, "lane")
    picture.text(24, 156, "a bucket, on the device that owns it", "left head")
    lines = (
        ("keys", ("first", "second"), ("orange", "blue")),
        ("scores", ("used", "steps"), ("green", "green")),
    )
    for y, (name, words, styles) in zip((172, 236), lines, strict=True):
        picture.text(24, y + 31, name, "left")
        for half, (word, style) in enumerate(zip(words, styles, strict=True)):
            left = 100 + 320 * half
            for place, number in enumerate(("0", "1", "...", "63")):
                picture.box(left + 80 * place, y, 80, 48, style)
                label = number if number == "..." else f"{word} {number}"
                picture.text(left + 40 + 80 * place, y + 30, label, "small")
    picture.text(100, 304, "lane 0", "left small")
    picture.text(420, 304, "lane 64", "left small")
    picture.text(740, 304, "lane 127", "small end")
    for place, number in enumerate(("0", "1", "...", "63")):
        picture.drop(140 + 80 * place, 312, 340)
        picture.box(100 + 80 * place, 340, 80, 48)
        label = number if number == "..." else f"row {number}"
        picture.text(140 + 80 * place, 370, label, "small")
    picture.text(24, 371, "table", "left")
    picture.text(440, 371, "one line read and compared per id", "left small")
    return picture.svg()


def draw_lookup() -> str:
    """Draws the stages of a lookup and of its update."""
    picture = Picture(
        1000, 560, "Stages of a lookup, forward, and of an update, backward"
    )
    for top, title in ((0, "Forward"), (285, "Backward")):
        picture.text(10, top + 20, title, "head left")
        for lane, owner in enumerate(
            ("every device, for its part of the batch", "every device, for its rows")
        ):
            picture.box(5, top + 32 + 122 * lane, 990, 112, "lane")
            picture.text(15, top + 50 + 122 * lane, owner, "small left")

    ask, own = 60, 182
    picture.stage(20, ask, "ids", "of all features", "of a stack", style="blue")
    picture.stage(215, ask, "dedup", "each id once")
    picture.stage(410, ask, "route", "one bucket", "per owner")
    picture.stage(545, own, "gather", "rows of the", "table's shard", style="green")
    picture.stage(830, ask, "activations", "[batch, dim]", style="blue")
    picture.arrow(170, ask + 38, 215, ask + 38)
    picture.arrow(365, ask + 38, 410, ask + 38)
    picture.wire(490, ask + 76, 545, own + 38, "ids")
    picture.box(695, ask, 110, 76)
    picture.text(750, ask + 25, "combine", "head")
    picture.text(750, ask + 47, "sum, mean", "small")
    picture.text(750, ask + 65, "or sqrtn", "small")
    picture.wire(640, own, 695, ask + 38, "rows")
    picture.arrow(805, ask + 38, 830, ask + 38)

    ask, own = 345, 467
    picture.stage(20, ask, "cotangents", "of the activations", style="blue")
    picture.stage(215, ask, "spread", "one gradient", "per unique row")
    picture.stage(410, own, "merge", "sum over devices:", "each row once")
    picture.stage(605, own, "rule", "touched rows of", "table and slots")
    picture.stage(800, own, "add", "to table and slots,", "in place", style="green")
    picture.arrow(170, ask + 38, 215, ask + 38)
    picture.wire(290, ask + 76, 410, own + 38, "gradients")
    picture.arrow(560, own + 38, 605, own + 38)
    picture.arrow(755, own + 38, 800, own + 38)
    return picture.svg()


def draw_rounds() -> str:
    """Draws buckets, one of which spills to a second round."""
    picture = Picture(820, 250, "Buckets of capacity 4; two ids spill to round 2")
    counts = (3, 6, 2)
    for column, (title, first) in enumerate((("round 1", 0), ("round 2", 4))):
        left = 150 + 340 * column
        picture.text(left + 90, 24, title, "head")
        for owner, count in enumerate(counts):
            y = 42 + 62 * owner
            if column == 0:
                picture.text(10, y + 27, f"to device {owner}", "left")
            for place in range(4):
                used = first + place < count
                style = ("blue" if column == 0 else "orange") if used else "empty"
                picture.box(left + 46 * place, y, 40, 40, style)
                if used:
                    picture.text(left + 46 * place + 20, y + 25, "id")
    picture.text(150, 240, "capacity = 4 ids per bucket and round", "small left")
    picture.text(490, 240, "runs only while some id waits", "small left")
    return picture.svg()


def draw_packing() -> str:
    """Draws how rows of two tables get to shards and lines."""
    picture = Picture(960, 320, "Two tables, their stack, two shards, and lines")
    picture.text(80, 22, "tables", "head")
    picture.text(300, 22, "stack", "head")
    picture.text(700, 22, "shards, in lines of 128 lanes", "head")
    names = [f"movie {i}" for i in range(6)] + [f"user {i}" for i in range(3)]
    styles = ["blue"] * 6 + ["green"] * 3
    for row, (name, style) in enumerate(zip(names, styles, strict=True)):
        y = 40 + 29 * row + (20 if style == "green" else 0)
        picture.box(20, y, 120, 25, style)
        picture.text(80, y + 17, name, "small")
        y = 40 + 29 * row
        picture.box(240, y, 120, 25, style)
        picture.text(300, y + 17, f"row {row}: {name}", "small")
    picture.arrow(150, 170, 230, 170)
    picture.text(190, 160, "stack", "small")
    picture.arrow(370, 170, 450, 170)
    picture.text(410, 148, "deal", "small")
    picture.text(410, 162, "round-robin", "small")
    for shard in range(2):
        top = 55 + 130 * shard
        picture.text(465, top - 6, f"device {shard}", "left small")
        rows = list(range(shard, 9, 2))
        for place in range(8):
            x, y = 465 + 121 * (place % 4), top + 40 * (place // 4)
            style = styles[rows[place]] if place < len(rows) else "empty"
            picture.box(x, y, 117, 32, style)
            if place < len(rows):
                picture.text(x + 58, y + 21, names[rows[place]], "small")
    picture.text(465, 300, "dim 32: four rows share a line", "small left")
    return picture.svg()


def draw_house() -> str:
    """Draws the library's folders in the order of imports, and the tools beside it."""
    picture = Picture(
        1000, 640, "The library's folders in the order of imports, and the tools"
    )
    picture.box(5, 5, 590, 630, "lane")
    picture.text(20, 30, "tpu_embedding: the library", "head left")
    rows = {
        "export/": "programs, files and deltas for serving",
        "checkpoint/": "save, restore, tables of other libraries",
        "nn/": "Flax NNX and Linen: parameters and lookup",
        "functional/": "a step on explicit arrays, without Flax",
        "gradients": "sum, norm and clipping of a model's gradients",
        "inputs/": "ids on the host: checked, padded, split",
        "stages": "",
        "plan/": "every fact that is fixed before a step",
        "config": "tables and features, as the user declares them",
        "optimizers/": "rules, and what each asks of a row",
        "rows/": "rows in memory: gather, add, update",
    }
    y = 46
    for name, phrase in rows.items():
        if name == "stages":
            for left, stage, words in (
                (20, "lookup/", "ids to rows, and back"),
                (212, "update/", "a rule on touched rows"),
                (404, "tables/", "values of whole tables"),
            ):
                picture.box(left, y, 176, 56, "orange")
                picture.text(left + 88, y + 23, stage, "head")
                picture.text(left + 88, y + 43, words, "small")
            y += 64
            continue
        picture.row(20, y, 560, name, phrase, "blue")
        y += 42
    for names in (
        "combiners, initializers, metrics/, placement",
        "types, hardware, distributed/, checks of arguments",
    ):
        picture.box(20, y, 560, 34)
        picture.text(32, y + 22, names, "left")
        y += 42
    picture.text(20, 626, "a folder imports only from those below it", "small left")

    picture.box(665, 5, 330, 298, "lane")
    picture.text(680, 30, "tpu_embedding.tools", "head left")
    y = 46
    for name, phrase in (
        ("cli/", "the command"),
        ("doctor/", "check a machine"),
        ("train/", "the training loop"),
        ("compile_report/", "fit and traffic"),
        ("data/", "readers of files"),
        ("jobs/", "processes of a run"),
    ):
        picture.row(680, y, 300, name, phrase, "green")
        y += 42
    picture.back(665, 175, 595)
    picture.text(630, 165, "imports", "small")
    return picture.svg()


def draw_gradient() -> str:
    """Draws the way of a gradient from the loss into a table."""
    picture = Picture(1000, 330, "The way of a gradient from the loss into a table")
    lanes = (
        (5, "compute_gradients: lookup/ sends the gradients of round 1"),
        (
            170,
            "apply_gradients: update/ asks lookup/ for each later round",
        ),
    )
    for top, title in lanes:
        picture.box(5, top, 990, 150, "lane")
        picture.text(20, top + 24, title, "head left")
    for top, first, waiting in (
        (46, "cotangents", ("of all activations,", "and their ids")),
        (211, "waiting ids", ("and cotangents,", "on their device")),
    ):
        picture.stage(20, top, first, *waiting, style="blue")
        picture.stage(
            215, top, "spread", "one gradient", "per unique row", style="orange"
        )
        picture.stage(
            410, top, "merge", "sum over devices:", "each row once", style="orange"
        )
        picture.arrow(170, top + 38, 215, top + 38)
        picture.exchange(365, top + 38, 410)
        picture.arrow(560, top + 38, 605, top + 38)
    picture.stage(
        605,
        46,
        "TableGradients",
        "rows of round 1,",
        "and the waiting ids",
        style="blue",
    )
    picture.stage(
        605, 211, "rule", "rows of one round,", "table and slots", style="green"
    )
    picture.drop(680, 122, 211)
    picture.text(692, 145, "round 1", "small left")
    picture.arrow(755, 249, 800, 249)
    picture.stage(800, 211, "add", "to table and slots,", "in place", style="green")
    picture.text(20, 309, "runs while ids wait; without skew, none do", "small left")
    return picture.svg()


PICTURES: Final[dict[str, Callable[[], str]]] = {
    "lookup.svg": draw_lookup,
    "rounds.svg": draw_rounds,
    "packing.svg": draw_packing,
    "house.svg": draw_house,
    "gradient.svg": draw_gradient,
    "bucket.svg": draw_bucket,
    "overview.svg": draw_overview,
    "mesh.svg": draw_mesh,
    "placement.svg": draw_placement,
    "pipeline.svg": draw_pipeline,
    "memory.svg": draw_memory,
    "curves.svg": draw_curves,
}


def main() -> None:
    """Writes all pictures beside this file."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    for name, draw in PICTURES.items():
        (DIRECTORY / name).write_text(draw())


if __name__ == "__main__":
    main()
