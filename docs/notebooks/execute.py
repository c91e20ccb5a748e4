"""Executes the notebooks of the documentation in place, and stores their outputs.

    python docs/notebooks/execute.py [NAME ...]

It needs the extra `dev`.
"""

import argparse
import pathlib
from typing import Final

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

DIRECTORY: Final = pathlib.Path(__file__).parent
NAMES: Final = sorted(path.stem for path in DIRECTORY.glob("*.ipynb"))


def read(name: str) -> nbformat.NotebookNode:
    """Returns a notebook as it is stored."""
    return nbformat.read(DIRECTORY / f"{name}.ipynb", as_version=4)


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
        execute(notebook)
        nbformat.write(notebook, DIRECTORY / f"{name}.ipynb")
        print(f"executed {name}")


if __name__ == "__main__":
    main()
