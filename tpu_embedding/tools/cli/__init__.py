"""The command `tpu-embedding`.

* `command`: parses the command line, runs a command, turns errors into exit statuses.
* `train`: the commands `train` and `evaluate`. `compile`, `export`,
  `inspect` and `doctor` have one command each.
* `arguments`: what several commands share.
"""

import gc as _gc
from collections.abc import Sequence as _Sequence


def main(arguments: _Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; see `command.main`."""
    is_program = arguments is None
    if is_program:
        _gc.disable()
    from tpu_embedding.tools.cli import command

    if is_program:  # Modules live until exit, so garbage collection can skip them.
        _gc.freeze()
        _gc.enable()
    return command.main(arguments)
