"""The errors of checkpoints."""

import contextlib
import os
import urllib.parse
from collections.abc import Iterator
from typing import Final

from etils import epath

_OTHER_COPY: Final = "Restore an earlier checkpoint, or copy the file again."


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing, damaged, or does not fit the state.

    It names the checkpoint, the file or table, and the way out.
    """


class DamagedCheckpointError(CheckpointError):
    """Raised if a file of a checkpoint is missing, or not as it was written."""


class UnwritableCheckpointError(CheckpointError):
    """Raised if a checkpoint cannot be written, for example on a full disk."""


@contextlib.contextmanager
def errors_of_writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises `UnwritableCheckpointError` if a checkpoint cannot be written.

    Args:
      path: the checkpoint.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # tensorstore and orbax raise all of them for a full disk.
        text = str(error).partition(" [")[0].partition("\n")[0].rstrip(". ")
        raise UnwritableCheckpointError(
            f"The checkpoint {path} cannot be written: {type(error).__name__}: {text}. "
            "Make room on the disk, or give a directory that can be written."
        ) from error


def damaged(path: epath.Path, problem: str) -> DamagedCheckpointError:
    """Returns the error for a file whose size or digest disagrees.

    Args:
      path: the file.
      problem: continues the sentence after the file's name.
    """
    return DamagedCheckpointError(
        f"The file {_with_owner(path)} is damaged: {problem}. {_OTHER_COPY}"
    )


def unreadable(path: epath.Path, error: Exception) -> CheckpointError:
    """Returns the error for a file that is missing, or could not be read.

    Args:
      path: the file.
      error: raised by the system.
    """
    if isinstance(error, FileNotFoundError):
        return DamagedCheckpointError(
            f"The file {_with_owner(path)} is missing. {_OTHER_COPY}"
        )
    text = str(error).partition(" [source")[0].partition("\n")[0]
    return CheckpointError(
        f"The file {_with_owner(path)} cannot be read: {type(error).__name__}: {text}. "
        "Check the permissions and the disk, and restore again."
    )


def _with_owner(path: epath.Path) -> str:
    """Returns a path, and the table that its file belongs to."""
    for part in path.parts:
        table, dot, rest = part.partition(".")
        if dot and (rest == "values" or rest.startswith(("slots.", "directory."))):
            return f"{path} of table {urllib.parse.unquote(table)!r}"
    return str(path)
