"""Options of a command that take several values."""

import argparse
from collections.abc import Sequence
from typing import Any


class AllValues(argparse.Action):
    """Keeps the values of every use of an option: `--a 1 2`, or `--a 1 --a 2`.

    argparse itself keeps the last use only; its action `extend` adds to the default.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Adds the values of one use; the first use replaces the default."""
        del parser, option_string
        earlier = getattr(namespace, self.dest)
        earlier = [] if earlier is self.default else earlier
        setattr(namespace, self.dest, [*earlier, *(values or ())])
