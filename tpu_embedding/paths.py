"""Reads paths that users pass to commands and functions, and replaces files."""

import os
import pathlib
import uuid
from typing import Any, TypeGuard


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a local path with `~` expanded.

    Args:
      path: the user's path; it may be relative.

    Example:
      >>> local_path("runs/../tables/").as_posix()
      'runs/../tables'
      >>> local_path("~/tables") == pathlib.Path.home() / "tables"
      True
    """
    return pathlib.Path(os.path.expanduser(path))


def is_local_path(value: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Returns True for a local path, not for a URL or another value.

    Example:
      >>> is_local_path("clicks/day_0"), is_local_path("gs://bucket/clicks")
      (True, False)
    """
    return isinstance(value, str | os.PathLike) and "://" not in os.fspath(value)


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a text in UTF-8, completely or not at all.

    Raises:
      OSError: if the text can't be written, for example because the disk is full. The
        error names the file. An existing file is then unchanged.
    """
    path = pathlib.Path(os.path.realpath(path))
    unfinished = path.with_name(f".{uuid.uuid4().hex}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
