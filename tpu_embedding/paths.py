"""Reads paths that users pass to commands and functions, and replaces files."""

import os
import pathlib
import uuid
from typing import Any, TypeGuard


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Expands `~` in a path from the user.

    Example:
      >>> local_path("runs/../tables/").as_posix()
      'runs/../tables'
      >>> local_path("~/tables") == pathlib.Path.home() / "tables"
      True
    """
    return pathlib.Path(os.path.expanduser(path))


def is_local_path(value: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Accepts local paths, but not URLs.

    Example:
      >>> is_local_path("clicks/day_0"), is_local_path("gs://bucket/clicks")
      (True, False)
    """
    return isinstance(value, str | os.PathLike) and "://" not in os.fspath(value)


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a text in UTF-8, completely or not at all; errors name the file."""
    # Replacing a link would leave the file that it points to unchanged.
    path = pathlib.Path(os.path.realpath(path))
    # Both files are in one folder, because renaming doesn't work across file systems.
    unfinished = path.with_name(f".{uuid.uuid4().hex}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Otherwise a crash could leave an empty file under the final name.
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
