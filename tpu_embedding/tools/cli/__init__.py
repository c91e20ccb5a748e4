"""The command `tpu-embedding`. `command` parses it, and `arguments` is shared.

The other modules have the subcommands. Docstrings of command classes and their fields
are the `--help` texts.
"""

from collections.abc import Sequence as _Sequence


def main(arguments: _Sequence[str] | None = None) -> int:
    """Runs the command; see `command.main`."""
    from tpu_embedding.tools.cli import command

    return command.main(arguments)
