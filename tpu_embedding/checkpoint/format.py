"""The files of a checkpoint, and their descriptions. Knows no devices.

A checkpoint of a state is a directory::

    tables/      one zarr array per table and slot variable; see `arrays.py`
      movie.values/            [vocabulary_size, dim], rows in natural order
      movie.slots.momenta/
      user.directory.ids/      of a dynamic table: its ids, rising, one for each row
      tables.json              tables, rows, types, slot variables, optimizer rules
      _METADATA                lets orbax read the arrays as a nested dict
    dense/       all other leaves of the state, by orbax's StandardSave
    state.json   the other leaves by name and shape, and the user's description
    manifest.json    size and checksum of every file above; a random name of the save

Stacking, packing and devices leave no trace in it. Any plan can therefore read it, and
so can any program that reads zarr. The arrays carry checksums of their own, which
readers of zarr verify. The manifest covers the rest, and notices swapped files.
"""

import contextlib
import dataclasses
import json
import os
import urllib.parse
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from etils import epath

from tpu_embedding.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    damaged,
    unreadable,
)
from tpu_embedding.paths import local_path

FORMAT_VERSION: Final = 1
"""Version of the files. A reader refuses later versions."""

TABLES: Final = "tables"
DENSE: Final = "dense"
TABLES_FILE: Final = "tables.json"
STATE_FILE: Final = "state.json"
MANIFEST_FILE: Final = "manifest.json"
ORBAX_FILE: Final = "_METADATA"

DIRECTORY_ARRAY: Final = ":"
"""Beginning of the names of arrays that describe the ids of a dynamic table."""

STORES: Final = {"gs://": "gcs", "s3://": "s3"}
"""Beginning of a path in a bucket, and the driver of tensorstore for it."""

STATE_ITEMS: Final = (".", "state", "default")
"""Places of a state in a checkpoint: alone, or as an item of a CheckpointManager."""

_STATE_PARTS: Final = (TABLES, DENSE, "_CHECKPOINT_METADATA")
"""Directories of a state, and the file that orbax writes beside it."""

_CHECKSUM_BYTES: Final = 4
"""A chunk ends with its crc32c."""

_READERS: Final = 32
"""Threads that read files; a request to a remote store takes long."""

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """An array of the file: a table, a slot variable, or values of a whole table.

    Attributes:
      shape: whole shape of the array; `[rows, *row_shape]` if it has rows.
      dtype: name of the type of its elements.
      chunk_rows: rows of a chunk; None: one chunk holds the array.
      initial: value of all elements of a row that no step has touched; None: not known,
        or it differs from row to row.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int | None = None
    initial: float | None = None

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk; an axis without elements still has chunks of one."""
        shape = tuple(max(1, size) for size in self.shape)
        return shape if self.chunk_rows is None else (self.chunk_rows, *shape[1:])

    def __str__(self) -> str:
        """Returns type and shape, such as `float32[10, 4]`."""
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRecord:
    """A table of a checkpoint.

    Attributes:
      vocabulary_size: rows.
      dim: columns.
      dtype: storage type of the table: float32, bfloat16, float16 or int8.
      values: the table's array. Rows of int8 are `dim` codes, scale and bias, as bytes.
      slots: slot variables, counts and hyper-parameters, by name.
      rule: description of the optimizer; None if the table was not trained.
      dynamic: `capacity` and `default_row` of a dynamic table; None for a static one.
      directory: the ids of a dynamic table and what is known of them, by name.
    """

    vocabulary_size: int
    dim: int
    dtype: str
    values: ArrayRecord
    slots: Mapping[str, ArrayRecord]
    rule: Json | None
    dynamic: Json | None = None
    directory: Mapping[str, ArrayRecord] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> dict[str | None, ArrayRecord]:
        """All arrays of the table; that of the values has the name None."""
        return {None: self.values, **self.slots, **self.directory}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """All that a checkpoint says about itself.

    Attributes:
      tables: by name.
      dense: type and shape of each other leaf, by its path.
      description: JSON values that were saved with the state.
    """

    tables: Mapping[str, TableRecord]
    dense: Mapping[str, str]
    description: Json


def array_name(table: str, slot: str | None = None) -> str:
    """Returns the directory of a table's values, or of one of its slot variables.

    Args:
      table: name of the table.
      slot: name of the slot variable, or of an array of a directory, which starts with
        a colon; None: the values.

    Example:
      >>> array_name("user/movie"), array_name("movie", "0/trace")
      ('user%2Fmovie.values', 'movie.slots.0%2Ftrace')
    """
    return ".".join(_array_keys(table, slot))


def _array_keys(table: str, slot: str | None) -> tuple[str, ...]:
    """Returns the keys of an array in the nested dict that orbax reads."""
    if slot is None:
        return (_quote(table), "values")
    if slot.startswith(DIRECTORY_ARRAY):
        return (_quote(table), "directory", _quote(slot[len(DIRECTORY_ARRAY) :]))
    return (_quote(table), "slots", _quote(slot))


