"""Runs the example pages without `tpu_embedding.tools` and what only the tools need.

    python tests/docs/run_without_tools.py quickstart examples/serving

A page that imports anything of them fails. `scripts/check_wheel.sh` calls this program
with a package whose folder `tools/` has been deleted.
"""

import doctest
import importlib.util
import pathlib
import sys

import jax
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

OF_TOOLS = ("grain", "matplotlib", "pyarrow", "tensorboardX")
DOCS = pathlib.Path(__file__).parents[2] / "docs"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def main():
    sys.modules |= dict.fromkeys(OF_TOOLS)  # An import of them fails from here on.
    assert importlib.util.find_spec("tpu_embedding.tools") is None
    jax.config.update("jax_num_cpu_devices", 8)
    sybil = Sybil(
        parsers=[PythonCodeBlockParser(doctest_optionflags=FLAGS), SkipParser()]
    )
    for page in sys.argv[1:]:
        examples = list(sybil.parse(DOCS / f"{page}.md").examples())
        assert examples, page
        for example in examples:
            example.evaluate()
        print(f"{page}: {len(examples)} blocks run")


if __name__ == "__main__":
    main()
