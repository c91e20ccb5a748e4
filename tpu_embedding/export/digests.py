"""Digests of the files of an export, which tell damage before the files are served.

`export.json` holds the SHA-256 of each other file, under `files`. `sha256sum` prints
the same digits.
"""

import hashlib
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, Final

from tpu_embedding.export.document_schemas import is_plain_path
from tpu_embedding.export.signature import ExportError

DOCUMENT_FILE: Final = "export.json"

_WAY_OUT: Final = (
    "export the model again, or copy the whole directory again from where it was "
    "written. With verify=False the files are read as they are."
)


def file_digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_of_files(directory: pathlib.Path) -> dict[str, str]:
    """Returns the digest of each file of an export but its document, by its path."""
    names = files_of_directory(directory)
    return {name: file_digest(directory / name) for name in names}


def files_of_directory(directory: pathlib.Path) -> list[str]:
    """Returns the paths of the files of an export but its document.

    Args:
      directory: the export; subdirectories are listed, too.
    """
    paths = (path for path in directory.rglob("*") if path.is_file())
    names = (path.relative_to(directory).as_posix() for path in paths)
    return sorted(name for name in names if name != DOCUMENT_FILE)


def check_files(
    directory: pathlib.Path,
    document: Mapping[str, Any],
    *,
    skipped: Collection[str] = (),
    way_out: str = _WAY_OUT,
) -> None:
    """Compares the files of an export with the digests in its document.

    Args:
      directory: the export.
      document: the result of `read_document`.
      skipped: paths of files that are not compared.
      way_out: end of the error.

    Raises:
      ExportError: if a file is missing or another one, or lies elsewhere.
    """
    for name, digest in document["files"].items():
        if name not in skipped:
            check_file(path_inside(directory, name), digest, way_out)


def path_inside(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file of an export or delta.

    Args:
      directory: the export or delta.
      name: path of the file in the directory, from a document.

    Raises:
      ExportError: if the file lies outside of the directory, also by a symbolic link.
    """
    path = directory / name
    try:
        is_inside = path.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, or no path at all
        is_inside = False
    if not (is_inside and is_plain_path(name)):
        raise ExportError(
            f"{directory} must name files inside of it only, got {name!r}, which leads "
            "elsewhere; copy the whole directory again from where it was written."
        )
    return path


def check_file(path: pathlib.Path, wanted: str, way_out: str) -> None:
    """Compares a file of an export or delta with its digest.

    Args:
      path: the file.
      wanted: SHA-256 that the document has of the file.
      way_out: end of the error.

    Raises:
      ExportError: if the file is missing or another one.
    """
    if not path.is_file():
        raise ExportError(f"{path} is missing; {way_out}")
    found = file_digest(path)
    if found != wanted:
        raise ExportError(
            f"{path} cannot be read as it was written: its SHA-256 must be {wanted}, "
            f"got {found}; {way_out}"
        )
