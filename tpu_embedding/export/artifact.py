"""The directory of an export: its files, and the document that describes them.

export.json                 signature, tables, versions, compatibility, digests
program.stablehlo           the program, for `jax.export.deserialize`
dense.safetensors           dense parameters
tables/NAME.safetensors     one per table
saved_model.pb              in a SavedModel, in place of the other files
"""

import datetime
import pathlib
import shutil
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
import jax.export
import jaxlib.version

import tpu_embedding
from tpu_embedding.distributed.job import current_job
from tpu_embedding.export.digests import (
    DOCUMENT_FILE,
    digests_of_files,
    files_of_directory,
    path_inside,
)
from tpu_embedding.export.document_schemas import EXPORT
from tpu_embedding.export.documents import read_json, write_json
from tpu_embedding.export.layer_tables import LayerTable, TableBlock, read_tables
from tpu_embedding.export.row_formats import (
    RoundingError,
    RowFormat,
    encode,
)
from tpu_embedding.export.signature import ExportError
from tpu_embedding.export.tensor_files import TensorFile
from tpu_embedding.export.writing import Writing
from tpu_embedding.paths import local_path
from tpu_embedding.rows.id_directory import directory_name

PROGRAM_FILE: Final = "program.stablehlo"
DENSE_FILE: Final = "dense.safetensors"
SAVED_MODEL_FILE: Final = "saved_model.pb"
TABLES_DIR: Final = "tables"

FORMAT_VERSION: Final = 2

_MAX_FILE_NAME: Final = 240
"""Maximum length of a file's name. File systems take 255 bytes, and a file that is
being written has a longer name."""

_BACKWARD_DAYS: Final = 180
_FORWARD_DAYS: Final = 21
"""The window of jax.export: releases up to 6 months younger than the program read it,
and releases up to 3 weeks older. https://docs.jax.dev/en/latest/export/export.html"""


