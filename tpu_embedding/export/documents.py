"""Creates an export's directory, and checks its `export.json` and file digests.

Exports may come from untrusted sources, so names in a document never become file paths.
Files have fixed names or are found by listing the directory, and their digests must
match.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import pathlib
import shutil
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
from jax.experimental import multihost_utils

import tpu_embedding
from tpu_embedding.argument_checks import invalid
from tpu_embedding.export.program_inputs import ExportError, Signature
from tpu_embedding.paths import local_path
from tpu_embedding.strings.string_ids import VOCABULARIES_DIR


@contextlib.contextmanager
def new_directory(directory: str | pathlib.Path) -> Iterator[pathlib.Path | None]:
    """Yields a directory to fill, and renames it at the end.

    All processes of a job must call this together. The first gets a directory, and all
    other processes get None. If the first process fails, the job ends.

    Raises:
      ExportError: if the directory holds files or cannot be written.
    """
    if jax.process_index() == 0:
        path = local_path(directory).resolve()
        # The partial directory is in the same folder, because a rename can't cross file
        # systems. Its unique name keeps several writers of one path apart: the first to
        # rename wins. Only a killed process leaves the partial directory on disk. Files
        # are not flushed, because digests reveal a file that a crash cut off.
        partial = path.with_name(f".export-{uuid.uuid4().hex}.partial")
        try:
            check_new_directory(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
            yield partial
            partial.rename(path)  # Replaces only an empty directory.
        except OSError as error:
            # If another writer was faster, this raises a clearer error than the rename.
            check_new_directory(path)
            raise ExportError(
                f"{path} cannot be written, so the partial export was removed: "
                f"{error}. Free disk space, or export to another directory."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    else:
        yield None
    # No process returns before the directory exists.
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("end of an export")


def check_new_directory(path: pathlib.Path) -> None:
    """Raises ExportError if a path exists and is not an empty directory."""
    try:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return
        problem = "it already exists"
    except OSError as error:
        problem = str(error)
    raise ExportError(
        f"{path} must be a new directory, but {problem}. Choose another name."
    )


DOCUMENT_FILE: Final = "export.json"
PROGRAM_FILE: Final = "program.stablehlo"
DENSE_FILE: Final = "dense.safetensors"

MAX_DOCUMENT_BYTES: Final = 2**23
"""Maximum size, enough for 50,000 tables. Parsing takes 25 times as much memory."""

_SUFFIXES: Final = (".safetensors", ".stablehlo")
AGAIN: Final = "Export the model again, or copy the whole directory again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportDocument:
    """The content of `export.json`."""

    # SHA-256 by path, for every file except documents.
    files: dict[str, str]
    # None if the export has only tables.
    signature: Signature | None
    written: str
    versions: dict[str, str]
    format: str = "tpu_embedding.export 5"


def write_document(directory: pathlib.Path, signature: Signature | None = None) -> None:
    """Writes the document. All other files must already exist."""
    versions = {"tpu_embedding": tpu_embedding.__version__, "jax": jax.__version__}
    document = ExportDocument(
        files=digests_of_files(directory),
        signature=signature,
        written=str(datetime.datetime.now(datetime.UTC).date()),
        versions=versions,
    )
    text = json.dumps(dataclasses.asdict(document), indent=2) + "\n"
    (directory / DOCUMENT_FILE).write_text(text, encoding="utf-8")


def read_document(directory: pathlib.Path) -> ExportDocument:
    """Reads the document, or raises ExportError."""
    path = directory / DOCUMENT_FILE
    # Opening a pipe would block forever.
    if path.is_symlink() or not path.is_file():
        rule = f"be a directory written by te.export, with a regular file {path.name}"
        raise ExportError(f"{directory} must {rule}.")
    try:
        with path.open("rb") as file:
            # The limit bounds the memory that a forged document can take. One more byte
            # shows if the document exceeds it.
            content = file.read(MAX_DOCUMENT_BYTES + 1)
        if len(content) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"it must have at most {MAX_DOCUMENT_BYTES} bytes")
        document = ExportDocument(**json.loads(content.decode()))
        if document.format != ExportDocument.format:
            raise ValueError(
                f"format must be {ExportDocument.format!r}, got {document.format!r}"
            )
        if not all(isinstance(digest, str) for digest in document.files.values()):
            raise ValueError("files must map each file's path to its SHA-256")
        signature: Any = document.signature
        if signature is not None:
            signature = Signature.of_json(signature)
        return dataclasses.replace(document, signature=signature)
    except Exception as error:  # A damaged document may raise anything.
        problem = (str(error) or type(error).__name__)[:300]
        raise ExportError(f"{path} cannot be read: {problem}. {AGAIN}") from None


def files_of(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Lists files by path, except documents. Links and pipes raise ExportError."""
    found = {}
    for path in sorted(directory.rglob("*")):
        # A link may lead out of the directory, and reading a pipe may block forever.
        is_link = path.is_symlink()
        if is_link or not (path.is_file() or path.is_dir()):
            kind = "symbolic link" if is_link else "special file"
            fix = "If you trust its links, copy the files that they lead to."
            rule = "be a file or directory"
            raise invalid(str(path), rule, kind, fix, ExportError)
        if not path.is_dir() and (
            path.suffix in _SUFFIXES or path.parent.name == VOCABULARIES_DIR
        ):
            found[path.relative_to(directory).as_posix()] = path
    return found


def digests_of_files(directory: pathlib.Path) -> dict[str, str]:
    digests = {}
    for name, path in files_of(directory).items():
        with path.open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def check_files(
    directory: pathlib.Path, files: Mapping[str, str], owner: str = ""
) -> None:
    """Compares files with digests. Errors name `owner`, by default the directory."""
    try:
        found = digests_of_files(directory)
    except OSError as error:
        raise ExportError(f"{directory} cannot be read: {error}. {AGAIN}") from None
    if found != files:
        differ = [k for k in {*found, *files} if found.get(k) != files.get(k)]
        raise ExportError(
            f"The files {sorted(differ)} of {owner or directory} must have the SHA-256 "
            f"listed in {DOCUMENT_FILE}. {AGAIN}"
        )
