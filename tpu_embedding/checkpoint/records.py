"""The names and contents of a checkpoint, as its file `state.json` describes them.

A checkpoint is an orbax checkpoint of a pytree, with one file more::

    _METADATA                the tree, for orbax
    state.json               types, optimizers, other leaves, the user's description
    tables.movie.values/     [vocabulary_size, dim], rows in natural order
    tables.movie.slots.momenta/
    tables.user.directory.ids/      of a dynamic table: its ids, rising, one per row
    dense.linear.kernel/     all other leaves of the state

Each array is a zarr 3 directory. Stacking, packing and devices leave no trace, so any
plan and any reader of orbax checkpoints or zarr can read it. This module knows no
devices. It also has the error of checkpoints, which errors of libraries become.
"""

import contextlib
import dataclasses
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, Final

from etils import epath

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
"""Errors of libraries, and of values that have another type than a save writes."""


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing, damaged, or does not fit the state.

    It names the checkpoint, the array or table, and what to do instead.
    """


@contextlib.contextmanager
def errors_of_writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises `CheckpointError` if a checkpoint cannot be written.

    Args:
      path: the checkpoint.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # tensorstore and orbax raise all of them for a full disk.
        raise CheckpointError(
            f"The checkpoint {path} cannot be written: {_first_words(error)}. "
            "Make room on the disk, give a directory that can be written, or convert "
            "a leaf whose dtype no file can hold."
        ) from error


@contextlib.contextmanager
def errors_of_reading(owner: str) -> Iterator[None]:
    """Raises `CheckpointError` if a file of a checkpoint is missing or damaged.

    Args:
      owner: the array or file, for the message.
    """
    try:
        yield
    except CheckpointError:
        raise
    except _ERRORS_OF_FILES as error:
        raise CheckpointError(
            f"{owner} is missing or damaged: {_first_words(error)}. Restore an earlier "
            "checkpoint, or copy the files again."
        ) from error


def _first_words(error: Exception) -> str:
    """Returns the type and first line of an error, without its line in a source."""
    text = str(error).partition(" [")[0].partition("\n")[0].rstrip(". ")
    return f"{type(error).__name__}: {text}"


STATE_FILE: Final = "state.json"
TABLES: Final = "tables"
DENSE: Final = "dense"

DIRECTORY_ARRAY: Final = ":"
"""Beginning of the names of arrays that describe the ids of a dynamic table."""

STORES: Final = {"gs://": "gcs", "s3://": "s3"}
"""Beginning of a path in a bucket, and the driver of tensorstore for it."""

STATE_ITEMS: Final = (".", "default", "state")
"""Directories of a state in a checkpoint: alone, or an item of a CheckpointManager."""

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """An array of the checkpoint: a table, a slot variable, or values of a whole table.

    Attributes:
      shape: whole shape of the array; `[rows, *row_shape]` if it has rows.
      dtype: name of the type of its elements.
      has_rows: False for values of a whole table, such as a count of steps.
    """

    shape: tuple[int, ...]
    dtype: str
    has_rows: bool = False

    @property
    def row(self) -> tuple[Any, ...]:
        """Type and shape of a row; of the whole array without rows."""
        return self.dtype, self.shape[1:] if self.has_rows else self.shape

    def __str__(self) -> str:
        """Returns type and shape, such as `float32[10, 4]`."""
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRecord:
    """A table of a checkpoint.

    Attributes:
      vocabulary_size: rows.
      dim: columns.
      dtype: storage type of the table: float32, bfloat16 or int8.
      values: the table's array. Rows of int8 are `dim` codes, scale and bias, as bytes.
      slots: slot variables, counts and hyper-parameters, by name.
      optimizer: types of the optimizer's state, and the way it is applied; None if the
        table was not trained.
      dynamic: `capacity` and `default_row` of a dynamic table; None for a static one.
      directory: the ids of a dynamic table and what is known of them, by name.
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
        """All arrays of the table by name; the values have the name None."""
        return {None: self.values, **self.slots, **self.directory}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """All that a checkpoint says about itself.

    Attributes:
      tables: tables by name.
      dense: type and shape of each other leaf, by its path.
      description: JSON values that were saved with the state.
      step: name of the step's directory if a `CheckpointManager` saved it, else empty.
      checksums: checksums of each array's files, by the array's name: the CRC-32 of its
        metadata, then the CRC-32C of each chunk, in hexadecimal. Empty in format 2.
      digest: digest of all of the above, which identifies the save.
    """

    tables: Mapping[str, TableRecord]
    dense: Mapping[str, str]
    description: Json
    step: str = ""
    checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
    digest: str = ""

    @property
    def array_names(self) -> list[str]:
        """Names of all arrays, which are also the names of their directories."""
        keys = [
            array_keys(table, slot)
            for table, record in self.tables.items()
            for slot in record.arrays
        ]
        keys += map(dense_keys, self.dense)
        return [".".join(parts) for parts in keys]


def array_keys(table: str, slot: str | None = None) -> tuple[str, ...]:
    """Returns the keys of an array in the tree; joined by dots, they name its files.

    Args:
      table: name of the table.
      slot: name of the slot variable, or of an array of a directory, which starts with
        a colon. Defaults to the values.

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
    """Returns the keys of another leaf in the tree, by its path with dots."""
    return (DENSE, *path.split("."))


def quote(name: str) -> str:
    """Returns a name without separators; orbax joins keys by dots."""
    return urllib.parse.quote(name, safe="").replace(".", "%2E")


def checkpoint_path(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the absolute path of a checkpoint, without `~`, `..` and symbolic links.

    Orbax rejects relative paths, and tensorstore rejects paths with `..`.

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


def state_directory(directory: str | os.PathLike[str]) -> epath.Path:
    """Returns the directory in which a checkpoint holds its state.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.

    Raises:
      CheckpointError: if the checkpoint is missing.
    """
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
