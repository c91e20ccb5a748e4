"""Recognizes file formats, opens files, and splits SparseCore stacks into tables.

`open_tables` tries TensorFlow, then Orbax, then named arrays. `open_stacked_tables`
opens tables that other libraries stacked for SparseCores. Their rows are put into
natural order as they are read.
"""

import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpu_embedding.argument_checks import invalid
from tpu_embedding.checkpoint.imports import tensorflow
from tpu_embedding.checkpoint.imports.named_arrays import (
    arrays_of_mapping,
    arrays_of_path,
    tables_by_name,
    tables_of_state_dict,
)
from tpu_embedding.checkpoint.imports.orbax import arrays_of_checkpoint
from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable, TableSource
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.config import TableConfig
from tpu_embedding.paths import local_path

_ROW_ALIGNMENT: Final = 8
"""On each shard, a table's row count is padded to a multiple of this number."""

# Patterns for array names in keras-rs 0.4 and in jax-tpu-embedding 0.2.
_ARRAY_OF_STACK: Final = (
    re.compile(r"(?:.*/)?var:(?P<stack>.+?):table(?::slot:(?P<slot>.+))?"),
    re.compile(r"(?:.*/)?(?P<stack>[^/]+)/(?:table|slot/(?P<slot>[^/]+))"),
)


def open_tables(source: str | pathlib.Path | Mapping[str, Any]) -> TableSource:
    """Opens the tables in another library's file or checkpoint.

    Args:
      source: a dict of arrays, for example from `np.load` of an `.npz` file, or a path
        to one of these:

        * a `.safetensors` file, or a directory with several. Arrays are named `"table"`
          and `"table/slot"`, or as in a TorchRec state dict.
        * a TensorFlow checkpoint: its prefix, a directory of checkpoints, or a
          SavedModel directory. To read it, you need TensorFlow from the extra `tf`.
        * an Orbax checkpoint: an item, a step, or a CheckpointManager directory, whose
          latest step is read. Tables are named by their array paths.

        If the tables were saved in stacks, use `open_stacked_tables`.

    Returns:
      The tables. `print` shows them, and `import_tables` writes them to a model.

    Raises:
      CheckpointError: if the source is missing or damaged, or its format is unknown.

    Example:
      >>> import numpy as np
      >>> print(open_tables({"movie": np.zeros((10, 4), np.float32)}))
      arrays
        movie: float32[10, 4]
    """
    if isinstance(source, Mapping):
        return _named_tables(arrays_of_mapping(source), "arrays")
    if not isinstance(source, str | os.PathLike):
        rule, line = "be a path or a dict of arrays", "Write {'movie': array}."
        raise invalid("source", rule, source, line, TypeError)
    try:
        return _open(local_path(source))
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}.") from error


def _open(path: pathlib.Path) -> TableSource:
    # TensorFlow comes first, because its paths may be prefixes that aren't files.
    if prefix := tensorflow.find_prefix(path):
        return tensorflow.tables_of_checkpoint(prefix)
    if path.is_dir() and (arrays := arrays_of_checkpoint(path)):
        named = {"/".join(leaf): array for leaf, array in arrays.items()}
        return tables_by_name(named, f"orbax checkpoint {path}")
    return _named_tables(arrays_of_path(path), str(path))


