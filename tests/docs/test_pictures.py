"""Pages show all pictures, and the picture of the package shows its contracts."""

import pathlib
import re
import tomllib

import pytest

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"
NAMES = sorted(path.name for path in PICTURES.glob("*.svg"))


def test_pages_show_all_pictures_and_no_others():
    pages = [page.read_text() for page in PICTURES.parent.rglob("*.md")]
    shown = {name for text in pages for name in re.findall(r"pictures/(\w+.svg)", text)}
    assert shown == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_picture_has_colours_for_a_dark_page(name):
    assert "@media (prefers-color-scheme: dark)" in (PICTURES / name).read_text()


def test_picture_of_the_package_has_the_order_of_imports():
    """Each folder of a contract of import-linter is shown, below those that use it."""
    settings = tomllib.loads((PICTURES.parents[1] / "pyproject.toml").read_text())
    library, tools, *_ = settings["tool"]["importlinter"]["contracts"]
    heights = {}
    picture = (PICTURES / "house.svg").read_text()
    label = r'class="t (?:name|plain)[^"]*" x="\d+" y="(\d+)">([^<]*)<'
    for y, words in re.findall(label, picture):
        heights |= dict.fromkeys(re.findall(r"\w+", words), int(y))
    for contract in (tools, library):
        above = 0
        for layer in contract["layers"]:
            if layer != "tools":
                found = {heights[name] for name in layer.split(" | ")}
                assert min(found) > above, layer
                above = max(found)
