"""Reads and writes checkpoint arrays with tensorstore, chunk by chunk.

Arrays are uncompressed zarr 3. Each chunk ends with its CRC-32C. In a large table, a
chunk takes 10 to 20 MB. When saving, Orbax passes all leaves to an `ArrayWriter`. It
streams stacks block by block (`tables/row_stream.py`), so neither devices nor host hold
a second copy of a table. When reading, `SavedArray` trusts nothing on disk that
`state.json` doesn't confirm.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from tpu_embedding.argument_checks import invalid
from tpu_embedding.checkpoint.records import (
    STORES,
    ArrayRecord,
    CheckpointError,
    CheckpointRecord,
    array_keys,
    errors_of_reading,
    state_directory,
)
from tpu_embedding.checkpoint.state_file import (
    CRC_BYTES,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    checksum_at,
    chunk_size_and_crc,
    chunks_of,
    metadata_checksum,
    read_small_file,
    read_state_file,
)
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.file_rows import decode_int8, file_row
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.line_exchange import rows_per_block
from tpu_embedding.tables.row_stream import RowBlock, read_blocks
from tpu_embedding.tables.table_values import unstack_tables

MAX_PENDING_BYTES: Final = 2**28
"""Maximum bytes waiting in host memory to be written."""

_READERS: Final = 4
"""Threads that open arrays and read chunks."""

_OPEN_FILES: Final = "/proc/self/fd"
"""Directory with links to the process's open files and directories, on Linux."""

_CODECS: Final = ["bytes", "crc32c"]

_MAX_PADDING: Final = 1 / 128
"""Maximum padding of the last chunk, as a fraction of the array's rows."""


def array_spec(
    path: epath.Path, dtype: Any, shape: Sequence[int], chunk_shape: Sequence[int]
) -> dict[str, Any]:
    """Builds the tensorstore spec for a new array in the directory `path`."""
    return {
        "driver": "zarr3",
        "kvstore": _kvstore(path),
        "metadata": {
            "shape": list(shape),
            "data_type": np.dtype(dtype).name,
            "chunk_grid": {
                "name": "regular",
                # zarr doesn't allow chunk size 0, which an empty axis would have.
                "configuration": {"chunk_shape": [max(1, x) for x in chunk_shape]},
            },
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        },
        # By default, tensorstore writes no file for a chunk of zeros, so the chunk
        # would look like a missing one.
        "store_data_equal_to_fill_value": True,
    }


def rows_per_chunk(num_rows: int, row_shape: Sequence[int], dtype: Any) -> int:
    """Chooses a chunk's row count: all rows, or a divisor of a block's row count."""
    # Each block covers whole chunks, so two processes never write the same chunk.
    size = rows_per_block(math.prod(row_shape) * np.dtype(dtype).itemsize)
    if num_rows <= size:
        return num_rows
    while size > 1 and -num_rows % size > _MAX_PADDING * num_rows:
        size //= 2
    return size


class PendingWrites:
    """Writes in progress. Their size is limited, to bound a save's host memory."""

    def __init__(self):
        self._writes: collections.deque[tuple[int, ts.Future]] = collections.deque()
        self._num_bytes = 0

    def add(self, store: ts.TensorStore, values: np.ndarray) -> None:
        """Starts a write, and waits while more than `MAX_PENDING_BYTES` are pending.

        The values must not change until the write has ended.
        """
        # The flag avoids a copy: tensorstore may read `values` until the commit.
        write = store.write(values, can_reference_source_data_indefinitely=True)
        self._writes.append((values.nbytes, write.commit))
        self._num_bytes += values.nbytes
        while self._num_bytes > MAX_PENDING_BYTES:
            num_bytes, oldest = self._writes.popleft()
            oldest.result()
            self._num_bytes -= num_bytes

    @property
    def futures(self) -> list[ts.Future]:
        return [future for _, future in self._writes]


@dataclasses.dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is being read.

    Attributes:
      root: state directory, for messages.
      files: path to read from. It leads to the same directory even if a new directory
        gets the name `root`.
    """

    root: epath.Path
    files: epath.Path
    record: CheckpointRecord
    threads: ThreadPoolExecutor

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` if the files now belong to another save."""
        if read_state_file(self.root, self.files).digest != self.record.digest:
            raise CheckpointError(
                f"The checkpoint {self.root} was replaced while it was being read. "
                "Restore it again into a new state."
            )


