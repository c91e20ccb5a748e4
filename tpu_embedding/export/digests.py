"""Digests of the files of an export, which tell damage before the files are served.

`export.json` holds the SHA-256 of each other file, under `files`. `sha256sum` prints
the same digits.
"""

import hashlib
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, Final

from tpu_embedding.export.signature import ExportError

DOCUMENT_FILE: Final = "export.json"

_WAY_OUT: Final = (
    "copy the whole directory again from where it was written, or export the model "
    "again. Files that were changed on purpose are read with verify=False."
)


def file_digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_in(directory: pathlib.Path, name: str, way_out: str = _WAY_OUT) -> str:
    """Returns the SHA-256 of a file of an export or delta.

    Args:
      directory: the export or delta.
      name: path of the file in the directory.
      way_out: end of the error.

    Raises:
      ExportError: if the file is missing.
    """
    path = directory / name
    if not path.is_file():
        raise ExportError(f"{path} is missing; {way_out}")
    return file_digest(path)


def digests_of_files(directory: pathlib.Path) -> dict[str, str]:
    """Returns the digest of each file of an export but its document, by its path.

    Args:
      directory: the export; subdirectories are listed, too.
    """
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    names = {path: path.relative_to(directory).as_posix() for path in paths}
    return {
        name: file_digest(path) for path, name in names.items() if name != DOCUMENT_FILE
    }


def recorded_digests(
    directory: pathlib.Path, document: Mapping[str, Any]
) -> dict[str, str] | None:
    """Returns the digest of each file that an export's document holds, by its path.

    Earlier releases recorded the digests of tables only, and only until the first
    delta. Without digests, a warning says so.

    Args:
      directory: the export.
      document: the result of `read_document`.

    Returns:
      The digests, or None without any.
    """
    if "files" in document:
        return dict(document["files"])
    tables = document.get("deltas", {}).get("files")
    if tables is not None:
        return {document["tables"][name]["file"]: x for name, x in tables.items()}
    warnings.warn(
        f"{directory} was exported by a release that kept no digests of its files, so "
        "damage to them is not found; export the model again.",
        stacklevel=2,
    )
    return None


def check_file(
    directory: pathlib.Path,
    name: str,
    digests: Mapping[str, str],
    way_out: str = _WAY_OUT,
) -> None:
    """Compares a file of an export or delta with its digest.

    Args:
      directory: the export or delta.
      name: path of the file in the directory.
      digests: path of each file to its SHA-256, as the document has it.
      way_out: end of the error.

    Raises:
      ExportError: if the file is missing or another one.
    """
    wanted, found = digests.get(name), digest_in(directory, name, way_out)
    if found != wanted:
        raise ExportError(
            f"{directory / name} cannot be read as it was written: its SHA-256 must be "
            f"{wanted}, got {found}; {way_out}"
        )
