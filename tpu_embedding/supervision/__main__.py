"""Runs the parent process, as a file: `python -I .../supervision/__main__.py`.

An import of this package's top level would import jax. So the file makes a package of
the same name that has a path and no content.
"""

import pathlib
import sys
import types


def _main() -> int:
    package = types.ModuleType("tpu_embedding")
    package.__path__ = [str(pathlib.Path(__file__).resolve().parents[1])]
    sys.modules["tpu_embedding"] = package
    from tpu_embedding.supervision.parent import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