def _quote(name: str) -> str:
    """Returns a name without separators; orbax joins keys by dots."""
    return urllib.parse.quote(name, safe="").replace(".", "%2E")


def checkpoint_path(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the absolute path of a checkpoint, without `~`, `..` and symbolic links.

    Orbax refuses relative paths, and tensorstore refuses those with `..`.

    Args:
      path: a path as the user wrote it, local or in a bucket such as `gs://...`.

    Raises:
      CheckpointError: if the path is in another kind of store.
    """
    text = os.fspath(path)
    if "://" not in text:
        return epath.Path(os.path.realpath(local_path(text)))
    if not text.startswith(tuple(STORES)):
        raise CheckpointError(
            f"The path of a checkpoint must be local or start with "
            f"{' or '.join(STORES)}, got {text!r}."
        )
    return epath.Path(text)


def replacement_path(path: epath.Path) -> epath.Path:
    """Returns where the checkpoint is written that will replace one at a path."""
    return path.with_name(f"{path.name}.save-new")


def present_path(path: epath.Path) -> epath.Path:
    """Returns where a checkpoint lies: at its path, or still where it was written.

    A replacement ends with two renames. Between them, and after a kill there, nothing
    lies at the path itself.

    Args:
      path: from `checkpoint_path`.
    """
    new = replacement_path(path)
    return new if not path.exists() and (new / MANIFEST_FILE).exists() else path


def state_directory(directory: str | os.PathLike[str]) -> epath.Path:
    """Returns the directory in which a checkpoint holds its state.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.

    Raises:
      CheckpointError: if there is no checkpoint.
    """
    path = present_path(checkpoint_path(directory))
    for item in STATE_ITEMS:
        if any((path / item / f).exists() for f in (MANIFEST_FILE, STATE_FILE)):
            return path if item == "." else path / item
    steps = (
        [p.name for p in path.iterdir() if p.name.isdigit()] if path.is_dir() else []
    )
    hint = f" Give one of its steps, such as {path / steps[0]}." if steps else ""
    is_part = any((path / name).exists() for name in _STATE_PARTS)
    raise (DamagedCheckpointError if is_part else CheckpointError)(
        f"The directory {path} holds no checkpoint: {MANIFEST_FILE} is missing.{hint}"
    )


def write_tables_file(directory: epath.Path, tables: Mapping[str, TableRecord]) -> None:
    """Writes the description of all tables, for this package and for orbax.

    Args:
      directory: holds the arrays.
      tables: by name.
    """
    record = {
        "format": FORMAT_VERSION,
        "tables": {name: _json_of(table) for name, table in tables.items()},
    }
    (directory / TABLES_FILE).write_text(json.dumps(record, indent=1))
    entries = {}
    for name, table in tables.items():
        for slot in table.arrays:
            keys = _array_keys(name, slot)
            entries[str(keys)] = {
                # 2: the key of a dict.
                "key_metadata": [{"key": key, "key_type": 2} for key in keys],
                "value_metadata": {
                    "value_type": "np.ndarray",
                    "skip_deserialize": False,
                },
            }
    metadata = {
        "tree_metadata": entries,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (directory / ORBAX_FILE).write_text(json.dumps(metadata))


def _json_of(table: TableRecord) -> Json:
    record = dataclasses.asdict(table)
    if table.dynamic is None:
        del record["dynamic"], record["directory"]
    return record


def write_state_file(
    directory: epath.Path, dense: Mapping[str, str], description: Json
) -> None:
    """Writes the names of the other leaves, and the user's description."""
    record = {"format": FORMAT_VERSION, "dense": dense, "description": description}
    (directory / STATE_FILE).write_text(json.dumps(record, indent=1))


def describe(directory: str | os.PathLike[str]) -> CheckpointRecord:
    """Returns the description of a checkpoint, which it checks for damage.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.

    Raises:
      CheckpointError: if there is no checkpoint, or a description is damaged.
    """
    with one_save(directory) as root:
        files = read_manifest(root)
        tables = _read_json(root, f"{TABLES}/{TABLES_FILE}", files)
        state = _read_json(root, STATE_FILE, files)
    return CheckpointRecord(
        tables={name: _table_record(t) for name, t in tables["tables"].items()},
        dense=state["dense"],
        description=state["description"],
    )


def _table_record(record: Json) -> TableRecord:
    by_name = {
        field: {name: _array_record(a) for name, a in record.get(field, {}).items()}
        for field in ("slots", "directory")
    }
    values = _array_record(record["values"])
    return TableRecord(**{**record, "values": values, **by_name})


def _array_record(record: Json) -> ArrayRecord:
    return ArrayRecord(**{**record, "shape": tuple(record["shape"])})


def write_manifest(root: epath.Path) -> None:
    """Writes size and checksum of every file of a state. Call it last.

    Args:
      root: directory of the state.
    """
    names = sorted(_files_below(root))
    with ThreadPoolExecutor(_READERS) as threads:
        sums = threads.map(lambda name: _measure(root / name, name), names)
        files = dict(zip(names, sums, strict=True))
    text = json.dumps(files)
    record = {
        "format": FORMAT_VERSION,
        "save": uuid.uuid4().hex,
        "digest": _crc(text.encode()),
        "files": text,
    }
    (root / MANIFEST_FILE).write_text(json.dumps(record))


def read_manifest(root: epath.Path) -> dict[str, list[Any]]:
    """Returns size and checksum of each file of a state, by its path.

    Args:
      root: directory of the state.

    Raises:
      CheckpointError: if the manifest is missing or damaged, or of a later version.
    """
    return json.loads(_whole_manifest(root)["files"])


def _whole_manifest(root: epath.Path) -> Json:
    path = root / MANIFEST_FILE
    try:
        text = path.read_text()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        record = json.loads(text)
        version, text = record["format"], record["files"]
        is_whole = record["digest"] == _crc(text.encode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"The file {path} is no manifest of te.save: {type(error).__name__}: "
            f"{error}. Give the directory of a checkpoint, or restore an earlier one."
        ) from error
    if not is_whole:
        raise damaged(path, "its checksum differs")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {root} has format {version!r}, and this package reads "
            f"format {FORMAT_VERSION}; install a later tpu_embedding."
        )
    return record


