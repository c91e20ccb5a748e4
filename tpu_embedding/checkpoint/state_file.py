"""Writes, seals, reads and checks `state.json`.

The file is written with the state, and sealed once all arrays are on disk: it then gets
a digest and a copy of every chunk's checksum. So a restore can detect chunks from a
different save. When the file is read, everything in it is untrusted data.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
from etils import epath

from tpu_embedding.argument_checks import invalid
from tpu_embedding.checkpoint.records import (
    STATE_FILE,
    ArrayRecord,
    CheckpointError,
    CheckpointRecord,
    Json,
    TableRecord,
    errors_of_reading,
    state_directory,
)
from tpu_embedding.dynamic import Dynamic
from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES

METADATA_FILE: Final = "zarr.json"
"""File that holds an array's shape, type and chunk shape."""

MAX_METADATA_BYTES: Final = 2**16

CRC_BYTES: Final = 4
"""Size of the CRC-32C at the end of a chunk's file."""

_THREADS: Final = 8


class Chunk(NamedTuple):
    """A chunk's row-major number, and its file path in the array's directory."""

    number: int
    name: str


def chunks_of(
    shape: Sequence[int], chunk_shape: Sequence[int], index: Any = ()
) -> Iterator[Chunk]:
    """Finds the chunks that hold part of an array.

    `index` is a slice with step 1, or row ids `[n]`. A tuple holds one of them for
    each of the first axes.

    Example:
      >>> [chunk.name for chunk in chunks_of((10, 4), (4, 4), slice(3, 9))]
      ['c/0/0', 'c/1/0', 'c/2/0']
    """
    indices = index if isinstance(index, tuple) else (index,)
    indices += (slice(None),) * (len(shape) - len(indices))
    grid = [-(-size // chunk) for size, chunk in zip(shape, chunk_shape, strict=True)]
    needed: list[Sequence[int]] = []  # For each axis, positions in the chunk grid.
    for rows, size, chunk in zip(indices, shape, chunk_shape, strict=True):
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(size)
            end = -(-stop // chunk) if stop > start else 0
            needed.append(range(start // chunk, end))
        else:
            needed.append(np.unique(rows // chunk).tolist())
    for position in _product(needed):
        number = 0
        for i, size in zip(position, grid, strict=True):
            number = number * size + i
        yield Chunk(number, "/".join(["c", *map(str, position)]))


def _product(axes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    # `itertools.product` would copy each axis into memory, and a forged shape can have
    # an axis that doesn't fit.
    if not axes:
        yield ()
    elif all(axes):
        for i in axes[0]:
            for rest in _product(axes[1:]):
                yield (i, *rest)


def chunk_size_and_crc(root: epath.Path, name: str) -> tuple[int, str]:
    """Reads the size in bytes of a chunk's file, and the CRC-32C at its end."""
    _check_is_file(root, name)
    with (root / name).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - CRC_BYTES))
        return size, file.read(CRC_BYTES).hex()


def read_small_file(root: epath.Path, name: str, max_bytes: int) -> bytes:
    """Reads a file, or raises ValueError if it has more than `max_bytes`."""
    _check_is_file(root, name)
    with (root / name).open("rb") as file:
        contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise ValueError(f"{name} has more than {max_bytes} bytes")
    return contents


def _check_is_file(root: epath.Path, name: str) -> None:
    if "://" in os.fspath(root):
        return
    # A downloaded checkpoint may link to any file on this machine, and opening a pipe
    # would block forever. Only `root` itself is allowed to be a link, as in
    # /proc/self/fd.
    path = os.fspath(root)
    for level in name.split("/"):
        path = f"{path}/{level}"
        if os.path.islink(path):
            raise ValueError(f"{name} is a symbolic link, or inside one")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{name} is not a regular file")


def metadata_checksum(metadata: bytes) -> str:
    return f"{zlib.crc32(metadata):08x}"


def array_checksums(root: epath.Path, names: Sequence[str]) -> dict[str, str]:
    """Collects hexadecimal checksums by array: the metadata's, then each chunk's."""
    # A chunk's own CRC-32C reveals a flipped bit, but not a chunk copied from another
    # checkpoint, so state.json has a copy of every CRC. The CRCs are read from the file
    # ends, because computing them would take another pass over the checkpoint.
    with ThreadPoolExecutor(_THREADS) as threads:
        checksums = {}
        for name in names:
            file = f"{name}/{METADATA_FILE}"
            metadata = read_small_file(root, file, MAX_METADATA_BYTES)
            values = json.loads(metadata)
            chunk_shape = values["chunk_grid"]["configuration"]["chunk_shape"]
            chunks = chunks_of(values["shape"], chunk_shape)
            files = [f"{name}/{chunk.name}" for chunk in chunks]
            read = functools.partial(chunk_size_and_crc, root)
            crcs = [crc for _, crc in threads.map(read, files)]
            checksums[name] = "".join([metadata_checksum(metadata), *crcs])
        return checksums


def checksum_at(checksums: str, position: int) -> str:
    """Selects one checksum: position 0 is for the metadata, `i + 1` for chunk `i`."""
    # If the checksum is missing, this is an empty text, which never equals a real
    # checksum.
    width = 2 * CRC_BYTES
    return checksums[width * position : width * (position + 1)]


FORMAT_VERSION: Final = 3
"""File format version. Earlier versions were never released."""

MAX_STATE_FILE_BYTES: Final = 2**23
"""Maximum size of the file. The parsed values take up to 24 times as much memory."""

MAX_DESCRIPTION_BYTES: Final = 2**22
"""Maximum size of the user's description as JSON."""

_TEMPORARY: Final = ".orbax-checkpoint-tmp"
"""Suffix that Orbax adds to the names of incomplete directories."""

_IDS: Final = {
    ":ids": ("uint64", True),
    ":natural_rows": ("int64", True),
    ":last_used": ("uint32", True),
    ":counts": ("uint32", True),
    ":clock": ("uint32", False),
    ":init_key": ("uint32", False),
}
"""Type of each array in a dynamic table's directory, and whether it has rows."""


def write_state_file(root: epath.Path, record: CheckpointRecord) -> None:
    # The digest stays empty until `seal_state_file` runs. If the process dies before
    # that, `read_state_file` rejects the file.
    #
    # `step` is the name of a CheckpointManager's step directory, the parent of `root`.
    # Until the step is complete, this directory has a temporary name, except in
    # buckets. For te.save, only `root` has a temporary name, so `step` stays empty and
    # users can rename the directory.
    name, temporary, _ = root.parent.name.partition(_TEMPORARY)
    if temporary or "://" in os.fspath(root):
        record = dataclasses.replace(record, step=name)
    values = dataclasses.asdict(record) | {"format": FORMAT_VERSION}
    (root / STATE_FILE).write_text(json.dumps(values, indent=1))


def seal_state_file(root: epath.Path) -> None:
    """Adds the checksums and the digest. All arrays must already be written."""
    values = json.loads((root / STATE_FILE).read_text())
    values["checksums"] = array_checksums(root, _record_of(values).array_names)
    values["digest"] = _digest_of(values)
    (root / STATE_FILE).write_text(json.dumps(values, indent=1))


def describe(directory: str | os.PathLike[str]) -> CheckpointRecord:
    """Reads a checkpoint's description of its contents, but not its arrays.

    Args:
      directory: checkpoint from `te.save`, or one step of a `CheckpointManager`.

    Raises:
      CheckpointError: if the checkpoint is missing, has a damaged description, or was
        copied to another step's directory.

    Example:
      >>> import tempfile, jax
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     te.save(folder + "/checkpoint", {"tables": tables}, plan=plan)
      ...     record = te.checkpoint.describe(folder + "/checkpoint")
      >>> record.tables["movie"].vocabulary_size
      10
    """
    root = state_directory(directory)
    return read_state_file(root, root)


def read_state_file(root: epath.Path, files: epath.Path) -> CheckpointRecord:
    """Reads and checks the description in the directory `files`.

    `root` is the directory's usual path. Error messages contain it, and the saved step
    is compared with it.
    """
    path = root / STATE_FILE
    with errors_of_reading(f"The file {path}"):
        values = json.loads(read_small_file(files, STATE_FILE, MAX_STATE_FILE_BYTES))
        version = values["format"]
    if version != FORMAT_VERSION:
        line = "Restore it with the version of tpu_embedding that wrote it."
        rule = f"be {FORMAT_VERSION} in this version of tpu_embedding"
        raise invalid(f"{path}: format", rule, version, line, CheckpointError)
    with errors_of_reading(f"The file {path}"):
        if values["digest"] != (digest := _digest_of(values)):
            raise ValueError(f"its digest is wrong; its contents give {digest}")
        # A digest reveals damage but not forgery, because anyone can compute it. So the
        # values are checked as well.
        record = _record_of(values)
        _check_record(record)
    _check_step(root, record.step)
    return record


def _digest_of(values: Json) -> str:
    contents = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _record_of(values: Json) -> CheckpointRecord:

    def array(fields: Json) -> ArrayRecord:
        values: Json = fields | {"shape": tuple(fields["shape"])}
        return ArrayRecord(**values)

    tables = {}
    for name, fields in values["tables"].items():
        arrays: Json = {"values": array(fields["values"])}
        for group in ("slots", "directory"):
            arrays[group] = {key: array(x) for key, x in fields[group].items()}
        tables[name] = TableRecord(**fields | arrays)
    fields = {name: value for name, value in values.items() if name != "format"}
    fields["tables"] = tables
    return CheckpointRecord(**fields)


def _check_record(record: CheckpointRecord) -> None:
    """Checks the types of JSON values, because dataclasses don't."""
    for field in ("dense", "checksums"):
        texts = getattr(record, field)
        are_texts = isinstance(texts, dict) and all(
            isinstance(text, str) for text in texts.values()
        )
        _check(field, texts, are_texts)
    _check("description", record.description, isinstance(record.description, dict))
    _check("step", record.step, isinstance(record.step, str))
    for name, table in record.tables.items():
        _check_table(f"tables[{name!r}]", table)


def _check(field: str, value: Any, is_valid: bool) -> None:
    if not is_valid:
        raise ValueError(f"its field {field} has the value {str(value)[:200]!r}")


def _check_table(field: str, table: TableRecord) -> None:
    """Checks that sizes and types agree with each other."""
    for slot, array in table.arrays.items():
        where, has_rows = f"{field}[{slot or 'values'!r}]", array.has_rows
        # `isinstance` would accept JSON's true, because a bool is an int in Python.
        are_sizes = all(type(size) is int and size >= 0 for size in array.shape)
        _check(f"{where}.shape", array.shape, are_sizes)
        _check(f"{where}.dtype", array.dtype, isinstance(array.dtype, str))
        _check(f"{where}.has_rows", has_rows, isinstance(has_rows, bool))
    row, dtype = (table.dim,), table.dtype
    if table.dtype == "int8":
        row, dtype = (table.dim + SCALE_AND_BIAS_BYTES,), "uint8"
    values, num_rows = table.values, table.vocabulary_size
    _check(f"{field}.dim", table.dim, values.shape[1:] == row and values.has_rows)
    _check(f"{field}.dtype", table.dtype, values.dtype == dtype)
    for slot, array in {"values": values, **table.slots}.items():
        if array.has_rows and array.shape[:1] != (num_rows,):
            text = f"{num_rows}, and {slot} has shape {array.shape}"
            _check(f"{field}.vocabulary_size", text, False)
    if (optimizer := table.optimizer) is not None:
        keys = {"state", "rows", "duplicates", "gradient_steps"}
        has_keys = isinstance(optimizer, dict) and set(optimizer) == keys
        _check(f"{field}.optimizer", optimizer, has_keys)
    if table.dynamic is None:
        _check(f"{field}.directory", table.directory, not table.directory)
        return
    # A learned default row has no id.
    num_ids = num_rows - (Dynamic(**table.dynamic).default_row == "learned")
    for name, (dtype, has_rows) in _IDS.items():
        array = table.directory[name]
        shape = (num_ids,) if has_rows else array.shape
        is_same = (array.dtype, array.has_rows, array.shape) == (dtype, has_rows, shape)
        _check(f"{field}.directory[{name!r}]", array, is_same)


def _check_step(root: epath.Path, saved: str) -> None:
    # If one step was copied over another, a run would resume at the wrong step. A name
    # with a different prefix, or without a number, such as `best`, is a deliberate
    # copy.
    saved_match = re.fullmatch("(.*?)([0-9]+)", saved)
    own_match = re.fullmatch("(.*?)([0-9]+)", root.parent.name)
    if saved_match is None or own_match is None:
        return
    (prefix, there), (own_prefix, here) = saved_match.groups(), own_match.groups()
    # Compared as integers, because Orbax may pad step numbers with zeros.
    if prefix == own_prefix and int(there) != int(here):
        rule = f"be in the directory of step {int(there)}, which saved it"
        line = f"Rename {root.parent} to {saved}, or to a name that doesn't end with a "
        line += f"number, such as {saved}_copy."
        raise invalid(f"{root}", rule, int(here), line, CheckpointError)


def description_as_json(description: Mapping[str, Any]) -> Json:
    """Converts a description to JSON values, or raises if it is too large."""
    text = json.dumps(dict(description))
    if len(text) > MAX_DESCRIPTION_BYTES:
        rule = f"have at most {MAX_DESCRIPTION_BYTES} bytes as JSON"
        line = "Save large values in a file next to the checkpoint."
        raise invalid("description", rule, len(text), line)
    return json.loads(text)