@contextlib.contextmanager
def open_checkpoint(directory: str | os.PathLike[str]) -> Iterator[OpenCheckpoint]:
    """Opens a checkpoint so that everything is read from one save."""
    root = state_directory(directory)
    with contextlib.ExitStack() as ends:
        files = root
        if "://" not in os.fspath(root):
            # On Linux, files are read through a link that leads to the open directory,
            # even if a new directory gets its name. On other systems, `check_unchanged`
            # raises if a new directory has the name.
            with errors_of_reading(f"The checkpoint {root}"):
                opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            ends.callback(os.close, opened)
            linked = epath.Path(_OPEN_FILES) / str(opened)
            files = linked if linked.exists() else root
        record = read_state_file(root, files)
        threads = ends.enter_context(ThreadPoolExecutor(_READERS))
        yield OpenCheckpoint(root, files, record, threads)


class SavedArray:
    """A saved array, opened in the background."""

    def __init__(
        self, checkpoint: OpenCheckpoint, keys: Sequence[str], *records: ArrayRecord
    ):
        """Starts to open the array at `keys`. Its type must match one of `records`."""
        self._name = ".".join(keys)
        self._owner = f"The array {self._name} of {checkpoint.root}"
        self._files = checkpoint.files
        self._records = list(map(str, records))
        self._checksums = checkpoint.record.checksums.get(self._name, "")
        self._opening = checkpoint.threads.submit(self._open)

    def opened(self) -> ts.TensorStore:
        """Waits for the array, or raises `CheckpointError`."""
        with errors_of_reading(self._owner):
            return self._opening.result()

    def read(self, index: Any = ()) -> np.ndarray:
        """Reads the given slices or row ids `[n]`. Defaults to the whole array.

        Raises:
          CheckpointError: if a chunk is missing, damaged, or from another save.
        """
        store = self.opened()
        with errors_of_reading(self._owner):
            # `_check_chunks` compares file sizes, and the checksums at the file ends.
            # Tensorstore then compares the values with these checksums.
            self._check_chunks(store, index)
            values = store[index].read().result()
            # Check again, because the files may have been overwritten during the read.
            self._check_chunks(store, index)
            return values

    def ranges(self) -> Iterator[slice | tuple[()]]:
        """Yields row ranges that cover whole chunks, or `()` for a scalar."""
        store = self.opened()
        if not store.shape:
            yield ()
            return
        step = _chunk_shape(store)[0]
        for start in range(0, store.shape[0], step):
            yield slice(start, min(start + step, store.shape[0]))

    def _open(self) -> ts.TensorStore:
        # Tensorstore kills the process (std::bad_alloc) if a chunk's declared size
        # doesn't fit in memory. So the metadata is checked before tensorstore sees it,
        # and `read` checks that each chunk's file has the declared size.
        file = f"{self._name}/{METADATA_FILE}"
        text = read_small_file(self._files, file, MAX_METADATA_BYTES)
        wanted = checksum_at(self._checksums, 0)
        if metadata_checksum(text) != wanted:
            raise ValueError(f"{METADATA_FILE} does not match its recorded checksum")
        metadata = json.loads(text)
        shape, dtype = tuple(metadata["shape"]), metadata["data_type"]
        actual = str(ArrayRecord(shape=shape, dtype=dtype))
        if actual not in self._records:
            raise ValueError(f"it is {actual} instead of {' or '.join(self._records)}")
        chunk_shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        _check_chunk_format(metadata, chunk_shape)
        spec = array_spec(self._files / self._name, dtype, shape, chunk_shape)
        # Tensorstore uses the checked metadata instead of reading the file again, and
        # raises for missing chunks instead of filling in zeros.
        options = {"assume_metadata": True, "fill_missing_data_reads": False}
        return ts.open(spec | options, read=True).result()

    def _check_chunks(self, store: ts.TensorStore, index: Any) -> None:
        size = math.prod(_chunk_shape(store))
        size = size * store.dtype.numpy_dtype.itemsize + CRC_BYTES
        for chunk in chunks_of(store.shape, _chunk_shape(store), index):
            file = f"{self._name}/{chunk.name}"
            num_bytes, crc = chunk_size_and_crc(self._files, file)
            if num_bytes != size:
                text = f"{chunk.name} has {num_bytes} bytes instead of {size}"
                raise ValueError(text)
            wanted = checksum_at(self._checksums, 1 + chunk.number)
            if crc != wanted:
                text = f"{chunk.name} does not match its recorded checksum"
                raise ValueError(text)


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    return tuple(size or 1 for size in store.chunk_layout.read_chunk.shape or ())


