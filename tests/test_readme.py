"""The README's example runs as it is printed."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_example_runs():
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 1
    names = {}
    exec(compile(examples[0], "README.md", "exec"), names)
    assert names["loss"] < 0.69
