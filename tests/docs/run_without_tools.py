"""Runs pages and programs of `docs/` without `tpu_embedding.tools` and what it needs.

    python tests/docs/run_without_tools.py quickstart.md examples/serving.py

A file that imports anything of them fails. `scripts/check_wheel.sh` calls this program
with a package whose folder `tools/` has been deleted.
"""

import doctest
import importlib.util
import pathlib
import runpy
import sys

import jax
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

OF_TOOLS = ("matplotlib", "pyarrow", "tensorboardX")
DOCS = pathlib.Path(__file__).parents[2] / "docs"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SYBIL = Sybil(parsers=[PythonCodeBlockParser(doctest_optionflags=FLAGS), SkipParser()])


def main():
    sys.modules |= dict.fromkeys(OF_TOOLS)  # An import of them fails from here on.
    assert importlib.util.find_spec("tpu_embedding.tools") is None
    jax.config.update("jax_num_cpu_devices", 8)
    for name in sys.argv[1:]:
        if name.endswith(".py"):
            runpy.run_path(str(DOCS / name), run_name="__main__")
        else:
            run_page(DOCS / name)
        print(f"{name}: run")


def run_page(path):
    """Runs all Python blocks of a page, in their order."""
    examples = list(SYBIL.parse(path).examples())
    assert examples, path
    for example in examples:
        example.evaluate()


if __name__ == "__main__":
    main()
