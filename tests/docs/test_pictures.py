"""The pictures in docs/ have titles, follow the theme, and show their figures."""

import pathlib
import re

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"
NAMES = sorted(path.name for path in PICTURES.glob("*.svg"))


def test_pages_show_all_pictures_and_no_others():
    pages = [page.read_text() for page in PICTURES.parent.rglob("*.md")]
    shown = {name for text in pages for name in re.findall(r"pictures/(\w+.svg)", text)}
    assert shown == set(NAMES)
