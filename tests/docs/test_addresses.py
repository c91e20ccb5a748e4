"""No file sends its reader to an address or a package that does not exist yet."""

import re

from tests.docs.test_doc_examples import DOCS

ROOT = DOCS.parent
FILES = [
    path
    for pattern in ("*.md", "*.toml", "*.cff", "docs/**/*.md", "docs/**/*.py")
    + ("docs/**/*.ipynb", "scripts/*", "benchmarks/**/*.py", "tpu_embedding/**/*.py")
    for path in sorted(ROOT.glob(pattern))
    if "_build" not in path.parts
]
UNKNOWN = re.compile(r"[/:]tpu-embedding/tpu-embedding|install\b.*?tpu-embedding\[")


def test_files_are_found():
    names = {path.name for path in FILES}
    assert {"README.md", "CITATION.cff", "ranking.ipynb", "extras.py"} <= names


def test_addresses_exist():
    found = [str(p) for p in FILES if UNKNOWN.search(p.read_text("utf-8"))]
    assert not found