def _check_chunk_format(metadata: dict[str, Any], chunk_shape: Sequence[int]) -> None:
    # File sizes limit a read's memory only if chunks are uncompressed, and have the
    # file names that `_check_chunks` expects.
    codecs, shape = metadata["codecs"], metadata["shape"]
    endian = codecs[0].get("configuration", {}).get("endian", "little")
    if (
        [codec["name"] for codec in codecs] != _CODECS
        or endian != "little"
        or metadata["chunk_grid"]["name"] != "regular"
        or metadata["chunk_key_encoding"] != {"name": "default"}
        or not all(
            type(chunk) is int and 0 < chunk <= max(1, size)
            for chunk, size in zip(chunk_shape, shape, strict=True)
        )
    ):
        raise ValueError(f"{METADATA_FILE} describes chunks that te.save never writes")


def read_table(
    directory: str | os.PathLike[str],
    table: str,
    rows: slice | Any = None,
    *,
    slot: str | None = None,
) -> np.ndarray:
    """Reads rows of a table or slot variable from a checkpoint, without its plan.

    Args:
      directory: checkpoint from `te.save`, or one step of a `CheckpointManager`.
      table: table name.
      rows: a slice with step 1, or row ids `[n]`. Defaults to all rows.
      slot: slot variable name, or `":ids"` for the uint64 ids in a dynamic table, in
        row order. Defaults to the table values.

    Returns:
      `[n, *row_shape]` in the stored type. int8 tables are decoded to float32. Arrays
      that all rows share, such as step counts, are returned whole.

    Raises:
      CheckpointError: if the table or slot is not in the checkpoint, or a file is
        damaged.
      IndexError: if a row id is out of range.
      TypeError: if the row ids are not a one-dimensional integer array.
      ValueError: if the slice's step is not 1.

    Example:
      >>> import tempfile, jax
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     te.save(folder + "/checkpoint", {"tables": tables}, plan=plan)
      ...     rows = te.checkpoint.read_table(folder + "/checkpoint", "movie", [3, 7])
      >>> rows.shape
      (2, 4)
    """
    with open_checkpoint(directory) as checkpoint:
        tables = checkpoint.record.tables
        if table not in tables:
            rule = f"be one of {sorted(tables)} in {checkpoint.root}"
            raise invalid("table", rule, table, "", CheckpointError)
        arrays = tables[table].arrays
        if slot not in arrays:
            rule = f"be one of {sorted(filter(None, arrays))} of table {table!r} in "
            rule += f"{checkpoint.root}"
            raise invalid("slot", rule, slot, "", CheckpointError)
        array = SavedArray(checkpoint, array_keys(table, slot), arrays[slot])
        values = array.read(_index_of(rows, arrays[slot]))
        checkpoint.check_unchanged()
    if slot is None and tables[table].dtype == "int8":
        return decode_int8(values)
    return values


def _index_of(rows: Any, array: ArrayRecord) -> Any:
    if rows is None or not array.has_rows:
        return ()
    size = array.shape[0]
    if isinstance(rows, slice):
        start, stop, step = rows.indices(size)
        if step != 1:
            raise invalid("rows", "have step 1", step)
        return slice(start, max(start, stop))
    row_ids = np.asarray(rows)
    if row_ids.ndim != 1 or (row_ids.size and row_ids.dtype.kind not in "iu"):
        rule = "be a slice or an integer array [n] of row ids"
        raise invalid("rows", rule, row_ids, "Write [3] for a single row.", TypeError)
    outside = row_ids[(row_ids < 0) | (row_ids >= size)]
    if outside.size:
        rule = f"be between 0 and {size - 1}"
        raise invalid("rows", rule, int(outside[0]), "", IndexError)
    return row_ids.astype(np.int64)


