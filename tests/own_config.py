"""The config of `docs/guides/own_model.md`, and files of it with one change each."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "own_model.md"
TEXT = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


def write_config(directory, *changes):
    """Writes `clicks.py` and `clicks.csv`; returns the path of the former.

    Args:
      directory: the folder.
      *changes: pairs of a piece of the config's text and its replacement.
    """
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = directory / "clicks.py"
    path.write_text(text)
    write_clicks(directory / "clicks.csv")
    return path


def write_clicks(path, num_lines=300, label=None):
    """Writes a CSV file; `label` is that of its last line."""
    lines = [f"{i % 7},{i % 5},{i % 2}" for i in range(num_lines)]
    if label is not None:
        lines[-1] = f"0,0,{label}"
    path.write_text("\n".join(["user,item,click", *lines]) + "\n")