@contextlib.contextmanager
def one_save(directory: str | os.PathLike[str]) -> Iterator[epath.Path]:
    """Yields the `state_directory` to read, and checks that one save wrote all of it.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.

    Raises:
      CheckpointError: if there is no checkpoint; or if another save replaced it while
        the block ran, in place of any error that the block met by that.
    """
    root = state_directory(directory)
    manifest = _whole_manifest(root)
    try:
        yield root
    except Exception:
        _check_same_save(root, manifest)
        raise
    _check_same_save(root, manifest)


def _check_same_save(root: epath.Path, manifest: Json) -> None:
    try:
        is_same = _whole_manifest(root) == manifest
    except CheckpointError:
        is_same = False
    if not is_same:
        raise CheckpointError(
            f"The checkpoint {root} was replaced or deleted while it was read, so the "
            "values would come from two saves. Read it again, and restore into a new "
            "state: arrays of the given one may be lost."
        )


def check_files(root: epath.Path, is_wanted: Callable[[str], bool]) -> None:
    """Compares files with the manifest: their sizes and checksums.

    It reads all bytes of small files, and the checksum at the end of chunks. The reader
    of a chunk compares the chunk with it.

    Args:
      root: directory of the state.
      is_wanted: says whether to check a file, by its path.

    Raises:
      CheckpointError: if a file is missing, or another one than was saved.
    """
    files = {k: v for k, v in read_manifest(root).items() if is_wanted(k)}

    def error_of(name: str) -> CheckpointError | None:
        size, checksum = files[name]
        try:
            found_size, found_checksum = _measure(root / name, name)
        except OSError as error:
            return unreadable(root / name, error)
        if found_size != size:
            return damaged(root / name, f"it has {found_size} bytes instead of {size}")
        if found_checksum != checksum:
            return damaged(root / name, "its checksum differs")
        return None

    with ThreadPoolExecutor(_READERS) as threads:
        errors = list(threads.map(error_of, files))
    for error in errors:
        if error is not None:
            raise error


def _read_json(root: epath.Path, name: str, files: Mapping[str, Any]) -> Json:
    if name not in files:
        raise CheckpointError(
            f"The file {root / MANIFEST_FILE} lists no {name}, so {root} is no "
            "checkpoint of te.save; give another directory."
        )
    check_files(root, name.__eq__)
    return json.loads((root / name).read_text())


def _files_below(root: epath.Path, prefix: str = "") -> Iterator[str]:
    for path in root.iterdir():
        name = f"{prefix}{path.name}"
        if path.is_dir():
            yield from _files_below(path, f"{name}/")
        else:
            yield name


def is_chunk(name: str) -> bool:
    """Returns True if a path of a state is that of a chunk of an array."""
    parts = name.split("/")
    return len(parts) > 2 and parts[0] == TABLES and parts[2] == "c"


def _measure(path: epath.Path, name: str) -> list[Any]:
    """Returns size and checksum of a file; of a chunk, the checksum that it holds."""
    if is_chunk(name):
        size = path.stat().length
        with path.open("rb") as file:
            file.seek(max(0, size - _CHECKSUM_BYTES))
            return [size, file.read().hex()]
    size, checksum = 0, 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return [size, f"{checksum:08x}"]


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