def _kvstore(path: epath.Path) -> dict[str, str]:
    text = os.fspath(path)
    for scheme, driver in STORES.items():
        if text.startswith(scheme):
            bucket, _, rest = text.removeprefix(scheme).partition("/")
            return {"driver": driver, "bucket": bucket, "path": f"{rest}/"}
    return {"driver": "file", "path": f"{text}/"}


# Instances are compared by identity, because `serialize` uses them as dict keys.
@dataclasses.dataclass(frozen=True, eq=False)
class StackToSave:
    """Stacked table values, or a stacked slot variable, with the rows to write.

    Attributes:
      chosen: rows to write for each dynamic table, by name, in ascending id order.
    """

    packed: PackedRows
    stack: StackPlan
    plan: EmbeddingPlan
    chosen: Mapping[str, np.ndarray]

    def blocks(self) -> Iterator[RowBlock]:
        """Yields blocks for this process to write.

        All processes must iterate together.
        """
        if self.stack.vocabulary.ids_are_rows:
            for turn in read_blocks(self.packed, self.stack, self.plan):
                yield from turn
            return
        # Rows in id order are scattered over all shards, so each host temporarily holds
        # the whole stack.
        dtype = file_row(self.packed).dtype
        values = unstack_tables({self.stack.name: self.packed}, self.plan)
        if jax.process_index() == 0:
            for table, rows in self.chosen.items():
                # `unstack_tables` widens narrow types to float32.
                saved = values[table][rows].astype(dtype, copy=False)
                yield RowBlock(table, 0, saved)


@dataclasses.dataclass(frozen=True, eq=False)
class TableToSave:
    """One table in a stack, passed to Orbax as a leaf."""

    table: str
    rows: StackToSave
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(file_row(self.rows.packed).dtype)

    @property
    def size(self) -> int:
        # Orbax reads this property.
        return math.prod(self.shape)


class ArrayWriter(ocp.type_handlers.NumpyHandler):
    """Writes all leaves. Plain Orbax reads them as NumPy arrays."""

    # Orbax (0.12) warns if the handler for jax.Array lacks this attribute.
    _array_metadata_store: Final = None

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        """Copies leaves to the host and starts to write them.

        Device arrays may be donated once this returns.
        """
        del args
        created: list[ts.Future] = []
        writes = PendingWrites()
        streams: dict[StackToSave, dict[str, ts.TensorStore]] = {}
        for value, info in zip(values, infos, strict=True):
            spec = array_spec(
                info.path, value.dtype, value.shape, _chunk_shape_of_rows(value)
            )
            if jax.process_index() == 0:
                created.append(ts.open(spec, create=True))
            # `assume_metadata` avoids requests to the file system, so other processes
            # don't wait until the first process has created the array.
            store = ts.open(spec | {"assume_metadata": True}).result()
            if isinstance(value, TableToSave):
                streams.setdefault(value.rows, {})[value.table] = store
                continue
            if isinstance(value, jax.Array) and not value.is_fully_addressable:
                for shard in value.addressable_shards:
                    if shard.replica_id == 0:
                        # Copy the shard, because the next step may donate the array.
                        writes.add(store[shard.index], np.array(shard.data))
            elif jax.process_index() == 0:
                # Every process has the whole leaf, such as a random key, but only the
                # first process writes it.
                writes.add(store, np.array(value))
        # One pass over a stack reads the rows of all its tables.
        for rows, stores in streams.items():
            for table, start, block in rows.blocks():
                writes.add(stores[table][start : start + len(block)], block)
        return [*created, *writes.futures]


def _chunk_shape_of_rows(value: Any) -> tuple[int, ...]:
    # No chunk may have two writers, because one would overwrite the other's values.
    if isinstance(value, TableToSave):
        num_rows, *row_shape = value.shape
        return (rows_per_chunk(num_rows, row_shape, value.dtype), *row_shape)
    if isinstance(value, jax.Array):
        return value.sharding.shard_shape(value.shape)
    return value.shape
