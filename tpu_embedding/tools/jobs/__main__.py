"""Runs the parent process, as a file: `python -I .../__main__.py SETTINGS`.

The isolated interpreter finds no package, unless it is installed. So the file makes a
package of the same name that has a path and no content.
"""

import pathlib
import sys
import types


def _main() -> int:
    package = types.ModuleType("tpu_embedding")
    package.__path__ = [str(pathlib.Path(__file__).resolve().parents[2])]
    sys.modules["tpu_embedding"] = package
    from tpu_embedding.tools.jobs.parent import main

    return main(sys.argv[1])


if __name__ == "__main__":
    sys.exit(_main())
