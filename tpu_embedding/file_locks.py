"""Locks on files, which the operating system frees when their process ends.

A killed process therefore leaves nothing to clean up, although its file stays.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from typing import IO


def lock(file: IO[str]) -> None:
    """Locks an open file until it is closed, where the file system has locks.

    Raises:
      BlockingIOError: if the file is locked, by this process or another one.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # Some network file systems have no locks.


@contextlib.contextmanager
def locked_file(
    path: str | os.PathLike[str], lock: Callable[[IO[str]], None] = lock
) -> Iterator[IO[str]]:
    """Holds a lock file while the block runs, and deletes it afterwards.

    Args:
      path: path of the lock file, whose directory exists.
      lock: locks the open file, or raises an error.

    Yields:
      The open file.
    """
    with _open_newest(path, lock) as file:
        try:
            yield file
        finally:
            # While it is still locked, so that nobody's file is deleted instead.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _open_newest(
    path: str | os.PathLike[str], lock: Callable[[IO[str]], None]
) -> IO[str]:
    """Returns the file at a path, open and locked."""
    while True:
        file = open(path, "a+")
        try:
            lock(file)
            is_newest = _is_at(file, path)
        except BaseException:
            file.close()
            raise
        if is_newest:
            return file
        # The last holder deleted the file after it was opened here.
        file.close()


def _is_at(file: IO[str], path: str | os.PathLike[str]) -> bool:
    """Returns True if the open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
