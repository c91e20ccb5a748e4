"""Puts the command `train` under a parent process, which watches and restarts it."""

import argparse
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

from tpu_embedding.cli.arguments import positive_int
from tpu_embedding.supervision import __main__ as parent_file
from tpu_embedding.supervision.pulses import is_worker


def add_supervision_arguments(parser: Any) -> None:
    """Adds the arguments that are the parent's, not the workers'."""
    parser.add_argument(
        "--restarts",
        type=positive_int,
        metavar="N",
        help="run under a parent process that starts a failed run again from its "
        "newest checkpoint, up to N times",
    )


def supervise(parsed: argparse.Namespace) -> int | None:
    """Replaces this process by a parent that runs the command, if there is to be one.

    A command that was called as a function runs the parent as a process of its own.

    Args:
      parsed: arguments of `train`, with the attributes that `main` adds: `given`, the
        whole command line, and `is_program`.

    Returns:
      The exit status of the parent; None if this process is to run the command.
    """
    if is_worker() or parsed.restarts is None:
        return None
    command = _parent_command(parsed)
    if not parsed.is_program:
        return subprocess.run(command).returncode
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _parent_command(parsed: argparse.Namespace) -> list[str]:
    own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_supervision_arguments(own)
    _, of_worker = own.parse_known_args(parsed.given)
    options = ["--restarts", str(parsed.restarts or 0)]
    parent = [sys.executable, "-I", str(pathlib.Path(parent_file.__file__)), *options]
    return [*parent, "--", *_program(parsed.is_program), *of_worker]


_MODULE: Final = ("-m", "tpu_embedding.cli")


def _program(is_program: bool) -> Sequence[str]:
    """Returns the command line of this program without the arguments.

    The program is that of the user, so that the workers import what it imports.
    """
    if not is_program:
        return [sys.executable, *_MODULE]
    _, *start = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    return [sys.executable, *start]
