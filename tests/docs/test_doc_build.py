"""The documentation builds without a warning, and shows every public name."""

import inspect
import os
import pathlib
import runpy
import shlex
import subprocess
import sys

import pytest

import tpu_embedding as te
from tpu_embedding.tools import compile_report, train

pytestmark = pytest.mark.full(every_case=True)

EXHAUSTIVE = pytest.mark.exhaustive
DOCS = pathlib.Path(__file__).parents[2] / "docs"
MODULES = [
    te,
    *filter(inspect.ismodule, (getattr(te, name) for name in te.__all__)),
    train,
    compile_report,
]


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """A folder with the pages that the command of `scripts/docs.sh` builds."""
    directory = tmp_path_factory.mktemp("html")
    lines = (DOCS.parent / "scripts" / "docs.sh").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("python -m sphinx"))
    words = shlex.split(line.replace('"$@"', "-q"))
    assert "-W" in words and words[-2:] == ["docs", "docs/_build/html"]
    result = subprocess.run(
        [sys.executable, *words[1:-1], directory],
        cwd=DOCS.parent,
        env={**os.environ, "DOCS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return directory


def public_names(module):
    """Yields the names that a module lists, or all that its package imports."""
    for name in getattr(module, "__all__", vars(module)):
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name)):
            is_in_te = module is te.nn and name in te.__all__
            # `te.linen` stands in `nn`.
            place = "tpu_embedding" if is_in_te else module.__name__
            yield f"{place}.{name}".replace(".nn.linen.", ".linen.")


def test_every_public_name_is_in_the_reference(html):
    # The environment of the quick tier has no tools of the docs.
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((html / "objects.inv").read_bytes(), uri="")
    documented = {
        name
        for domain, items in inventory.data.items()
        if domain.startswith("py:")
        for name in items
    }
    expected = {name for module in MODULES for name in public_names(module)}
    assert expected - documented == set()


def test_pages_need_no_network(html):
    for page in html.rglob("*.html"):
        text = page.read_text()
        for tag in ('<script src="http', '<link rel="stylesheet" href="http'):
            assert tag not in text, page


@pytest.mark.parametrize(
    "screens", [slice(None, None, 2), pytest.param(slice(3), marks=EXHAUSTIVE)]
)
def test_pages_fit_the_widths_of_screens(html, screens):
    checks = runpy.run_path(str(DOCS / "check_pages.py"))
    widths = checks["WIDTHS"][screens]  # In the full tier, all but the tablet's.
    browser = checks["find_browser"]()
    if browser is None:
        pytest.skip("no Chromium is installed")
    assert checks["find_overflows"](html, browser, widths) == []