def _named_tables(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    return tables_of_state_dict(arrays, origin) or tables_by_name(arrays, origin)


def open_stacked_tables(
    path: str | pathlib.Path,
    tables: Sequence[TableConfig],
    *,
    stacks: Mapping[str, Sequence[str]],
    num_sparse_cores: int,
    rotation: int,
) -> TableSource:
    """Opens stacked tables in a checkpoint that was trained on SparseCores.

    You describe the stacking, because it is not read from the checkpoint. Note that a
    wrong rotation raises no error, so compare a few rows with the trained model.

    Args:
      path: a checkpoint that `open_tables` can open. A stack's array is named
        `var:STACK:table` in keras-rs, `STACK/table` in jax-tpu-embedding, and `STACK`
        in TensorFlow.
      tables: table configs, with the names, rows and dims used in training.
      stacks: maps a stack's name to its table names, in row order.
      num_sparse_cores: total number of SparseCores used in training.
      rotation: distance in shards from a table's row 0 to the next table's row 0 in
        the stack. It equals the number of SparseCores per device: 2 or 4, depending on
        the TPU generation.

    Returns:
      The tables; see `open_tables`.

    Raises:
      CheckpointError: if the checkpoint is damaged, or its stacks don't fit.

    Example:
      >>> import tempfile
      >>> import safetensors.numpy
      >>> import tpu_embedding as te
      >>> movie = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> # Two shards of 8 rows each: the table's even rows, then its odd rows.
      >>> stack = np.repeat(np.arange(16), 4).reshape(16, 4).astype(np.float32)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = folder + "/stack.safetensors"
      ...     safetensors.numpy.save_file({"movies/table": stack}, path)
      ...     options = {"num_sparse_cores": 2, "rotation": 1}
      ...     source = open_stacked_tables(
      ...         path, [movie], stacks={"movies": ["movie"]}, **options
      ...     )
      ...     np.asarray(source.tables["movie"].values)[:4, 0].tolist()
      [0.0, 8.0, 1.0, 9.0]
    """
    known_stacks = _stacks_of(open_tables(path))
    configs = {str(table.name): table for table in tables}
    result: dict[str, SourceTable] = {}
    for stack_name, names in stacks.items():
        if stack_name not in known_stacks or not configs.keys() >= set(names):
            rule = (
                f"be a stack of {path}, which has {sorted(known_stacks)}, with tables "
            )
            rule += f"{list(names)} that tables= describes"
            raise invalid("stacks", rule, stack_name, "", CheckpointError)
        stack, members = known_stacks[stack_name], [configs[name] for name in names]
        rows = num_sparse_cores * sum(
            rows_in_shard(x.max_rows, num_sparse_cores) for x in members
        )
        # The stack's dim is padded, so it may be larger than the tables' dims.
        shape, dim = [*stack.values.shape], max(config.dim for config in members)
        if shape[0] != rows or shape[1] < dim:
            rule = (
                f"have {rows} rows of dim {dim} on {num_sparse_cores} SparseCores for "
            )
            rule += f"its tables {list(names)}"
            line = "Check num_sparse_cores and the tables' vocabulary sizes and dims."
            field = f"{path}: stack {stack_name}"
            raise invalid(field, rule, shape, line, CheckpointError)
        row_offset = 0
        for i, config in enumerate(members):
            rows_of_table = functools.partial(
                _rows_of_table,
                config=config,
                num_shards=num_sparse_cores,
                row_offset=row_offset,
                rotation=i * rotation,
            )
            result[str(config.name)] = SourceTable(
                values=rows_of_table(stack.values),
                slots={k: rows_of_table(slot) for k, slot in stack.slots.items()},
            )
            row_offset += rows_in_shard(config.max_rows, num_sparse_cores)
    return TableSource(origin=f"stacked checkpoint {path}", tables=result)


def _stacks_of(source: TableSource) -> dict[str, SourceTable]:
    tables = {name: table.values for name, table in source.tables.items()}
    slots = {name: dict(table.slots) for name, table in source.tables.items()}
    for name, table in source.tables.items():
        matches = (pattern.fullmatch(name) for pattern in _ARRAY_OF_STACK)
        if match := next((x for x in matches if x), None):
            stack, slot = match["stack"], match["slot"]
            if slot is None:
                tables[stack] = table.values
            else:
                slots.setdefault(stack, {})[slot] = table.values
    return {
        name: SourceTable(values=array, slots=slots.get(name, {}))
        for name, array in tables.items()
    }


def rows_in_shard(vocabulary_size: int, num_shards: int) -> int:
    """Counts a table's rows per shard, including padding.

    Example:
      >>> rows_in_shard(100, 8)
      16
    """
    group = _ROW_ALIGNMENT * num_shards
    return -(-vocabulary_size // group) * _ROW_ALIGNMENT


def _rows_of_table(
    stack: RowArray,
    config: TableConfig,
    num_shards: int,
    row_offset: int,
    rotation: int,
) -> RowArray:
    """Reads a table or slot variable in natural order.

    TensorFlow, jax-tpu-embedding and keras-rs concatenate one shard per SparseCore.
    Row `i` is

        in shard    (i + rotation) % num_shards
        at row      row_offset + i // num_shards
    """
    row_shape = (config.dim,) if len(stack.shape) > 1 else ()

    def read(start: int, num_rows: int) -> np.ndarray:
        rows = np.empty((num_rows, *row_shape), stack.dtype)
        # Rows i, i + num_shards, ... are adjacent in a shard, so a range of rows takes
        # one read per shard.
        for first in range(min(num_shards, num_rows)):
            row = start + first
            shard = (row + rotation) % num_shards
            position = shard * (stack.shape[0] // num_shards) + row_offset
            rows_of_shard = rows[first::num_shards]
            stored = stack.read(position + row // num_shards, len(rows_of_shard))
            rows_of_shard[...] = stored[:, : config.dim] if row_shape else stored
        return rows

    shape = (config.max_rows, *row_shape)
    return RowArray(shape, stack.dtype, read, stack.check)
