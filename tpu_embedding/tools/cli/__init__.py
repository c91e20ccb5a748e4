"""The command `tpu-embedding`.

* `command`: parses the command line, runs a command, turns errors into exit statuses.
* `train`: the commands `train`, `evaluate` and `predict`. `compile`, `export`,
  `inspect` and `doctor` have one command each.
* `arguments`: what several commands share.
"""

import gc as _gc
import sys as _sys
from collections.abc import Sequence as _Sequence

from tpu_embedding.extras import MissingExtraError as _MissingExtraError
from tpu_embedding.extras import require_extra as _require_extra


def main(arguments: _Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; see `command.main`.

    Checks for the extra `train` first, because all commands parse options with tyro.
    """
    try:
        _require_extra("train", "tyro", purpose="The command tpu-embedding")
    except _MissingExtraError as error:
        print(f"error: {error}", file=_sys.stderr)
        return 2
    is_program = arguments is None
    if is_program:
        _gc.disable()
    from tpu_embedding.tools.cli import command  # which imports tyro

    if is_program:  # Modules live until exit, so garbage collection can skip them.
        _gc.freeze()
        _gc.enable()
    return command.main(arguments)
