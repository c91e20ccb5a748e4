"""The links of every page lead somewhere, and pages repeat files exactly."""

import json
import re
import runpy

import pytest

from tests.docs.test_doc_commands import PAGES as MARKDOWN
from tests.docs.test_doc_examples import DOCS

ROOT = DOCS.parent
UPDATES = runpy.run_path(str(DOCS / "update_pages.py"))
PAGES = [
    *MARKDOWN,
    ROOT / "CHANGELOG.md",
    *sorted((DOCS / "notebooks").glob("*.ipynb")),
]

FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)\n(?:.*\n)*?\1\2 *$", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)


def read(page):
    text = page.read_text()
    if page.suffix == ".md":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] != "code")


def prose(page):
    return CODE.sub("code", FENCE.sub("", COMMENT.sub("", read(page))))


def anchors(page):
    """Returns the names that GitHub gives to the headings of a page."""
    text = FENCE.sub("", COMMENT.sub("", read(page)))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", UPDATES["find_pages"](), ids=name_of)
def test_page_repeats_its_files(page):
    """Otherwise, `python docs/update_pages.py` writes what has changed."""
    assert page.read_text() == UPDATES["updated"](page)
