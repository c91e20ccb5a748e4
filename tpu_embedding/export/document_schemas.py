"""The fields of `export.json` and `delta.json`, and their check.

Such files come from elsewhere, so all of a document is compared with its schema before
a field is used. A schema is one of these:

    Rule                     one value
    {"field": schema}        an object with these fields; `Optional` ones may miss
    {...: schema}            an object with any names, and one schema for all values
    [schema]                 a list
    (schema, schema, ...)    one of several schemas, tried in order
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any, Final

from tpu_embedding.export.signature import ExportError


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule for one value: its text for errors, and its test."""

    text: str
    holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Optional:
    """A field that may miss."""

    schema: Any


def is_plain_path(text: Any) -> bool:
    """Returns True for a relative path of plain names, parted by slashes.

    Example:
      >>> is_plain_path("tables/movie.safetensors"), is_plain_path("../movie")
      (True, False)
    """
    if type(text) is not str or "\0" in text or "\\" in text:
        return False
    return all(name not in ("", ".", "..") for name in text.split("/"))


def _one_of(*values: str) -> Rule:
    return Rule(f"one of {list(values)}", lambda x: type(x) is str and x in values)


TEXT: Final = Rule("text", lambda x: type(x) is str)
FLAG: Final = Rule("true or false", lambda x: type(x) is bool)
NULL: Final = Rule("null", lambda x: x is None)
NUMBER: Final = Rule("a float", lambda x: type(x) is float)
COUNT: Final = Rule("a count from 0 on", lambda x: type(x) is int and 0 <= x < _M)
SHA256: Final = Rule(
    "64 hexadecimal digits", lambda x: type(x) is str and bool(_DIGITS.fullmatch(x))
)
IDENTITY: Final = Rule(
    "8 hexadecimal digits", lambda x: type(x) is str and bool(_IDENTITY.fullmatch(x))
)
_M: Final = 2**63
_DIGITS: Final = re.compile("[0-9a-f]{64}")
_IDENTITY: Final = re.compile("[0-9a-f]{8}")

_ARRAY: Final = {"shape": [(COUNT, TEXT)], "dtype": TEXT}
_LOOKUP: Final = {
    "feature": TEXT,
    "table": TEXT,
    "vocabulary_size": COUNT,
    "combiner": TEXT,
    "max_sequence_length": COUNT,
    "max_valence": (COUNT, NULL),
    "out_of_range_ids": _one_of("error", "drop", "clip"),
    "default_id": (COUNT, NULL),
    "output_shape": ([COUNT], NULL),
    "is_dynamic": FLAG,
}
_INPUT: Final = {
    "name": TEXT,
    "path": [TEXT],
    "kind": _one_of("array", "dense_ids", "ragged_ids"),
    "is_weighted": FLAG,
    "num_samples": (COUNT, TEXT),
    "spec": (_ARRAY, NULL),
    "is_wide": FLAG,
    "lookups": [_LOOKUP],
    "arrays": {...: _ARRAY},
}
_SIGNATURE: Final = {
    "arguments": [TEXT],
    "inputs": [_INPUT],
    "outputs": {...: _ARRAY},
    "returns_array": FLAG,
    "batch_size": (COUNT, NULL),
}
_TABLE: Final = {
    "file": Optional(TEXT),  # A SavedModel holds its tables as variables.
    "vocabulary_size": COUNT,
    "dim": COUNT,
    "row_format": _one_of("float32", "bfloat16", "int8"),
    "dtype": TEXT,
    "shape": [COUNT],
    "error": Optional({...: NUMBER}),
    "dynamic": Optional({"num_ids": COUNT, "default_row": TEXT}),
}
_CHAIN: Final = {
    "identity": IDENTITY,
    "steps": {...: COUNT},
    "applying": Optional(IDENTITY),
}
_PROGRAM: Final = {
    "file": TEXT,
    "platforms": [TEXT],
    "calling_convention_version": COUNT,
    "written": TEXT,
    "compatibility": {...: TEXT},
}
_SAVED_MODEL: Final = {"tensorflow": TEXT, "platforms": [TEXT], "strings": [TEXT]}

EXPORT: Final = {
    "format": _one_of("tpu_embedding.export"),
    "format_version": COUNT,
    "versions": {"tpu_embedding": TEXT, "jax": TEXT, "jaxlib": TEXT},
    "files": {...: SHA256},
    "tables": {...: _TABLE},
    "program": Optional(_PROGRAM),
    "saved_model": Optional(_SAVED_MODEL),
    "signature": Optional(_SIGNATURE),
    "dense": Optional({"file": TEXT}),
    "deltas": Optional(_CHAIN),
}
"""The fields of `export.json`."""

DELTA: Final = {
    "format": _one_of("tpu_embedding.delta"),
    "format_version": COUNT,
    "identity": IDENTITY,
    "base": IDENTITY,
    "base_steps": {...: COUNT},
    "steps": {...: COUNT},
    "tables": {
        ...: {
            "vocabulary_size": COUNT,
            "dim": COUNT,
            "num_rows": COUNT,
            "dynamic": Optional({"num_evicted": COUNT, "is_whole": FLAG}),
            "file": Optional(TEXT),
            "sha256": Optional(SHA256),
        }
    },
}
"""The fields of `delta.json`."""


def check_document(
    document: Any, schema: Any, path: pathlib.Path, way_out: str
) -> None:
    """Compares a document with its schema.

    Args:
      document: what the JSON file holds.
      schema: `EXPORT` or `DELTA`.
      path: the file.
      way_out: end of the error.

    Raises:
      ExportError: if a field is missing, unknown, or of another kind.
    """
    problem = _problem(document, schema, "")
    if problem is not None:
        raise ExportError(f"{path} cannot be read: {problem}; {way_out}")


def _problem(value: Any, schema: Any, where: str) -> str | None:
    """Returns the first contradiction of a value and its schema."""
    where = where or "the document"
    match schema:
        case Rule():
            if schema.holds(value):
                return None
            return f"{where} must be {schema.text}, got {_short(value)}"
        case tuple():
            problems = [_problem(value, each, where) for each in schema]
            if None in problems:
                return None
            # A list or an object is meant to fit the schema of its own kind.
            kinds = [isinstance(value, type(each)) for each in schema]
            return problems[kinds.index(True) if True in kinds else 0]
        case [element]:
            if type(value) is not list:
                return f"{where} must be a list, got {_short(value)}"
            items = [(f"{where}[{i}]", x, element) for i, x in enumerate(value)]
        case dict():
            if type(value) is not dict:
                return f"{where} must be an object, got {_short(value)}"
            if ... in schema:
                fields = {name: schema[...] for name in value}
            else:
                fields = schema
            for name, each in fields.items():
                if name not in value and not isinstance(each, Optional):
                    return f"{where} must have the field {name!r}"
            if unknown := sorted(set(value) - set(fields)):
                return f"{where} has the unknown fields {_short(unknown)}"
            items = [
                (f"{where}.{name}", value[name], _required(each))
                for name, each in fields.items()
                if name in value
            ]
        case _:
            raise AssertionError(schema)
    return next(
        (found for place, x, each in items if (found := _problem(x, each, place))), None
    )


def _required(schema: Any) -> Any:
    return schema.schema if isinstance(schema, Optional) else schema


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