def write_artifact(
    directory: str | pathlib.Path, write: Callable[[Writing], None]
) -> None:
    """Makes a directory that appears only when all of its files are there.

    All processes of a job call it together.

    Args:
      directory: must not exist, or be empty.
      write: fills a directory beside it, which then gets its name.

    Raises:
      ExportError: if there are files in the directory.
    """
    path = local_path(directory)
    partial = path.with_name(f".{path.name}.partial")
    writing = Writing(partial)

    def make(partial: pathlib.Path) -> None:
        check_new_directory(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def rename(partial: pathlib.Path) -> None:
        if path.exists():
            path.rmdir()
        partial.rename(path)

    writing.do(make)
    writing.agree()
    try:
        write(writing)
        writing.do(rename)
        writing.agree()
    finally:
        if current_job().is_first:
            shutil.rmtree(partial, ignore_errors=True)


def check_new_directory(path: pathlib.Path) -> None:
    """Raises an ExportError if there are files in a directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ExportError(
            f"{path} must be a new directory, but it holds files; remove it, or export "
            "to another one."
        )


def write_table_files(
    writing: Writing, tables: Mapping[str, LayerTable], row_format: RowFormat
) -> dict[str, dict[str, Any]]:
    """Writes one file per table, block by block.

    Returns:
      The entry of each table in the document: file, shape, dtype, rounding error.
    """
    files: dict[str, TensorFile] = {}

    def make_files(directory: pathlib.Path) -> None:
        (directory / TABLES_DIR).mkdir()
        for name, table in tables.items():
            metadata = {"row_format": row_format, "dim": str(table.place.config.dim)}
            specs = table.tensor_specs(name, row_format)
            files[name] = TensorFile(directory / file_of_table(name), specs, metadata)
            if table.ids is not None:
                files[name].write(directory_name(name), 0, table.ids.tensor)

    writing.do(make_files)
    errors = {name: RoundingError() for name in tables}
    for block in encoded_blocks(tables, row_format, errors):
        writing.do(lambda _, block=block: files[block.name].write_places(*block))
    return {
        name: {"file": file_of_table(name)}
        | describe_table(table, row_format, errors[name])
        for name, table in tables.items()
    }


def encoded_blocks(
    tables: Mapping[str, LayerTable],
    row_format: RowFormat,
    errors: Mapping[str, RoundingError],
) -> Iterator[TableBlock]:
    """Yields the rows of some tables as they are stored, and adds up their errors."""
    for name, places, rows in read_tables(tables):
        stored = encode(rows, row_format, f"table {name!r}")
        errors[name].add(rows, stored)
        yield TableBlock(name, places, stored)


def describe_table(
    table: LayerTable, row_format: RowFormat, error: RoundingError
) -> dict[str, Any]:
    """Returns the entry of a table in the document."""
    spec = table.stored_spec(row_format)
    config = table.place.config
    document: dict[str, Any] = {
        "vocabulary_size": config.max_rows,
        "dim": config.dim,
        "row_format": row_format,
        "dtype": str(spec.dtype),
        "shape": list(spec.shape),
        "error": {
            "largest": error.largest,
            "root_mean_square": error.root_mean_square,
            "relative": error.relative,
        },
    }
    if config.dynamic is not None and table.ids is not None:
        document["dynamic"] = {
            "num_ids": table.ids.num_ids,
            "default_row": config.dynamic.default_row,
        }
    return document


def file_of_table(name: str) -> str:
    """Returns the path of a table's file in the directory of an export.

    Raises:
      ExportError: if the name is too long for a file.
    """
    # Names may hold slashes, and other characters that a file's name cannot.
    file = f"{urllib.parse.quote(name, safe='')}.safetensors"
    if len(file) > _MAX_FILE_NAME:
        raise ExportError(
            f"The file of table {name!r} must have a name of at most {_MAX_FILE_NAME} "
            f"characters, got {len(file)}, as all characters but letters, digits and "
            "_.-~ take three for each byte; shorten the table's name."
        )
    return f"{TABLES_DIR}/{file}"


def write_document(directory: pathlib.Path, document: Mapping[str, Any]) -> None:
    """Writes the document of an export, with the versions that made it.

    Args:
      directory: the export, which holds all other files.
      document: the rest of the document, maybe with the digests of these files.
    """
    head = {
        "format": "tpu_embedding.export",
        "format_version": FORMAT_VERSION,
        "versions": {
            "tpu_embedding": tpu_embedding.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
        },
    }
    if "files" not in document:
        head["files"] = digests_of_files(directory)
    write_json(directory / DOCUMENT_FILE, head | dict(document))


def read_document(directory: str | pathlib.Path) -> dict[str, Any]:
    """Returns the document of an export.

    Raises:
      ExportError: if the directory holds none that this release reads, or the document
        does not describe the files that will be read.
    """
    path = local_path(directory)
    document = read_json(
        path_inside(path, DOCUMENT_FILE),
        EXPORT,
        format_version=FORMAT_VERSION,
        writer="te.export.save or `tpu-embedding export`",
        way_out="export the model again.",
    )
    if {"program", "saved_model"} & set(document) and "signature" not in document:
        raise ExportError(
            f"{path / DOCUMENT_FILE} must have the signature of its program; export "
            "the model again."
        )
    for name in _files_read(path, document):
        path_inside(path, name)
        if name not in document["files"]:
            raise ExportError(
                f"{path / DOCUMENT_FILE} must have a digest of each file that is read, "
                f"but has none of {name!r}; export the model again."
            )
    return document


def _files_read(path: pathlib.Path, document: Mapping[str, Any]) -> list[str]:
    """Returns the files that readers of an export read.

    Raises:
      ExportError: if the document gives one another name than `save` does.
    """
    if "saved_model" in document:
        # TensorFlow finds its files itself.
        return files_of_directory(path)
    tables = document["tables"]
    named = {name: (x.get("file"), file_of_table(name)) for name, x in tables.items()}
    if "program" in document:
        named["program"] = document["program"]["file"], PROGRAM_FILE
        named["dense"] = document.get("dense", {}).get("file"), DENSE_FILE
    for owner, (found, wanted) in named.items():
        if found != wanted:
            raise ExportError(
                f"{path / DOCUMENT_FILE} must name the file {wanted!r} for {owner!r}, "
                f"got {found!r}; export the model again."
            )
    return [wanted for _, wanted in named.values()]


def describe_program(exported: jax.export.Exported) -> dict[str, Any]:
    """Returns the entry of the program: platforms, and who can read it until when."""
    today = datetime.datetime.now(datetime.UTC).date()
    return {
        "file": PROGRAM_FILE,
        "platforms": list(exported.platforms),
        "calling_convention_version": exported.calling_convention_version,
        "written": str(today),
        "compatibility": {
            "read_by_jax": jax.__version__,
            "newest_jax_released_until": str(
                today + datetime.timedelta(days=_BACKWARD_DAYS)
            ),
            "oldest_jax_released_since": str(
                today - datetime.timedelta(days=_FORWARD_DAYS)
            ),
            "rule": "jax.export: a program is read by releases of jax up to 6 months "
            "younger than it, and up to 3 weeks older. Export again from the "
            "checkpoint before that.",
        },
    }
