"""Reads paths that users pass to commands and functions."""

import os
import pathlib
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
