"""The error of checkpoints, and the errors of libraries that become one."""

import contextlib
import os
from collections.abc import Iterator

_ERRORS_OF_FILES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of libraries, and of values that have another type than a save writes."""


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing, damaged, or does not fit the state.

    It names the checkpoint, the array or table, and what to do instead.
    """


@contextlib.contextmanager
def errors_of_writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises `CheckpointError` if a checkpoint cannot be written.

    Args:
      path: the checkpoint.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # tensorstore and orbax raise all of them for a full disk.
        raise CheckpointError(
            f"The checkpoint {path} cannot be written: {_first_words(error)}. "
            "Make room on the disk, give a directory that can be written, or convert "
            "a leaf whose dtype no file can hold."
        ) from error


@contextlib.contextmanager
def errors_of_reading(owner: str) -> Iterator[None]:
    """Raises `CheckpointError` if a file of a checkpoint is missing or damaged.

    Args:
      owner: the array or file, for the message.
    """
    try:
        yield
    except CheckpointError:
        raise
    except _ERRORS_OF_FILES as error:
        raise CheckpointError(
            f"{owner} is missing or damaged: {_first_words(error)}. Restore an earlier "
            "checkpoint, or copy the files again."
        ) from error


def _first_words(error: Exception) -> str:
    """Returns the type and first line of an error, without its line in a source."""
    text = str(error).partition(" [")[0].partition("\n")[0].rstrip(". ")
    return f"{type(error).__name__}: {text}"
