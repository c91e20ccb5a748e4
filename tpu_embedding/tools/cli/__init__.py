"""The command `tpu-embedding`.

* `command`: parses the command line, runs a command, turns errors into exit statuses.
* `train`, `compile`, `inspect`, `export`, `doctor`: the commands.
* `inspect_ids`: what `inspect` shows of dynamic tables.
* `compilation_cache`: keeps the programs that `train` compiles.
* `arguments`: arguments that several commands share.
* `processes`: the options of `train` about its job and its parent process.
"""

import gc
import sys
from collections.abc import Sequence

from tpu_embedding.tools.jobs.early_signals import early_signals
from tpu_embedding.tools.jobs.exit_status import FAILED as FAILED
from tpu_embedding.tools.jobs.exit_status import INTERRUPTED as INTERRUPTED
from tpu_embedding.tools.jobs.exit_status import WRONG_USAGE as WRONG_USAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status, as `command.run_command` does.

    Args:
      arguments: command line without the program's name; None takes it from `sys.argv`.
    """
    if arguments is None and sys.argv[1:2] == ["train"]:
        early_signals.start()
    is_program = arguments is None
    if is_program:  # What imports make stays, so there is no garbage to look for.
        gc.disable()
    # It takes seconds, in which signals arrive, too.
    from tpu_embedding.tools.cli.command import run_command

    if is_program:
        gc.freeze()
        gc.enable()

    return run_command(arguments)
