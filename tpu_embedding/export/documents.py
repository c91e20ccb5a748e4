"""The documents `export.json` and `delta.json`, and the digests of files.

Exports come from elsewhere, so a document becomes frozen dataclasses by one reader,
`parse`, which compares every value with the type of its field. A document names no file
that is opened by that name: `files` holds the SHA-256 of each file, and a name there
must be plain and lie inside of the directory.
"""

import dataclasses
import datetime
import hashlib
import json
import pathlib
import types
import typing
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeVar

import jax
import jaxlib.version

import tpu_embedding
from tpu_embedding.export.row_formats import RowFormat
from tpu_embedding.export.signature import ExportError, Signature

DOCUMENT_FILE: Final = "export.json"
PROGRAM_FILE: Final = "program.stablehlo"
DENSE_FILE: Final = "dense.safetensors"
TABLES_DIR: Final = "tables"

_MAX_FILE_NAME: Final = 240
"""Maximum length of a file's name. File systems take 255 bytes, and a file that is
being written has a longer name."""

_AGAIN: Final = "export the model again, or copy the whole directory again."

ExportKind = Literal["stablehlo", "savedmodel", "tables"]

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedTable:
    """A table in an export.

    Attributes:
      vocabulary_size: rows; the capacity of a dynamic table.
      dim: numbers of a row.
      row_format: type of the stored rows.
      dtype: type of the stored array.
      shape: shape of the stored array.
      largest_error: largest difference of a number from the model's, by rounding.
      num_ids: ids that have rows in a dynamic table; None for others.
    """

    vocabulary_size: int
    dim: int
    row_format: RowFormat
    dtype: str
    shape: tuple[int, ...]
    largest_error: float
    num_ids: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportDocument:
    """The content of `export.json`.

    Attributes:
      versions: of the libraries that wrote it.
      files: path of each other file to its SHA-256.
      tables: by name.
      kind: a program of `save`, a SavedModel, or tables alone.
      written: day, in ISO format.
      signature: inputs and outputs of the program; None for tables alone.
      platforms: platforms that the program was lowered for.
    """

    format: Literal["tpu_embedding.export"] = "tpu_embedding.export"
    format_version: Literal[3] = 3
    kind: ExportKind
    written: str
    versions: dict[str, str]
    files: dict[str, str]
    tables: dict[str, ExportedTable]
    signature: Signature | None = None
    platforms: tuple[str, ...] = ()


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


def write_document(directory: pathlib.Path, **fields: Any) -> None:
    """Writes the document of an export whose other files are all written.

    Args:
      directory: the export.
      **fields: those of `ExportDocument` that say what it holds.
    """
    document = ExportDocument(
        versions={
            "tpu_embedding": tpu_embedding.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
        },
        written=str(datetime.datetime.now(datetime.UTC).date()),
        files=digests_of_files(directory),
        **fields,
    )
    write_json(directory / DOCUMENT_FILE, document)


def write_json(path: pathlib.Path, document: Any) -> None:
    """Writes a dataclass as JSON."""
    text = json.dumps(dataclasses.asdict(document), indent=2) + "\n"
    path.write_text(text, encoding="utf-8")


def read_document(directory: pathlib.Path) -> ExportDocument:
    """Returns the document of an export; all of the files it implies have digests.

    Raises:
      ExportError: if the directory holds none that this release reads.
    """
    document = read_json(
        path_inside(directory, DOCUMENT_FILE), ExportDocument, "te.export.save"
    )
    wanted = []
    if document.kind != "savedmodel":
        wanted += [file_of_table(name) for name in document.tables]
    if document.kind == "stablehlo":
        wanted += [PROGRAM_FILE, DENSE_FILE]
    for name in (*wanted, *document.files):
        path_inside(directory, name)
        if name not in document.files:
            raise ExportError(
                f"{directory / DOCUMENT_FILE} must have a digest of each file that is "
                f"read, but has none of {name!r}; {_AGAIN}"
            )
    return document


def read_json(path: pathlib.Path, kind: type[_T], writer: str) -> _T:
    """Returns a JSON file as a dataclass whose fields were all checked.

    Args:
      path: place of the file.
      kind: the dataclass.
      writer: names the call that writes such directories, for the error.

    Raises:
      ExportError: if the file is missing or damaged, or has other fields.
    """
    if not path.is_file():
        raise ExportError(
            f"{path.parent} must be a directory that {writer} wrote, but it has no "
            f"{path.name}."
        )
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_object_of_pairs)
        return parse(kind, value, "the document")
    except (ValueError, RecursionError, OSError) as error:
        problem = str(error) or type(error).__name__
        raise ExportError(f"{path} cannot be read: {problem}; {_AGAIN}") from None


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; Python would keep the last of equal names."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name comes twice in an object")
    return dict(pairs)


