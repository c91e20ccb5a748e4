"""Finds a model's tables by name, and writes their safetensors files.

The safetensors library writes only whole tensors, but a table may be larger than host
memory. So this module writes the header itself, then rows in blocks.
docs/guides/table_dtypes.md describes int8 rows, and docs/guides/serving.md describes
dynamic tables.
"""

import dataclasses
import json
import math
import pathlib
import urllib.parse
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_embedding.argument_checks import invalid
from tpu_embedding.checkpoint.imports.named_arrays import (
    DTYPES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    map_tensors,
    read_header,
)
from tpu_embedding.dynamic.directory import (
    LINE_LANES,
    directory_name,
    dynamic_tables,
)
from tpu_embedding.dynamic.ids_64 import NO_ID, Ids64
from tpu_embedding.dynamic.ids_on_host import rows_in_directory
from tpu_embedding.dynamic.vocabulary import SLOTS_PER_BUCKET
from tpu_embedding.export.program_inputs import ExportError, check_distinct
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.plan.plan import TablePlan
from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES, decode_int8, encode_int8
from tpu_embedding.tables.row_stream import read_blocks

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def create_file(path: pathlib.Path, specs: Mapping[str, Any]) -> None:
    """Creates a file with tensors of zeros, for `write_rows` to fill.

    A spec is an array or a `jax.ShapeDtypeStruct`.
    """
    header, end = {}, 0
    # Readers expect aligned tensors, so the widest elements come first.
    for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
        shape, dtype = specs[name].shape, specs[name].dtype
        if name == "__metadata__":
            fix = "Rename the table."
            rule = "not be reserved by safetensors"
            raise invalid("TableConfig.name", rule, name, fix, ExportError)
        if dtype not in _NAMES:
            rule = f"be one of {sorted(map(str, _NAMES))} in {path.name}"
            raise invalid(f"dtype of {name!r}", rule, str(dtype), kind=ExportError)
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    # Spaces align the first tensor, as the format asks.
    encoded += b" " * (-len(encoded) % LENGTH_BYTES)
    if len(encoded) > MAX_HEADER_BYTES:
        rule = f"have at most {MAX_HEADER_BYTES} bytes for its {len(specs)} tensors"
        raise invalid(f"header of {path.name}", rule, len(encoded), kind=ExportError)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
        file.truncate(LENGTH_BYTES + len(encoded) + end)


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    create_file(path, tensors)
    for name, tensor in tensors.items():
        rows = np.atleast_1d(tensor)
        write_rows(path, name, np.arange(len(rows)), rows)


def write_rows(
    path: pathlib.Path, name: str, row_ids: np.ndarray, rows: np.ndarray
) -> None:
    """Writes rows into a file from `create_file`.

    `row_ids` must be in bounds, and `rows` must have the tensor's dtype.
    """
    if not rows.size:
        return
    content = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    start, row_bytes = read_header(path, ExportError)[name].start, content.shape[1]
    # Consecutive rows are written together.
    gaps = np.flatnonzero(np.diff(row_ids) != 1) + 1
    # With a memory map, a full disk would kill the process instead of raising an
    # OSError.
    with path.open("r+b") as file:
        for ids, run in zip(
            np.split(row_ids, gaps), np.split(content, gaps), strict=True
        ):
            file.seek(start + int(ids[0]) * row_bytes)
            file.write(run.data)


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Maps a file into memory, or raises ExportError. Pages are read when used.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "table.safetensors")
      >>> create_file(path, {"movie": np.ones((2, 3), np.float32)})
      >>> read_tensors(path)["movie"].shape
      (2, 3)
    """
    return map_tensors(path, ExportError)


RowFormat = Literal["float32", "bfloat16", "int8"]
"""Type of the numbers in an exported table."""


def check_row_format(row_format: str) -> None:
    """Raises ExportError for an unknown row format."""
    # All processes check this before a collective operation. Otherwise, an error on one
    # process would leave all other processes waiting.
    if row_format not in get_args(RowFormat):
        rule = f"be one of {get_args(RowFormat)}"
        raise invalid("te.export: dtype", rule, row_format, kind=ExportError)


def encode(rows: np.ndarray, row_format: RowFormat, owner: str) -> np.ndarray:
    """Encodes rows for a file. Rows already in this format are unchanged.

    `rows` are `[rows, dim]` floats, or encoded int8 rows as in a checkpoint.

    Raises:
      ExportError: if int8 can't hold a row, because its values or range are not finite.
    """
    if row_format != "int8":
        return decode(rows).astype(jnp.dtype(row_format), copy=False)
    if rows.dtype == np.uint8:
        return rows
    rows = decode(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        encoded = encode_int8(rows)
    scale = np.ascontiguousarray(encoded[:, -SCALE_AND_BIAS_BYTES:]).view("<f4")[:, 0]
    # The scale is infinite or NaN if a value is, or if the range exceeds float32's
    # maximum.
    is_finite = np.isfinite(scale)
    if not is_finite.all():
        row = rows[np.argmin(is_finite)]
        rule, fix = (
            "be finite, with a finite range, for int8",
            "Export them as float32.",
        )
        ends = [float(row.min()), float(row.max())]
        raise invalid(f"Rows of {owner}", rule, ends, fix, ExportError)
    return encoded


def decode(stored: np.ndarray) -> np.ndarray:
    """Decodes stored rows to float32. Inverts `encode` up to rounding.

    Example:
      >>> rows = np.array([[-1.0, 0.0, 4.0]], np.float32)
      >>> decode(encode(rows, "int8", "example")).round(2).tolist()
      [[-1.0, 0.0, 4.0]]
    """
    if stored.dtype != np.uint8:
        return stored.astype(np.float32, copy=False)
    return decode_int8(stored)


TABLES_DIR: Final = "tables"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredIds:
    """The ids that an export stores for a dynamic table."""

    # uint32 `[buckets, 128]`: the upper words of 64 ids, then their lower words. Empty
    # positions hold `NO_ID`.
    lines: np.ndarray
    # int64 `[rows]`: for each table row, its row in the file. -1 marks rows without an
    # id, which are not written.
    file_rows: np.ndarray
    # Row count in the file: 64 per bucket, plus 1 for a learned default row.
    num_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTable:
    """A table and its layer. `ids` is None for a static table."""

    layer: TPUEmbedding
    table: TablePlan
    ids: StoredIds | None = None

    def tensor_specs(
        self, name: str, row_format: RowFormat
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes the exported rows, and a dynamic table's ids."""
        config = self.table.config
        num_rows = config.max_rows if self.ids is None else self.ids.num_rows
        width, dtype = config.dim, row_format
        if row_format == "int8":
            width, dtype = config.dim + SCALE_AND_BIAS_BYTES, "uint8"
        specs = {name: jax.ShapeDtypeStruct((num_rows, width), jnp.dtype(dtype))}
        if self.ids is not None:
            lines = self.ids.lines
            specs[directory_name(name)] = jax.ShapeDtypeStruct(lines.shape, lines.dtype)
        return specs


