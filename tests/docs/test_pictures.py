"""The pictures in docs/ have titles, follow the theme, and show their figures."""

import json
import pathlib
import re
import runpy
from xml.etree import ElementTree

import pytest

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"
NAMES = sorted(path.name for path in PICTURES.glob("*.svg"))
CHARTS = ("curves", "memory")


def texts_of(picture):
    """Returns the words of a picture, in order."""
    root = ElementTree.fromstring(picture)
    return [x.text or "" for x in root.iter("{http://www.w3.org/2000/svg}text")]


def test_pages_show_all_pictures_and_no_others():
    pages = [page.read_text() for page in PICTURES.parent.rglob("*.md")]
    shown = {name for text in pages for name in re.findall(r"pictures/(\w+.svg)", text)}
    assert shown == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_picture_has_a_title_and_follows_the_theme(name):
    picture = (PICTURES / name).read_text()
    root = ElementTree.fromstring(picture)
    assert root.get("role") == "img" and len(root.get("aria-label", "")) > 20
    assert "width" not in root.attrib, "the page sets the width"
    assert "var(--pst-color-text-base, #444" in picture
    assert not re.search(r"#000\b|#000000|black", picture)


@pytest.mark.parametrize("name", CHARTS)
def test_chart_shows_its_figures(name):
    script = runpy.run_path(str(PICTURES / "charts.py"))
    drawn = script["draw_charts"]()[PICTURES / f"{name}.svg"]
    assert texts_of(drawn) == texts_of((PICTURES / f"{name}.svg").read_text())
    configs = [x["config"] for x in json.loads((PICTURES / f"{name}.json").read_text())]
    words = " ".join(texts_of(drawn))
    assert all(config in words for config in configs)
