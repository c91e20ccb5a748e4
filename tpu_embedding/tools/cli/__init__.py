"""The command `tpu-embedding`.

* `command`: parses the command line, runs a command, turns errors into exit statuses.
* `train`: the commands `train` and `evaluate`. `compile`, `inspect`, `export`,
  `doctor`: one each.
* `arguments`: what several commands share.
"""

import gc as _gc
import sys as _sys
from collections.abc import Sequence as _Sequence

from tpu_embedding.extras import MissingExtraError as _MissingExtraError
from tpu_embedding.extras import require_extra as _require_extra


def main(arguments: _Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; see `command.main`.

    The extra `train` is checked first, as all commands parse their options by it.
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

    if is_program:  # Modules live to the end, so no collection needs to visit them.
        _gc.freeze()
        _gc.enable()
    return command.main(arguments)
