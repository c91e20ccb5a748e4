"""Describes a checkpoint's files, and turns file errors into `CheckpointError`.

A checkpoint is an Orbax checkpoint of zarr 3 arrays, such as `tables.movie.values/` and
`dense.linear.kernel/`, plus a `state.json` that holds a `CheckpointRecord`.
docs/guides/checkpoints.md lists the files. This module never touches a device.
"""

import contextlib
import dataclasses
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from etils import epath

from tpu_embedding.argument_checks import invalid
from tpu_embedding.paths import local_path

_ERRORS_OF_FILES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that damaged files cause. The libraries that read the files raise them, and so
does our own code if a value has a type that `te.save` never writes."""


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing, damaged, or doesn't fit the state.

    Example:
      >>> import tpu_embedding as te
      >>> try:
      ...     te.checkpoint.describe("/nowhere")
      ... except CheckpointError as error:
      ...     print(str(error).partition(":")[0])
      The directory /nowhere holds no checkpoint
    """


def errors_of_writing(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Turns errors from writing a checkpoint into `CheckpointError`."""
    fix = "Free disk space, choose a writable directory, or convert leaves whose dtype "
    fix += "files cannot store."
    # Tensorstore and Orbax may raise any of these types when the disk is full.
    kinds = (OSError, RuntimeError, ValueError)
    return _as_checkpoint_error(kinds, f"The checkpoint {path} cannot be written", fix)


def errors_of_reading(owner: str) -> AbstractContextManager[None]:
    """Turns errors from reading an array or file into `CheckpointError`."""
    problem = f"{owner} is missing or damaged"
    fix = "Restore an earlier checkpoint or copy the files again."
    return _as_checkpoint_error(_ERRORS_OF_FILES, problem, fix)


@contextlib.contextmanager
def _as_checkpoint_error(
    kinds: tuple[type[Exception], ...], problem: str, fix: str
) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except kinds as error:
        # Keep only the first line, without the source location that tensorstore
        # appends.
        text = str(error).partition(" [")[0].partition("\n")[0].rstrip(". ")
        text = f"{problem}: {type(error).__name__}: {text}. {fix}"
        raise CheckpointError(text) from error


STATE_FILE: Final = "state.json"
TABLES: Final = "tables"
DENSE: Final = "dense"

DIRECTORY_ARRAY: Final = ":"
"""Prefix for names of arrays about a dynamic table's ids. Slot names don't have it."""

STORES: Final = {"gs://": "gcs", "s3://": "s3"}
"""Maps a bucket prefix to its tensorstore driver."""

STATE_ITEMS: Final = (".", "default", "state")
"""Where a checkpoint may hold its state: at its root, or in an Orbax item."""

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """The shape and type of a saved array.

    Attributes:
      shape: array shape; `[rows, *row_shape]` if the array has rows.
      dtype: name of the element type.
      has_rows: True if the first axis is the row axis. False for values of a whole
        table, such as a step count.

    Example:
      >>> print(ArrayRecord(shape=(10, 4), dtype="float32", has_rows=True))
      float32[10, 4]
    """

    shape: tuple[int, ...]
    dtype: str
    has_rows: bool = False

    @property
    def row(self) -> tuple[Any, ...]:
        """Type and shape of a row, or of the whole array if it has no rows."""
        return self.dtype, self.shape[1:] if self.has_rows else self.shape

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRecord:
    """A saved table.

    Attributes:
      vocabulary_size: row count.
      dim: column count.
      dtype: storage type: float32, bfloat16 or int8.
      values: table rows. An int8 row is stored as bytes: `dim` codes, a scale and a
        bias.
      slots: slot variables, counts and hyper-parameters, by name.
      optimizer: state types, and settings that affect how updates are applied. None if
        the table has no optimizer.
      dynamic: the table's `capacity` and `default_row`. None if it is static.
      directory: arrays with a dynamic table's ids and their statistics, by name.

    Example:
      >>> values = ArrayRecord(shape=(10, 4), dtype="float32", has_rows=True)
      >>> sizes = {"vocabulary_size": 10, "dim": 4, "dtype": "float32"}
      >>> movie = TableRecord(**sizes, values=values, slots={}, optimizer=None)
      >>> print(movie.values)
      float32[10, 4]
    """

    vocabulary_size: int
    dim: int
    dtype: str
    values: ArrayRecord
    slots: Mapping[str, ArrayRecord]
    optimizer: Json | None
    dynamic: Json | None = None
    directory: Mapping[str, ArrayRecord] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> dict[str | None, ArrayRecord]:
        """All arrays by name. The table values have the name None."""
        return {None: self.values, **self.slots, **self.directory}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint's description of its own contents.

    Attributes:
      tables: tables by name.
      dense: type and shape of every leaf outside tables and slots, by path.
      description: JSON values that you saved with the state.
      step: name of the step directory if a `CheckpointManager` saved the checkpoint,
        else empty.
      checksums: one hexadecimal text per array name. It holds a CRC-32 for the
        metadata, then a CRC-32C for each chunk.
      digest: hash of all other fields, which identifies the save.

    Example:
      >>> dense = {"linear.bias": "float32[1]"}
      >>> CheckpointRecord(tables={}, dense=dense, description={}).array_names
      ['dense.linear.bias']
    """

    tables: Mapping[str, TableRecord]
    dense: Mapping[str, str]
    description: Json
    step: str = ""
    checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
    digest: str = ""

    @property
    def array_names(self) -> list[str]:
        """All array names, which are also the names of the arrays' directories."""
        keys = [
            array_keys(table, slot)
            for table, record in self.tables.items()
            for slot in record.arrays
        ]
        keys += map(dense_keys, self.dense)
        return [".".join(parts) for parts in keys]


def array_keys(table: str, slot: str | None = None) -> tuple[str, ...]:
    """Finds an array's keys in the saved tree.

    Joined with dots, the keys form the name of the array's directory.

    If `slot` starts with a colon, the array is about ids. If `slot` is None, the array
    holds the table values.

    Example:
      >>> array_keys("user/movie"), array_keys("movie", "0/trace")
      (('tables', 'user%2Fmovie', 'values'), ('tables', 'movie', 'slots', '0%2Ftrace'))
    """
    if slot is None:
        return (TABLES, quote(table), "values")
    if slot.startswith(DIRECTORY_ARRAY):
        return (TABLES, quote(table), "directory", quote(slot[len(DIRECTORY_ARRAY) :]))
    return (TABLES, quote(table), "slots", quote(slot))


def dense_keys(path: str) -> tuple[str, ...]:
    return (DENSE, *path.split("."))


def quote(name: str) -> str:
    # Orbax joins keys with dots to name directories, so a dot in a name would make
    # `a.slots.b` ambiguous. `urllib.parse.quote` doesn't escape dots.
    return urllib.parse.quote(name, safe="").replace(".", "%2E")


def checkpoint_path(path: str | os.PathLike[str]) -> epath.Path:
    """Resolves a path, or raises `CheckpointError` for an unsupported bucket prefix."""
    text = os.fspath(path)
    if "://" not in text:
        # Orbax rejects relative paths, and tensorstore rejects `..`.
        return epath.Path(os.path.realpath(local_path(text)))
    if not text.startswith(tuple(STORES)):
        rule = f"be local or start with {' or '.join(STORES)}"
        raise invalid("A checkpoint's path", rule, text, "", CheckpointError)
    return epath.Path(text)


def state_directory(directory: str | os.PathLike[str]) -> epath.Path:
    """Finds where a checkpoint holds its state, or raises `CheckpointError`."""
    path = checkpoint_path(directory)
    for item in STATE_ITEMS:
        if (path / item / STATE_FILE).exists():
            return path if item == "." else path / item
    steps = [p.name for p in path.glob("*") if p.name.isdigit()]
    hint = " Pass a directory that te.save wrote, or a step of a CheckpointManager."
    if steps:
        hint = f" Pass one of its steps, such as {path / steps[0]}."
    if (path / "_METADATA").exists():
        hint = (
            " This is a plain Orbax checkpoint. Restore it with the Checkpointer that "
            "wrote it, or read its tables with te.checkpoint.open_tables."
        )
    raise CheckpointError(
        f"The directory {path} holds no checkpoint: {STATE_FILE} is missing.{hint}"
    )
