"""The document `export.json` of an export, and the digests of its files.

Exports come from elsewhere. No name in a document becomes the path of a file: files
have fixed names or are those that lie in the directory, and are then compared with the
digests in the document.
"""

import dataclasses
import datetime
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Final

import jax

import tpu_embedding
from tpu_embedding.export.signature import ExportError, Signature
from tpu_embedding.strings.vocabulary_files import VOCABULARIES_DIR

DOCUMENT_FILE: Final = "export.json"
PROGRAM_FILE: Final = "program.stablehlo"
DENSE_FILE: Final = "dense.safetensors"

_SUFFIXES: Final = (".safetensors", ".stablehlo")
_AGAIN: Final = "export the model again, or copy the whole directory again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportDocument:
    """The content of `export.json`.

    Attributes:
      files: path of each other file to its SHA-256.
      signature: inputs of the program; None for tables alone.
      written: day, in ISO format.
      versions: of the libraries that wrote it.
    """

    files: dict[str, str]
    signature: Signature | None
    written: str
    versions: dict[str, str]
    format: str = "tpu_embedding.export 5"


def write_document(directory: pathlib.Path, signature: Signature | None = None) -> None:
    """Writes the document of an export whose other files are all written.

    Args:
      directory: the export.
      signature: see `ExportDocument`.
    """
    document = ExportDocument(
        files=digests_of_files(directory),
        signature=signature,
        written=str(datetime.datetime.now(datetime.UTC).date()),
        versions={
            "tpu_embedding": tpu_embedding.__version__,
            "jax": jax.__version__,
        },
    )
    text = json.dumps(dataclasses.asdict(document), indent=2) + "\n"
    (directory / DOCUMENT_FILE).write_text(text, encoding="utf-8")


def read_document(directory: pathlib.Path) -> ExportDocument:
    """Returns the document of an export.

    Raises:
      ExportError: if the directory holds none that this release reads.
    """
    path = directory / DOCUMENT_FILE
    if not path.is_file():
        raise ExportError(
            f"{directory} must be a directory that te.export.save wrote, but it has no "
            f"{path.name}."
        )
    try:
        document = ExportDocument(**json.loads(path.read_text(encoding="utf-8")))
        if document.format != ExportDocument.format:
            raise ValueError(
                f"format must be {ExportDocument.format!r}, got {document.format!r}"
            )
        signature: Any = document.signature
        return dataclasses.replace(
            document,
            signature=signature and Signature.of_json(signature),
            files=dict(document.files),
        )
    except (LookupError, TypeError, ValueError, RecursionError, OSError) as error:
        problem = str(error) or type(error).__name__
        raise ExportError(f"{path} cannot be read: {problem}; {_AGAIN}") from None


def file_digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the files of an export or delta beside its documents, by path."""
    return {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        and (path.suffix in _SUFFIXES or path.parent.name == VOCABULARIES_DIR)
    }


def digests_of_files(directory: pathlib.Path) -> dict[str, str]:
    """Returns path and SHA-256 of each file of `files_of`."""
    return {name: file_digest(path) for name, path in files_of(directory).items()}


def check_files(directory: pathlib.Path, files: Mapping[str, str]) -> None:
    """Compares the files of an export with their digests.

    Args:
      directory: the export.
      files: path of each file to its SHA-256.

    Raises:
      ExportError: if a file is missing, another one, or has no digest.
    """
    found = digests_of_files(directory)
    if found != files:
        differ = [k for k in {*found, *files} if found.get(k) != files.get(k)]
        raise ExportError(
            f"The files {sorted(differ)} of {directory} must have the SHA-256 that "
            f"{DOCUMENT_FILE} lists; {_AGAIN}"
        )