def parse(kind: Any, value: Any, where: str) -> Any:
    """Returns a JSON value as the type of a field.

    Args:
      kind: a dataclass, `Literal`, union, `tuple[X, ...]`, `dict[str, X]`, or a type of
        JSON. Integers must be from 0 on.
      value: the value.
      where: names it in the error.

    Raises:
      ValueError: if the value is of another type.

    Example:
      >>> parse(tuple[int | str, ...], ["batch", 3], "shape")
      ('batch', 3)
    """
    arguments = typing.get_args(kind)
    match typing.get_origin(kind) or kind:
        case typing.Literal:
            fits = any(type(value) is type(x) and value == x for x in arguments)
            return _checked(fits, value, where, f"one of {list(arguments)}")
        case types.UnionType | typing.Union:
            return _parse_union(arguments, value, where)
        case origin if origin is tuple:
            _checked(type(value) is list, value, where, "a list")
            pairs = enumerate(value)
            return tuple(parse(arguments[0], x, f"{where}[{i}]") for i, x in pairs)
        case origin if origin is dict:
            _checked(type(value) is dict, value, where, "an object")
            return {k: parse(arguments[1], x, f"{where}.{k}") for k, x in value.items()}
        case origin if dataclasses.is_dataclass(origin):
            return _parse_fields(origin, value, where)
    fits = type(value) is kind and (kind is not int or 0 <= value < 2**63)
    return _checked(fits, value, where, f"of type {kind.__name__}")


def _parse_union(options: Iterable[Any], value: Any, where: str) -> Any:
    """Returns a value as the first of several types that it fits."""
    if value is None and types.NoneType in options:
        return None
    problems = []
    for kind in options:
        if kind is not types.NoneType:
            try:
                return parse(kind, value, where)
            except ValueError as error:
                problems.append(str(error))
    raise ValueError(" or ".join(problems))


def _parse_fields(kind: Any, value: Any, where: str) -> Any:
    """Returns an object as a dataclass; unknown and missing fields are refused."""
    _checked(type(value) is dict, value, where, "an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    required = {k for k, x in fields.items() if x.default is dataclasses.MISSING}
    if unknown := sorted(set(value) - set(fields)):
        raise ValueError(f"{where} has the unknown fields {_short(unknown)}")
    if missing := sorted(required - set(value)):
        raise ValueError(f"{where} must have the fields {missing}")
    return kind(**{k: parse(hints[k], x, f"{where}.{k}") for k, x in value.items()})


def _checked(fits: bool, value: Any, where: str, rule: str) -> Any:
    if not fits:
        raise ValueError(f"{where} must be {rule}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def path_inside(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file of an export or delta.

    Args:
      directory: the export or delta.
      name: path of the file in the directory.

    Raises:
      ExportError: if the name is not plain, or a link leads out of the directory.
    """
    parts = name.split("/")
    is_plain = not ({"", ".", ".."} & set(parts) or "\0" in name or "\\" in name)
    path = directory / name
    try:
        is_inside = path.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, or no path at all
        is_inside = False
    if not (is_plain and is_inside):
        raise ExportError(
            f"{directory} must name files inside of it only, got {name!r}, which leads "
            "elsewhere; copy the whole directory again from where it was written."
        )
    return path


def file_digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_of_files(directory: pathlib.Path) -> dict[str, str]:
    """Returns path and SHA-256 of each file of an export or delta but its document."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): file_digest(path) for path in paths}


def check_files(directory: pathlib.Path, files: Mapping[str, str]) -> None:
    """Compares files of an export or delta with their digests.

    Args:
      directory: the export or delta.
      files: path of each file to its SHA-256.

    Raises:
      ExportError: if a file is missing or another one, or lies elsewhere.
    """
    for name, wanted in files.items():
        path = path_inside(directory, name)
        if not path.is_file():
            raise ExportError(f"{path} is missing; {_AGAIN}")
        found = file_digest(path)
        if found != wanted:
            raise ExportError(
                f"{path} cannot be read as it was written: its SHA-256 must be "
                f"{wanted}, got {found}; {_AGAIN}"
            )
