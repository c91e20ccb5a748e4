"""Writes `state.json` of a checkpoint, reads it and checks it.

The file is written with the state, and sealed when all arrays are on disk: it then gets
their checksums, and a digest of all that it says. A save that ended before has no
digest, so it is never read.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any, Final

from etils import epath

from tpu_embedding.checkpoint.checksums import array_checksums, read_small_file
from tpu_embedding.checkpoint.errors import CheckpointError, errors_of_reading
from tpu_embedding.checkpoint.records import (
    STATE_FILE,
    ArrayRecord,
    CheckpointRecord,
    Json,
    TableRecord,
    state_directory,
)
from tpu_embedding.dynamic import Dynamic
from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES

FORMAT_VERSION: Final = 3
"""Version of the files. Version 2 has no digest. Version 1 was never released."""

UNSEALED_VERSION: Final = 2

MAX_STATE_FILE_BYTES: Final = 2**23
"""Bound on the file, whose values take up to 24 times its size in memory."""

MAX_DESCRIPTION_BYTES: Final = 2**22
"""Bound on the user's description, as JSON."""

_TEMPORARY: Final = ".orbax-checkpoint-tmp"
"""Orbax appends it to the names of directories that are not complete."""

_IDS: Final = {
    ":ids": ("uint64", True),
    ":natural_rows": ("int64", True),
    ":last_used": ("uint32", True),
    ":counts": ("uint32", True),
    ":clock": ("uint32", False),
    ":init_key": ("uint32", False),
}
"""Type of each array of a dynamic table's directory, and whether it has rows."""


def write_state_file(root: epath.Path, record: CheckpointRecord) -> None:
    """Writes the description of a state, without its checksums and digest."""
    record = dataclasses.replace(record, step=_step_to_record(root))
    values = dataclasses.asdict(record) | {"format": FORMAT_VERSION}
    (root / STATE_FILE).write_text(json.dumps(values, indent=1))


def seal_state_file(root: epath.Path) -> None:
    """Adds the checksums of the arrays, which are complete, and the digest."""
    values = json.loads((root / STATE_FILE).read_text())
    values["checksums"] = array_checksums(root, _record_of(values).array_names)
    values["digest"] = _digest_of(values)
    (root / STATE_FILE).write_text(json.dumps(values, indent=1))


def describe(directory: str | os.PathLike[str]) -> CheckpointRecord:
    """Returns the description of a checkpoint; reads no arrays.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.

    Raises:
      CheckpointError: if there is no checkpoint, its description is damaged, or it is
        in the directory of another step.
    """
    root = state_directory(directory)
    return read_state_file(root, root)


def read_state_file(root: epath.Path, files: epath.Path) -> CheckpointRecord:
    """Returns the description of a state, after checking it.

    Args:
      root: directory of the state, for messages and the step.
      files: path to read the directory from.
    """
    path = root / STATE_FILE
    with errors_of_reading(f"The file {path}"):
        text = read_small_file(files, STATE_FILE, MAX_STATE_FILE_BYTES)
        values = json.loads(text)
        version = values["format"]
    if version not in (UNSEALED_VERSION, FORMAT_VERSION):
        raise CheckpointError(
            f"The checkpoint {path.parent} has format {version!r}, and this package "
            f"reads formats {UNSEALED_VERSION} and {FORMAT_VERSION}. Restore it with "
            "the tpu_embedding that wrote it, and save it again with this one."
        )
    with errors_of_reading(f"The file {path}"):
        if version == FORMAT_VERSION or "digest" in values:
            if values["digest"] != (digest := _digest_of(values)):
                raise ValueError(f"its digest is not {digest}, the one of its contents")
        else:
            values["digest"] = hashlib.blake2b(text, digest_size=16).hexdigest()
        record = _record_of(values)
        _check_record(record)
    _check_step(root, record.step)
    return record


def _digest_of(values: Json) -> str:
    contents = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _record_of(values: Json) -> CheckpointRecord:
    fields: Json = {name: value for name, value in values.items() if name != "format"}
    fields["tables"] = {
        name: _table_record(of) for name, of in values["tables"].items()
    }
    return CheckpointRecord(**fields)


def _table_record(values: Json) -> TableRecord:
    arrays: Json = {"values": _array_record(values["values"])}
    for field in ("slots", "directory"):
        arrays[field] = {name: _array_record(of) for name, of in values[field].items()}
    return TableRecord(**values | arrays)


def _array_record(values: Json) -> ArrayRecord:
    fields: Json = values | {"shape": tuple(values["shape"])}
    return ArrayRecord(**fields)