def table_prefix(path: str, layers: Collection[str]) -> str:
    return f"{path}/" if len(layers) > 1 else ""


def tables_of_model(model: nnx.Module) -> dict[str, LayerTable]:
    """Finds all tables in a model. All processes must call this together."""
    layers = embedding_layers(model)
    if not layers:
        rule, fix = "own a TPUEmbedding to be exported", "Use jax.export instead."
        raise invalid("te.export: model", rule, model, fix, ExportError)
    named = [
        (table_prefix(path, layers) + table.table.name, table)
        for path, layer in layers.items()
        for table in _tables_of_layer(layer)
    ]
    ids = [directory_name(name) for name, table in named if table.ids is not None]
    check_distinct("tables", [*(name for name, _ in named), *ids])
    return dict(named)


def _tables_of_layer(layer: TPUEmbedding) -> Iterator[LayerTable]:
    packed = layer.tables.get_value()
    for stack in layer.plan.stacks:
        if stack.vocabulary.ids_are_rows:
            for table in stack.tables:
                yield LayerTable(layer=layer, table=table)
            continue
        # All processes take part in this, even if only the first process writes.
        rows_by_table = rows_in_directory(packed[directory_name(stack.name)], stack)
        for member in dynamic_tables(stack):
            rows = rows_by_table[member.table.name]
            lines = np.full((member.dynamic.num_buckets, LINE_LANES), NO_ID, np.uint32)
            bucket, lane = np.divmod(rows.natural_rows, SLOTS_PER_BUCKET)
            words = Ids64.of_array(rows.ids)
            lines[bucket, lane] = words.high
            lines[bucket, lane + SLOTS_PER_BUCKET] = words.low
            num_rows = member.dynamic.num_places
            file_rows = np.full(member.table.num_rows, -1, np.int64)
            file_rows[rows.rows] = rows.natural_rows
            if member.default_row is not None:
                file_rows[member.default_row] = num_rows
                num_rows += 1
            ids = StoredIds(lines=lines, file_rows=file_rows, num_rows=num_rows)
            yield LayerTable(layer=layer, table=member.table, ids=ids)


def write_table_files(
    directory: pathlib.Path | None,
    tables: Mapping[str, LayerTable],
    row_format: RowFormat,
) -> None:
    """Writes one file per table, block by block. All processes must call this together.

    `directory` is None in a process that only helps to read. `read_blocks` bounds the
    memory.
    """
    files = {}
    if directory is not None:
        (directory / TABLES_DIR).mkdir()
        for name, table in tables.items():
            # Names may contain slashes and other characters that file names can't.
            file_name = f"{urllib.parse.quote(name, safe='')}.safetensors"
            files[name] = file = directory / TABLES_DIR / file_name
            create_file(file, table.tensor_specs(name, row_format))
            if table.ids is not None:
                lines = table.ids.lines
                write_rows(file, directory_name(name), np.arange(len(lines)), lines)
    for name, start, rows in _blocks(tables):
        file_rows = np.arange(start, start + len(rows))
        if (ids := tables[name].ids) is not None:
            file_rows = ids.file_rows[start : start + len(rows)]
            rows, file_rows = rows[file_rows >= 0], file_rows[file_rows >= 0]
        # All processes encode, so that all raise if int8 can't hold a row.
        stored = encode(rows, row_format, f"table {name!r}")
        if directory is not None:
            # Files are not kept open, because a model may have more tables than a
            # process may have open files.
            write_rows(files[name], name, file_rows, stored)


def _blocks(
    tables: Mapping[str, LayerTable],
) -> Iterator[tuple[str, int, np.ndarray]]:
    names = {(id(x.layer), x.table.name): name for name, x in tables.items()}
    for layer in {id(x.layer): x.layer for x in tables.values()}.values():
        packed = layer.tables.get_value()
        for stack in layer.plan.stacks:
            num_rows = {
                table.name: table.num_rows
                for table in stack.tables
                if (id(layer), table.name) in names
            }
            turns = read_blocks(packed[stack.name], stack, layer.plan, num_rows, "all")
            for blocks in turns:
                for table, start, rows in blocks:
                    yield names[id(layer), table], start, rows
