"""Every Python block of the documentation runs, in the order of its page.

`test_example_programs.py` runs the programs that pages show.
"""

import pytest

from tests.docs.run_without_tools import DOCS, SYBIL
from tests.tiers import quick_cases


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
