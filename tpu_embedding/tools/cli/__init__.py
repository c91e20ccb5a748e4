"""The command `tpu-embedding`.

* `command`: parses the command line, runs a command, turns errors into exit statuses.
* `train`: the commands `train` and `evaluate`. `compile`, `export`,
  `inspect` and `doctor` have one command each.
* `arguments`: what several commands share.
"""

from collections.abc import Sequence as _Sequence


def main(arguments: _Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; see `command.main`."""
    from tpu_embedding.tools.cli import command

    return command.main(arguments)
