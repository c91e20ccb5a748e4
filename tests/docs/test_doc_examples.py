"""Every Python block of the documentation runs, in the order of its page.

`test_example_programs.py` runs the programs that pages show.
"""

import doctest
import pathlib

import pytest
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

from tests.tiers import quick_cases

DOCS = pathlib.Path(__file__).parents[2] / "docs"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SYBIL = Sybil(parsers=[PythonCodeBlockParser(doctest_optionflags=FLAGS), SkipParser()])


def documents():
    for path in sorted(DOCS.rglob("*.md")):
        page = path.relative_to(DOCS)
        if "_build" in page.parts or path.with_suffix(".py").exists():
            continue
        if "python" in path.read_text():
            document = SYBIL.parse(path)
            if list(document.examples()):
                yield pytest.param(document, id=str(page))


@pytest.mark.parametrize(
    "document",
    quick_cases(
        documents(),
        "quickstart.md",
        every_case=True,
    ),
)
def test_examples_run(document):
    for example in document.examples():
        example.evaluate()
