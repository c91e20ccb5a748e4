"""Lines on the screen or in a log, which outlive their terminal, pipe or parent.

A run that loses its terminal gets SIGHUP and saves its state. What it prints on the way
cannot be written any more, which must not end it.
"""

import contextlib
import os
import sys
from typing import TextIO


def print_line(text: str, file: TextIO | None = None) -> None:
    """Prints a line at once, or drops it if it cannot be written.

    Args:
      text: text of the line.
      file: text file; None stands for stdout.

    Example:
      >>> print_line("step 1")
      step 1
    """
    with contextlib.suppress(OSError):
        print(text, file=file, flush=True)


def drop_unwritten() -> None:
    """Drops what stdout and stderr still hold if it cannot be written.

    Python would try again at its exit, and replace the exit status by 120.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
