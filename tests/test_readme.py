"""The README's example runs as it is printed, its links lead somewhere, it is short."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_example_runs():
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 1
    names = {}
    exec(compile(examples[0], "README.md", "exec"), names)
    assert names["loss"] < 0.69


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert links
    for link in links:
        assert (README.parent / link).is_file(), link