def _check_record(record: CheckpointRecord) -> None:
    """Raises ValueError for values that no save writes."""
    _check_texts("dense", record.dense)
    _check_texts("checksums", record.checksums)
    _check("description", record.description, isinstance(record.description, dict))
    _check("step", record.step, isinstance(record.step, str))
    for name, table in record.tables.items():
        where = f"tables[{name!r}]"
        for slot, array in table.arrays.items():
            _check_array(f"{where}[{slot or 'values'!r}]", array)
        _check_sizes(where, table)
        _check_optimizer(f"{where}.optimizer", table.optimizer)
        _check_directory(where, table)


def _check(field: str, value: Any, is_valid: bool) -> None:
    if not is_valid:
        raise ValueError(f"its field {field} has the value {str(value)[:200]!r}")


def _check_texts(field: str, values: Any) -> None:
    are_texts = isinstance(values, dict) and all(
        isinstance(value, str) for value in values.values()
    )
    _check(field, values, are_texts)


def _check_array(field: str, array: ArrayRecord) -> None:
    are_sizes = all(type(size) is int and size >= 0 for size in array.shape)
    _check(f"{field}.shape", array.shape, are_sizes)
    _check(f"{field}.dtype", array.dtype, isinstance(array.dtype, str))
    has_rows = array.has_rows
    _check(f"{field}.has_rows", has_rows, isinstance(has_rows, bool))


def _check_sizes(where: str, table: TableRecord) -> None:
    """Compares the sizes and the type of a table with the shapes of its arrays."""
    row, dtype = (table.dim,), table.dtype
    if table.dtype == "int8":
        row, dtype = (table.dim + SCALE_AND_BIAS_BYTES,), "uint8"
    values, num_rows = table.values, table.vocabulary_size
    _check(f"{where}.dim", table.dim, values.shape[1:] == row and values.has_rows)
    _check(f"{where}.dtype", table.dtype, values.dtype == dtype)
    for slot, array in {"values": values, **table.slots}.items():
        if array.has_rows and array.shape[:1] != (num_rows,):
            text = f"{num_rows}, and {slot} has shape {array.shape}"
            _check(f"{where}.vocabulary_size", text, False)


def _check_optimizer(field: str, optimizer: Any) -> None:
    if optimizer is None:
        return
    keys = {"state", "rows", "duplicates", "gradient_steps"}
    _check(field, optimizer, isinstance(optimizer, dict) and set(optimizer) == keys)


def _check_directory(where: str, table: TableRecord) -> None:
    """Checks the ids of a dynamic table; a static one has none."""
    if table.dynamic is None:
        _check(f"{where}.directory", table.directory, not table.directory)
        return
    dynamic = Dynamic(**table.dynamic)
    num_ids = table.vocabulary_size - (dynamic.default_row == "learned")
    for name, (dtype, has_rows) in _IDS.items():
        array = table.directory[name]
        shape = (num_ids,) if has_rows else array.shape
        is_same = (array.dtype, array.has_rows, array.shape) == (dtype, has_rows, shape)
        _check(f"{where}.directory[{name!r}]", array, is_same)


def _step_to_record(root: epath.Path) -> str:
    """Returns the name of the step's directory, if a `CheckpointManager` saves.

    Its items are in a directory whose name is temporary, except in buckets.
    """
    name, temporary, _ = root.parent.name.partition(_TEMPORARY)
    return name if temporary or "://" in os.fspath(root) else ""


def _check_step(root: epath.Path, saved: str) -> None:
    """Raises `CheckpointError` in the directory of another step.

    Any other name, such as `best`, is not compared.
    """
    numbers = [
        re.fullmatch("(.*?)([0-9]+)", name) for name in (saved, root.parent.name)
    ]
    if None in numbers:
        return
    (prefix, there), (other_prefix, here) = (each.groups() for each in numbers if each)
    if prefix == other_prefix and int(there) != int(here):
        raise CheckpointError(
            f"The checkpoint {root} is in the directory of step {int(here)}, but was "
            f"saved as step {int(there)}. Rename the directory {root.parent} to "
            f"{saved}, or to a name that doesn't end with a number, such as "
            f"{saved}_copy."
        )


def description_as_json(description: Mapping[str, Any]) -> Json:
    """Returns a user's description as JSON values.

    Raises:
      TypeError: if a value has no JSON form.
      ValueError: if it is too large.
    """
    text = json.dumps(dict(description))
    if len(text) > MAX_DESCRIPTION_BYTES:
        raise ValueError(
            f"description must have at most {MAX_DESCRIPTION_BYTES} bytes as JSON, got "
            f"{len(text)}. Save such values in a file next to the checkpoint."
        )
    return json.loads(text)
