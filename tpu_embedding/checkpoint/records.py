"""The layout of a checkpoint, as described in its `state.json`, and `CheckpointError`.

A checkpoint is an Orbax checkpoint of a pytree, plus one file::

    _METADATA                the tree, for Orbax
    state.json               types, optimizers, other leaves, the user's description
    tables.movie.values/     [vocabulary_size, dim], rows in natural order
    tables.movie.slots.momenta/
    tables.user.directory.ids/      a dynamic table's ids, ascending, one per row
    dense.linear.kernel/     a leaf that is neither table nor slot variable

Each array is a zarr 3 directory. The layout doesn't depend on stacking, packing or
devices, so any plan and any Orbax or zarr reader can read it.
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
"""Errors of libraries, and errors caused by values of types that `te.save` never
writes."""


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing, damaged, or does not fit the state.

    Example:
      >>> import tpu_embedding as te
      >>> try:
      ...     te.checkpoint.describe("/nowhere")
      ... except CheckpointError as error:
      ...     print(str(error).partition(":")[0])
      The directory /nowhere holds no checkpoint
    """


def errors_of_writing(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Turns errors raised while a checkpoint is written into `CheckpointError`."""
    fix = "Free disk space, choose a writable directory, or convert leaves whose dtype "
    fix += "files cannot store."
    # Tensorstore and Orbax may raise any of these when the disk is full.
    kinds = (OSError, RuntimeError, ValueError)
    return _as_checkpoint_error(kinds, f"The checkpoint {path} cannot be written", fix)


def errors_of_reading(owner: str) -> AbstractContextManager[None]:
    """Turns errors raised while an array or file is read into `CheckpointError`."""
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
        # The first line, without tensorstore's source location.
        text = str(error).partition(" [")[0].partition("\n")[0].rstrip(". ")
        text = f"{problem}: {type(error).__name__}: {text}. {fix}"
        raise CheckpointError(text) from error


STATE_FILE: Final = "state.json"
TABLES: Final = "tables"
DENSE: Final = "dense"

DIRECTORY_ARRAY: Final = ":"
"""Prefix of the names of arrays that describe a dynamic table's ids."""

STORES: Final = {"gs://": "gcs", "s3://": "s3"}
"""Bucket prefix to tensorstore driver."""

STATE_ITEMS: Final = (".", "default", "state")
"""Where a checkpoint may hold its state: at its root, or in an Orbax item."""

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """An array of a checkpoint: rows, or values that belong to a whole table.

    Attributes:
      shape: shape of the array; `[rows, *row_shape]` if it has rows.
      dtype: name of the element type.
      has_rows: whether the first axis counts rows. False for values that belong to a
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
        """Type and shape of one row if the array has rows, else of the whole array."""
        return self.dtype, self.shape[1:] if self.has_rows else self.shape

    def __str__(self) -> str:
        """Returns the type and shape, such as `float32[10, 4]`."""
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRecord:
    """A table of a checkpoint.

    Attributes:
      vocabulary_size: number of rows.
      dim: number of columns.
      dtype: storage type of the table: float32, bfloat16 or int8.
      values: the table's rows. An int8 row is stored as bytes: `dim` codes, a scale and
        a bias.
      slots: slot variables, counts and hyper-parameters, by name.
      optimizer: types in the optimizer's state, and how the optimizer applies updates.
        None if the table has no optimizer.
      dynamic: `capacity` and `default_row` of a dynamic table. None for a static one.
      directory: arrays of a dynamic table's ids and of their statistics, by name.

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
        """All arrays of the table by name. The table's values have the name None."""
        return {None: self.values, **self.slots, **self.directory}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint's description of its own contents.

    Attributes:
      tables: tables by name.
      dense: type and shape of every other leaf, by path.
      description: JSON values that the user saved with the state.
      step: name of the step's directory if a `CheckpointManager` saved it, else empty.
      checksums: array name to its checksums as one hexadecimal text: the CRC-32 of its
        metadata, then the CRC-32C of each chunk.
      digest: digest of all other fields. It identifies the save.

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
        """Names of all arrays, which are also the names of their directories."""
        keys = [
            array_keys(table, slot)
            for table, record in self.tables.items()
            for slot in record.arrays
        ]
        keys += map(dense_keys, self.dense)
        return [".".join(parts) for parts in keys]


def array_keys(table: str, slot: str | None = None) -> tuple[str, ...]:
    """Returns an array's keys in the tree. Joined by dots, they name its directory.

    Args:
      table: name of the table.
      slot: name of a slot variable, or name of an array of the table's ids, which
        starts with a colon. Defaults to the table's values.

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
    """Returns the keys in the tree of a dense leaf, given its dotted path."""
    return (DENSE, *path.split("."))


def quote(name: str) -> str:
    """Returns a name with slashes and dots escaped. Orbax joins keys with dots."""
    return urllib.parse.quote(name, safe="").replace(".", "%2E")


def checkpoint_path(path: str | os.PathLike[str]) -> epath.Path:
    """Returns a checkpoint's absolute path, without `~`, `..` or symbolic links.

    Orbax rejects relative paths, and tensorstore rejects `..`.

    Raises:
      CheckpointError: if the kind of store is not supported.
    """
    text = os.fspath(path)
    if "://" not in text:
        return epath.Path(os.path.realpath(local_path(text)))
    if not text.startswith(tuple(STORES)):
        rule = f"be local or start with {' or '.join(STORES)}"
        raise invalid("A checkpoint's path", rule, text, "", CheckpointError)
    return epath.Path(text)


def state_directory(directory: str | os.PathLike[str]) -> epath.Path:
    """Returns the directory in which a checkpoint holds its state.

    Args:
      directory: checkpoint from `te.save`, or one step of a `CheckpointManager`.

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
