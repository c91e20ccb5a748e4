"""Names and describes a checkpoint's files, and turns file errors into one class.

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
"""Errors that libraries raise for damaged files, and errors that values of a type
`te.save` never writes cause in our own code."""


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
    # Tensorstore and Orbax may raise any of these when the disk is full.
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
        # The first line, without the source location that tensorstore appends.
        text = str(error).partition(" [")[0].partition("\n")[0].rstrip(". ")
        text = f"{problem}: {type(error).__name__}: {text}. {fix}"
        raise CheckpointError(text) from error


STATE_FILE: Final = "state.json"
TABLES: Final = "tables"
DENSE: Final = "dense"

DIRECTORY_ARRAY: Final = ":"
"""Prefix that sets arrays about a dynamic table's ids apart from slot variables."""

STORES: Final = {"gs://": "gcs", "s3://": "s3"}
"""Bucket prefix to tensorstore driver."""

STATE_ITEMS: Final = (".", "default", "state")
"""Where a checkpoint may hold its state: at its root, or in an Orbax item."""

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """A saved array: rows, or values that belong to a whole table.

    Attributes:
      shape: array shape; `[rows, *row_shape]` if the array has rows.
      dtype: element type, by name.
      has_rows: True if the first axis counts rows. False for values that belong to a
        whole table, such as a step count.

    Example:
      >>> print(ArrayRecord(shape=(10, 4), dtype="float32", has_rows=True))
      float32[10, 4]
    """

    shape: tuple[int, ...]
    dtype: str
    has_rows: bool = False

    @property
    def row(self) -> tuple[Any, ...]:
        """Type and shape per row if the array has rows, else in total."""
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
      optimizer: types in the optimizer state, and how the optimizer applies updates.
        None if the table has no optimizer.
      dynamic: `capacity` and `default_row`. None if the table is static.
      directory: ids of a dynamic table and their statistics, as arrays by name.

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
        """All arrays by name. The values have the name None."""
        return {None: self.values, **self.slots, **self.directory}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint's description of its own contents.

    Attributes:
      tables: tables by name.
      dense: type and shape of every other leaf, by path.
      description: JSON values that you saved with the state.
      step: name of the step directory if a `CheckpointManager` saved it, else empty.
      checksums: array name to its checksums as one hexadecimal text: a CRC-32 for the
        metadata, then a CRC-32C for each chunk.
      digest: digest over all other fields. It identifies the save.

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
        """All array names, which are also the directory names."""
        keys = [
            array_keys(table, slot)
            for table, record in self.tables.items()
            for slot in record.arrays
        ]
        keys += map(dense_keys, self.dense)
        return [".".join(parts) for parts in keys]


def array_keys(table: str, slot: str | None = None) -> tuple[str, ...]:
    """Maps an array to its keys in the tree. Joined by dots, they name its directory.

    `slot` starts with a colon for arrays about ids. None means the table values.

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
    # `a.slots.b` ambiguous. `urllib.parse.quote` leaves dots alone.
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
