"""Draws a mesh of eight devices, what each holds, and the placements of a table."""

from typing import Final

from canvas import CHART_STYLE, Picture

DATA, MODEL = 4, 2
"""Sizes of the axes of the mesh of `docs/guides/meshes.md`."""
NUM_DEVICES: Final = DATA * MODEL
BATCH: Final = 64
NUM_ROWS: Final = 1_000

PLACEMENTS: Final = {
    "te.Sharded()": NUM_DEVICES,
    'te.Sharded(axes=("model",))': MODEL,
    "te.Replicated()": 1,
}
"""Number of shards of a table by its placement."""


def first_row(device: int, num_shards: int) -> int:
    """Returns the first row on a device, which holds every `num_shards`th from it on.

    Devices are numbered along `model` first, as the mesh of the guide has them.
    """
    return device % num_shards


def samples_of(device: int) -> range:
    """Returns the samples of a batch that a device looks up."""
    share = BATCH // NUM_DEVICES
    return range(share * device, share * (device + 1))


def _rows_text(device: int, num_shards: int) -> str:
    first = first_row(device, num_shards)
    rows = [first + i * num_shards for i in range(3)]
    return "rows " + ", ".join(map(str, rows)) + ", ..."


def draw_mesh() -> str:
    """Draws a batch, a table and dense parameters, and their parts on each device."""
    picture = Picture(
        1000,
        470,
        "A mesh of 4 by 2 devices: each holds an eighth of the batch and of the rows, "
        "and all dense parameters",
    )
    picture.text(20, 28, "the arrays", "head left")
    picture.text(20, 66, f"a batch of {BATCH} samples, in order", "left")
    picture.text(20, 166, f"a table of {NUM_ROWS:,} rows, dealt in turn", "left")
    picture.text(20, 286, "dense parameters, whole", "left")
    for device in range(NUM_DEVICES):
        picture.tinted(20 + 42 * device, 78, 42, 40, device)
        samples = samples_of(device)
        picture.text(41 + 42 * device, 103, f"{samples[0]}", "small")
    for row in range(16):
        picture.tinted(20 + 42 * (row % 8), 178 + 34 * (row // 8), 42, 30, row % 8)
        picture.text(41 + 42 * (row % 8), 198 + 34 * (row // 8), f"{row}", "small")
    picture.text(364, 232, "...", "left")
    picture.box(20, 298, 336, 34)
    picture.text(20, 380, "One colour is one device.", "small left")
    picture.text(20, 402, "A number is the first sample, or the row.", "small left")

    picture.text(460, 28, 'the mesh, axes ("data", "model")', "head left")
    for model in range(MODEL):
        picture.text(640 + 240 * model, 58, f"model {model}", "small")
    for data in range(DATA):
        y = 70 + 98 * data
        picture.text(508, y + 48, f"data {data}", "small end")
        for model in range(MODEL):
            x, device = 522 + 240 * model, data * MODEL + model
            picture.tinted(x, y, 230, 90, device)
            samples = samples_of(device)
            picture.text(x + 12, y + 22, f"device {device}", "head left")
            phrases = (
                f"samples {samples[0]} to {samples[-1]}",
                _rows_text(device, NUM_DEVICES),
                "dense parameters",
            )
            for line, phrase in enumerate(phrases):
                picture.text(x + 12, y + 42 + 19 * line, phrase, "small left")
    return picture.svg()


def draw_placement() -> str:
    """Draws the rows of a table on eight devices, under three placements."""
    picture = Picture(
        1000,
        400,
        "Rows of a table on 4 by 2 devices: sharded over both axes, over one axis, "
        "and replicated",
        CHART_STYLE,
    )
    phrases = {
        "te.Sharded()": (
            "each device holds 1/8 of the rows",
            "ids and rows cross both axes",
            "no copies",
        ),
        'te.Sharded(axes=("model",))': (
            "each device holds 1/2 of the rows",
            "ids and rows cross \u201cmodel\u201d only",
            "4 copies add up their gradients",
        ),
        "te.Replicated()": (
            "each device holds all rows",
            "no ids or rows travel",
            "8 copies add up their gradients",
        ),
    }
    for panel, (name, num_shards) in enumerate(PLACEMENTS.items()):
        left = 12 + 332 * panel
        picture.box(left, 5, 312, 390, "lane")
        picture.text(left + 156, 32, name, "head code small")
        for model in range(MODEL):
            picture.text(left + 118 + 122 * model, 62, f"model {model}", "small")
        for device in range(NUM_DEVICES):
            x = left + 60 + 122 * (device % MODEL)
            y = 72 + 58 * (device // MODEL)
            if device % MODEL == 0:
                picture.text(left + 54, y + 30, f"data {device // MODEL}", "small end")
            picture.tinted(x, y, 116, 50, first_row(device, num_shards))
            rows = "all rows" if num_shards == 1 else _rows_text(device, num_shards)
            picture.text(x + 58, y + 20, f"device {device}", "small")
            picture.text(x + 58, y + 39, rows.removeprefix("rows "), "small")
        for line, phrase in enumerate(phrases[name]):
            picture.text(left + 156, 330 + 24 * line, phrase, "small")
    return picture.svg()


def draw_overview() -> str:
    """Draws the way of a batch: ids, rows on a mesh, activations, and back."""
    picture = Picture(980, 330, "Ids to their rows, and rows to samples")
    for x, title in ((90, "ids of a batch"), (490, "one table, rows over the mesh")):
        picture.text(x, 24, title, "head")
    picture.text(890, 24, "activations", "head")
    samples = ("7, 42, 7", "none", "9,999")
    for sample, ids in enumerate(samples):
        y = 62 + 60 * sample
        picture.box(15, y, 150, 40, "blue")
        picture.text(90, y + 25, ids)
        picture.box(815, y, 150, 40, "green")
        picture.text(890, y + 25, "one row per sample", "small")
    num_devices = 4
    for device in range(num_devices):
        x = 290 + 103 * device
        picture.box(x, 52, 92, 185, "lane")
        picture.text(x + 46, 72, f"device {device}", "small")
        for place in range(4):
            row_id = device + num_devices * place
            is_read = row_id == 7
            picture.box(x + 8, 82 + 37 * place, 76, 30, "blue" if is_read else "box")
            words = f"row {row_id}" if place < 3 or is_read else "..."
            picture.text(x + 46, 102 + 37 * place, words, "small")
    picture.exchange(172, 112, 283)
    picture.text(228, 102, "each id once", "small")
    picture.exchange(702, 112, 808)
    picture.text(755, 102, "rows, summed", "small")
    picture.back(808, 182, 702)
    picture.text(755, 202, "gradients", "small")
    picture.text(490, 268, "the optimizer changes the rows that were read, in place")
    picture.text(490, 300, "all of it within one compiled step", "head")
    return picture.svg()
