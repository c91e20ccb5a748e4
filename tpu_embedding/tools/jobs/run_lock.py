"""The lock file of a run's directory, which keeps a second run out of it.

The file names the process that holds it. Two rules decide if the lock counts:

* On the host that wrote the file, the operating system decides. It frees the lock of a
  process that ends, in whatever way, so a killed run leaves nothing to clean up.
* On another host, the file counts as long as it exists. A host cannot know if a process
  of another one still runs, so only the user can delete the file.
"""

import contextlib
import datetime
import fcntl
import functools
import json
import os
import pathlib
import platform
from collections.abc import Iterator
from typing import IO, Any

from tpu_embedding.file_locks import locked_file


class RunDirectoryError(ValueError):
    """Raised if a run cannot start in its output directory."""


@contextlib.contextmanager
def run_lock(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock file while the block runs, and deletes it afterwards.

    Args:
      path: path of the lock file, whose directory exists.

    Raises:
      RunDirectoryError: if another process holds it, or may hold it.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.lock"
      >>> with run_lock(path):
      ...     json.loads(path.read_text())["pid"] == os.getpid()
      True
      >>> path.exists()
      False
    """
    with locked_file(path, functools.partial(_acquire, path=path)) as file:
        file.seek(0)
        file.truncate()
        started = datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
        holder = {"pid": os.getpid(), "host": platform.node(), "started": started}
        file.write(json.dumps(holder) + "\n")
        file.flush()
        yield


def check_unlocked(path: pathlib.Path) -> None:
    """Raises `RunDirectoryError` if a process holds a lock file; writes nothing.

    Args:
      path: path of the lock file, which need not exist.
    """
    with contextlib.suppress(FileNotFoundError), path.open("r+") as file:
        _acquire(file, path)


def _acquire(file: IO[str], path: pathlib.Path) -> None:
    """Locks an open file, or raises an error that names its holder."""
    locked: bool | None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except BlockingIOError:
        locked = False
    except OSError:  # Some network file systems have no locks; there, the file counts.
        locked = None
    file.seek(0)
    holder = _parse(file.read())
    if locked is False or (
        holder and (locked is None or holder.get("host") != platform.node())
    ):
        way_out = "Wait for it to end, or choose another --output-dir."
        if locked is not False:
            way_out = f"If that process has ended, delete {path}."
        raise RunDirectoryError(
            f"{path.parent} is in use by process {holder.get('pid')} on host "
            f"{holder.get('host')}, since {holder.get('started')}. {way_out}"
        )


def _parse(text: str) -> dict[str, Any]:
    """Returns the holder that a lock file names; {} if it was not written whole."""
    try:
        holder = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return holder if isinstance(holder, dict) else {}
