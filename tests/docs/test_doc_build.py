"""The documentation builds without a warning, and shows every public name."""

import inspect
import pathlib
import subprocess
import sys

import pytest
from sphinx.util.inventory import InventoryFile

import tpu_embedding
from tpu_embedding import aot, functional, optimizers

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PUBLIC = (tpu_embedding, optimizers, aot)


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    directory = tmp_path_factory.mktemp("html")
    options = ("-W", "--keep-going", "-q", "-b", "html")
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return directory


def public_names(module):
    for name, value in vars(module).items():
        if not name.startswith("_") and not inspect.ismodule(value):
            yield f"{module.__name__}.{name}"


def test_every_public_name_is_in_the_reference(html):
    inventory = InventoryFile.loads((html / "objects.inv").read_bytes(), uri="")
    documented = {
        name
        for domain, items in inventory.data.items()
        if domain.startswith("py:")
        for name in items
    }
    expected = {name for module in PUBLIC for name in public_names(module)}
    expected |= {
        name
        for name in public_names(functional)
        if getattr(vars(functional)[name.rpartition(".")[2]], "__module__", None)
        == functional.__name__
    }
    assert expected - documented == set()


def test_pages_need_no_network(html):
    for page in html.rglob("*.html"):
        text = page.read_text()
        for tag in ('<script src="http', '<link rel="stylesheet" href="http'):
            assert tag not in text, page
