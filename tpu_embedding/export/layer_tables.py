"""The tables of a model by their names in an export, and the files of their rows.

Rows are in their natural order. A dynamic table has 64 rows per bucket in the order of
its buckets, maybe a default row behind them, and its ids as a tensor of their own: a
line of 128 uint32 per bucket, the upper words of its 64 ids and then the lower ones.
All ones stand for no id.
"""

import dataclasses
import pathlib
import urllib.parse
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np
from flax import nnx

from tpu_embedding.dynamic.directory import (
    LINE_LANES,
    DynamicTablePlan,
    directory_name,
    dynamic_tables,
)
from tpu_embedding.dynamic.ids_64 import NO_ID, Ids64
from tpu_embedding.dynamic.ids_on_host import DynamicRows, rows_in_directory
from tpu_embedding.dynamic.vocabulary import SLOTS_PER_BUCKET
from tpu_embedding.export.example import ExportError, refuse_repeated
from tpu_embedding.export.tensor_files import (
    RowFormat,
    TensorSpec,
    create_file,
    encode,
    stored_spec,
    write_rows,
)
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.plan.plan import TablePlan
from tpu_embedding.tables.row_stream import read_blocks

TABLES_DIR: Final = "tables"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredIds:
    """The ids of a dynamic table in an export.

    Attributes:
      lines: uint32 `[buckets, 128]`; see the module.
      places: int64 `[rows]`, row in the export of each row of the table; -1: none.
      num_rows: rows in the export.
    """

    lines: np.ndarray
    places: np.ndarray
    num_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTable:
    """A table of a layer.

    Attributes:
      layer: owns the table.
      place: the table in the layer's plan.
      ids: ids of a dynamic table; None for a static one.
    """

    layer: TPUEmbedding
    place: TablePlan
    ids: StoredIds | None = None

    def tensor_specs(self, name: str, row_format: RowFormat) -> dict[str, TensorSpec]:
        """Returns the tensors of the exported table: its rows, and its ids."""
        config = self.place.config
        num_rows = config.max_rows if self.ids is None else self.ids.num_rows
        specs = {name: stored_spec(num_rows, config.dim, row_format)}
        if self.ids is not None:
            lines = self.ids.lines
            specs[directory_name(name)] = TensorSpec(lines.shape, lines.dtype)
        return specs


def table_prefix(path: str, layers: Collection[str]) -> str:
    """Returns the prefix of the names of a layer's tables: its path, if not alone."""
    return f"{path}/" if len(layers) > 1 else ""


def tables_of_model(model: nnx.Module) -> dict[str, LayerTable]:
    """Returns the tables of all embedding layers of a model, by name.

    All processes of a job call it together.

    Raises:
      ExportError: if the model has no embedding layer, or a table has the name of
        another table or of another one's ids.
    """
    layers = embedding_layers(model)
    if not layers:
        raise ExportError(
            f"The model must own a TPUEmbedding to be exported, got a "
            f"{type(model).__name__} without one; use jax.export for it."
        )
    named = [
        (table_prefix(path, layers) + table.place.name, table)
        for path, layer in layers.items()
        for table in _tables_of_layer(layer)
    ]
    ids = [directory_name(name) for name, table in named if table.ids is not None]
    refuse_repeated("tables", [*(name for name, _ in named), *ids])
    return dict(named)


def _tables_of_layer(layer: TPUEmbedding) -> Iterator[LayerTable]:
    packed = layer.tables.get_value()
    for stack in layer.plan.stacks:
        if stack.vocabulary.ids_are_rows:
            for table in stack.tables:
                yield LayerTable(layer=layer, place=table)
            continue
        found = rows_in_directory(packed[directory_name(stack.name)], stack)
        for member in dynamic_tables(stack):
            ids = _stored_ids(found[member.table.name], member)
            yield LayerTable(layer=layer, place=member.table, ids=ids)


def _stored_ids(found: DynamicRows, member: DynamicTablePlan) -> StoredIds:
    lines = np.full((member.num_buckets, LINE_LANES), NO_ID, np.uint32)
    bucket, lane = np.divmod(found.natural_rows, SLOTS_PER_BUCKET)
    words = Ids64.of_array(found.ids)
    lines[bucket, lane], lines[bucket, lane + SLOTS_PER_BUCKET] = words.high, words.low
    places = np.full(member.table.num_rows, -1, np.int64)
    places[found.rows] = found.natural_rows
    num_rows = member.dynamic.num_places
    if member.default_row is not None:
        places[member.default_row] = num_rows
        num_rows += 1
    return StoredIds(lines=lines, places=places, num_rows=num_rows)


def write_table_files(
    directory: pathlib.Path | None,
    tables: Mapping[str, LayerTable],
    row_format: RowFormat,
) -> None:
    """Writes one file per table, block by block; see `read_blocks` for its bounds.

    In a job, all processes call it together, and each gets all rows.

    Args:
      directory: the export; None for a process that only helps to read.
      tables: by name.
      row_format: type of the rows in the files.
    """
    if directory is not None:
        (directory / TABLES_DIR).mkdir()
        for name, table in tables.items():
            file = directory / _file_of_table(name)
            create_file(file, table.tensor_specs(name, row_format))
            if table.ids is not None:
                lines = table.ids.lines
                write_rows(file, directory_name(name), np.arange(len(lines)), lines)
    for name, start, rows in _blocks(tables):
        places = np.arange(start, start + len(rows))
        if (ids := tables[name].ids) is not None:
            places = ids.places[start : start + len(rows)]
            rows, places = rows[places >= 0], places[places >= 0]
        stored = encode(rows, row_format, f"table {name!r}")
        if directory is not None:
            # Not kept open: a model may have more tables than a process may open files.
            write_rows(directory / _file_of_table(name), name, places, stored)


def _file_of_table(name: str) -> str:
    """Returns the path of a table's file in the directory of an export."""
    # Names may hold slashes, and other characters that a file's name cannot.
    return f"{TABLES_DIR}/{urllib.parse.quote(name, safe='')}.safetensors"


def _blocks(
    tables: Mapping[str, LayerTable],
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yields name of the table, first row and rows of each block of some tables."""
    names = {(id(x.layer), x.place.name): name for name, x in tables.items()}
    for layer in {id(x.layer): x.layer for x in tables.values()}.values():
        packed = layer.tables.get_value()
        for stack in layer.plan.stacks:
            wanted = {
                t.name: (0, t.num_rows)
                for t in stack.tables
                if (id(layer), t.name) in names
            }
            turns = read_blocks(packed[stack.name], stack, layer.plan, wanted, "all")
            for blocks in turns:
                for table, start, rows in blocks:
                    yield names[id(layer), table], start, rows
