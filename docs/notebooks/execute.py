"""Executes the notebooks of the documentation in place, and stores their outputs.

    python docs/notebooks/execute.py [NAME ...]

It needs the extra `dev`. The first cells name the repository, from `pyproject.toml`.
"""

import argparse
import pathlib
import re
import tomllib
from typing import Final

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

DIRECTORY: Final = pathlib.Path(__file__).parent
NAMES: Final = sorted(path.stem for path in DIRECTORY.glob("*.ipynb"))
PLACEHOLDER: Final = "https://github.com/tpu-embedding/tpu-embedding"
"""Stands for the repository until `project.urls` of `pyproject.toml` names it."""

_REPOSITORY: Final = re.compile(r"(?<=@ git\+)[^\"]+")
_COLAB: Final = re.compile(
    r"(?<=\]\(https://colab\.research\.google\.com/github/).+(?=/blob/)"
)


def repository_url() -> str:
    """Returns the address of the repository, or a placeholder."""
    text = (DIRECTORY.parents[1] / "pyproject.toml").read_text()
    urls = tomllib.loads(text)["project"].get("urls", {})
    return urls.get("Repository", PLACEHOLDER).removesuffix("/")


def read(name: str) -> nbformat.NotebookNode:
    """Returns a notebook as it is stored."""
    return nbformat.read(DIRECTORY / f"{name}.ipynb", as_version=4)


def set_repository(notebook: nbformat.NotebookNode, url: str) -> None:
    """Writes the address of the repository into the badge and the first code cell."""
    owner_and_name = url.removeprefix("https://github.com/")
    badge, install = notebook.cells[:2]
    badge.source = _COLAB.sub(owner_and_name, badge.source)
    install.source = _REPOSITORY.sub(url, install.source)


def execute(notebook: nbformat.NotebookNode) -> None:
    """Runs all cells in a new kernel, and stores what they print and draw."""
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=300,
        record_timing=False,
        coalesce_streams=True,
        # Sockets of files: a kernel warns if it listens on a port.
        config=Config({"KernelManager": {"transport": "ipc"}}),
    ).execute()
    notebook.metadata = {
        "kernelspec": notebook.metadata["kernelspec"],
        "language_info": {"name": "python"},
    }


def main() -> None:
    """Executes the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", nargs="*", default=NAMES, help=", ".join(NAMES))
    for name in parser.parse_args().name:
        notebook = read(name)
        set_repository(notebook, repository_url())
        execute(notebook)
        nbformat.write(notebook, DIRECTORY / f"{name}.ipynb")
        print(f"executed {name}")


if __name__ == "__main__":
    main()
