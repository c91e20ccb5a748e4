"""Puts a command under the parent process, which starts it as a worker."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

from tpu_embedding.tools.jobs.exit_status import STOP_SIGNALS

_IGNORED_BY_LIBTPU: Final = (signal.SIGHUP, signal.SIGPROF)

_PARENT: Final = str(pathlib.Path(__file__).with_name("__main__.py"))


def run_under_parent(
    arguments: Sequence[str], *, is_program: bool, **settings: Any
) -> int:
    """Replaces this process by a parent that runs `tpu-embedding` as a worker.

    A command that was called as a function runs the parent as a process of its own.

    Args:
      arguments: command line of a worker, without the program.
      is_program: True if this process is the program, not a caller of its function.
      **settings: settings of the parent; see `parent.Settings`.

    Returns:
      The exit status of the parent.
    """
    settings["command"] = [*_program(is_program), *arguments]
    command = [sys.executable, "-I", _PARENT, json.dumps(settings)]
    if not is_program:
        _put_back_ignored_signals()
        return subprocess.run(command).returncode
    sys.stdout.flush()
    sys.stderr.flush()
    # A new program has the default handlers. The parent unblocks once it has its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.execv(command[0], command)


def _program(is_program: bool) -> Sequence[str]:
    """Returns the command line of this program without the arguments.

    The program is that of the user, so that the workers import what it imports.
    """
    if not is_program:
        return [sys.executable, "-m", "tpu_embedding.tools.cli"]
    _, *start = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    return [sys.executable, *start]


def _put_back_ignored_signals() -> None:
    """Gives the signals that libtpu ignores their default, for the parent's process.

    libtpu ignores them when it is loaded, which Python does not know, and the parent
    and the workers would inherit that. A signal that this process has ignored since its
    start stays ignored, such as SIGHUP under `nohup`.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _IGNORED_BY_LIBTPU:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
