"""The command `tpu-embedding`.

`command` parses the command line, `arguments` has the options that subcommands share,
and the other modules have the subcommands. The `--help` texts are the docstrings of
command classes and their fields.
"""

from collections.abc import Sequence as _Sequence


def main(arguments: _Sequence[str] | None = None) -> int:
    """Runs the command; see `command.main`."""
    from tpu_embedding.tools.cli import command

    return command.main(arguments)
