"""Draws the steps of a plain loop and of both modes of a pipelined step."""

from typing import Final

from canvas import Picture

LEFT, PART, MODEL = 120, 75, 120
"""Place of the first part, width of a part, and of the dense model, in pixels."""

STEP: Final = 4 * PART + MODEL
"""Width of a step of the plain loop. Lengths are not to scale."""

UPDATE: Final = (("model", MODEL), ("slots", PART), ("write", PART))


def draw_pipeline() -> str:
    """Draws which work of the next batch runs beside the work of a batch."""
    picture = Picture(
        1000,
        450,
        "Timelines of a plain loop and of both pipelined modes, which begin the lookup "
        "of the next batch beside the update",
    )
    picture.text(10, 44, "plain loop", "head left")
    _plain_loop(picture)
    picture.text(10, 144, '"exact"', "head left")
    _exact_steps(picture)
    picture.text(10, 284, '"stale"', "head left")
    _stale_steps(picture)
    picture.text(
        LEFT,
        412,
        "Grey: one compiled program. Dashed: where the data allow the work of the next "
        "batch. The box in it: where XLA placed it.",
        "small left",
    )
    picture.text(LEFT, 436, "Lengths are not to scale.", "small left")
    return picture.svg()


def _plain_loop(picture: Picture) -> None:
    parts = (("ids", PART), ("rows", PART), *UPDATE)
    for batch, style in ((1, "blue"), (2, "orange")):
        x = LEFT + STEP * (batch - 1)
        _program(picture, x, 10, STEP, 64)
        _boxes(picture, x, 18, parts, batch, style)


def _exact_steps(picture: Picture) -> None:
    _first(picture, 110, ("ids",))
    width = STEP - PART
    for batch, style, after in ((1, "blue", "orange"), (2, "orange", "green")):
        x = LEFT + PART + width * (batch - 1)
        _program(picture, x, 110, width, 120)
        _boxes(picture, x, 118, (("rows", PART), *UPDATE), batch, style)
        picture.box(x + 5, 174, width - 10, 48, "empty")
        _boxes(picture, x + width - PART, 174, (("ids", PART),), batch + 1, after)
        picture.text(x + 15, 203, f"ids of batch {batch + 1}", "small left")


def _stale_steps(picture: Picture) -> None:
    _first(picture, 250, ("ids", "rows"))
    width = STEP - 2 * PART
    for batch, style, after in ((1, "blue", "orange"), (2, "orange", "green")):
        x = LEFT + 2 * PART + width * (batch - 1)
        _program(picture, x, 250, width, 120)
        _boxes(picture, x, 258, UPDATE, batch, style)
        picture.box(x + 5, 314, MODEL + PART - 10, 48, "empty")
        _boxes(picture, x + MODEL, 314, (("rows", PART),), batch + 1, after)
        picture.text(x + 15, 335, "ids and rows", "small left")
        picture.text(x + 15, 353, f"of batch {batch + 1}", "small left")


def _program(picture: Picture, x: float, y: float, width: float, height: float) -> None:
    picture.box(x, y, width - 4, height, "lane")


def _boxes(
    picture: Picture,
    x: float,
    y: float,
    parts: tuple[tuple[str, int], ...],
    batch: int,
    style: str,
) -> None:
    for name, width in parts:
        picture.box(x + 5, y, width - 10, 48, style)
        picture.text(x + width / 2, y + 21, name, "small")
        picture.text(x + width / 2, y + 39, f"batch {batch}", "small")
        x += width


def _first(picture: Picture, y: float, names: tuple[str, ...]) -> None:
    """Draws the program of the first call, which only begins a lookup."""
    _program(picture, LEFT, y, PART * len(names), 120)
    _boxes(picture, LEFT, y + 64, tuple((name, PART) for name in names), 1, "blue")
