"""The command `tpu-embedding`.

`command` parses the command line, and `arguments` has the options that subcommands
share. Each subcommand has its own module. The `--help` texts are the docstrings of
command classes and their fields.
"""

from collections.abc import Sequence as _Sequence


def main(arguments: _Sequence[str] | None = None) -> int:
    """Runs the command; see `command.main`."""
    from tpu_embedding.tools.cli import command

    return command.main(arguments)
