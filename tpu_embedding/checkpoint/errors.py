"""The error of this package."""

import contextlib
import os
from collections.abc import Iterator


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
