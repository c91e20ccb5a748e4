"""Reads and writes the JSON documents in the directories of exports and deltas."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tpu_embedding.export.signature import ExportError


def write_json(path: pathlib.Path, document: Mapping[str, Any]) -> None:
    """Writes a whole document; an older one stays until the new one is complete."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(
    path: pathlib.Path, *, format_version: int, writer: str, way_out: str
) -> dict[str, Any]:
    """Returns a document.

    Args:
      path: place of the file.
      format_version: the version that this release reads.
      writer: names the call that writes such directories, for the error.
      way_out: end of the error about a file that is no document.

    Raises:
      ExportError: if the file is missing, damaged, or of another version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document["format_version"]
    except FileNotFoundError:
        raise ExportError(
            f"{path.parent} must be a directory that {writer} wrote, but it has no "
            f"{path.name}."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{path} cannot be read: {error}; {way_out}") from None
    if version != format_version:
        raise ExportError(
            f"{path} must have format_version {format_version}, got {version}; read it "
            "with the release of tpu_embedding that wrote it, or write it again."
        )
    return document
