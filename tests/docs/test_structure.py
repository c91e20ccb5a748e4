"""The page about the structure names the folders that import-linter knows, in order."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "concepts" / "structure.md").read_text()


def layers(container):
    """Returns the modules of each layer, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract.get("containers") == [container]
    )
    return [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]


def rows(title):
    """Returns the names in the first column of a section's table, row by row."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [re.findall(r"`(?:tools/)?(\w+)/?`", cell) for cell in cells]


def check_order(table, order):
    level = {name: i for i, layer in enumerate(order) for name in layer}
    names = [name for row in table for name in row]
    assert set(names) == set(level)
    assert [level[name] for name in names] == sorted(level[name] for name in names)


def test_tables_have_the_order_of_imports():
    check_order(rows("The library, from top to bottom"), layers("tpu_embedding")[1:])
    check_order(rows("The tools"), layers("tpu_embedding.tools"))


def test_files_exist():
    files = re.findall(r"`([\w/]+(?:\.py|/))`", PAGE)
    assert len(files) > 20
    for file in files:
        folders = ("tpu_embedding", "tpu_embedding/optimizers", "tpu_embedding/rows")
        assert any((ROOT / folder / file).exists() for folder in folders), file
