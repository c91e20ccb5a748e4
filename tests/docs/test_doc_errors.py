"""Messages that the documentation quotes are messages of the code.

In `docs/troubleshooting.md` a heading of code quotes an error. The first cell of a
table quotes an error in `docs/guides/launching.md`, and a part of the report in
`docs/guides/compile_report.md`. Three dots stand for what the message fills in.
"""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FIGURES = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)
QUOTES = {
    "troubleshooting.md": re.compile(r"^#+ `(.+)`$", re.MULTILINE),
    "guides/launching.md": re.compile(r"^\| `([^`]+ [^`]+)` \|", re.MULTILINE),
    "guides/compile_report.md": re.compile(r"^\| `([^`]+)` \|", re.MULTILINE),
}


def quotes():
    for page, pattern in QUOTES.items():
        text = FIGURES.sub("", (ROOT / "docs" / page).read_text())
        found = pattern.findall(text)
        assert found, page
        yield from (pytest.param(quote, id=quote) for quote in found)


@functools.cache
def messages():
    """Returns all strings of the package; what an f-string fills in is a NUL."""
    found = []
    for path in (ROOT / "tpu_embedding").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else "\0"
                    for part in node.values
                )
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("quote", quotes())
def test_quoted_message_is_in_the_code(quote):
    pattern = re.compile(".*".join(map(re.escape, quote.split("..."))), re.DOTALL)
    assert any(pattern.search(message) for message in messages())
