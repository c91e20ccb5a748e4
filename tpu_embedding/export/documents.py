"""Reads and writes the JSON documents in the directories of exports and deltas."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tpu_embedding.checkpoint.imports.safetensors import object_of_pairs
from tpu_embedding.export.document_schemas import check_document
from tpu_embedding.export.signature import ExportError


def write_json(path: pathlib.Path, document: Mapping[str, Any]) -> None:
    """Writes a whole document; an older one stays until the new one is complete."""
    partial = path.with_name(f".{path.name}.partial")
    # A link of that name would lead the writing elsewhere.
    partial.unlink(missing_ok=True)
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(
    path: pathlib.Path, schema: Any, *, format_version: int, writer: str, way_out: str
) -> dict[str, Any]:
    """Returns a document whose fields were all checked.

    Args:
      path: place of the file.
      schema: fields of the document, see `document_schemas`.
      format_version: the version that this release reads.
      writer: names the call that writes such directories, for the error.
      way_out: end of the error about a file that is no document.

    Raises:
      ExportError: if the file is missing, damaged, or of another version.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text, object_pairs_hook=object_of_pairs)
        version = document["format_version"]
    except FileNotFoundError:
        raise ExportError(
            f"{path.parent} must be a directory that {writer} wrote, but it has no "
            f"{path.name}."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise ExportError(f"{path} cannot be read: {error!r}; {way_out}") from None
    if version != format_version or type(version) is not int:
        raise ExportError(
            f"{path} must have format_version {format_version}, got {version!r}; read "
            "it with the release of tpu_embedding that wrote it, or write it again."
        )
    check_document(document, schema, path, way_out)
    return document
