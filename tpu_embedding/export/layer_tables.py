"""The tables of a model, by their names in an export, and their rows by blocks."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from flax import nnx

from tpu_embedding.export.dynamic_tables import (
    StoredIds,
    StoreIds,
    lines_of_buckets,
)
from tpu_embedding.export.row_formats import RowFormat, stored_spec
from tpu_embedding.export.signature import ExportError, check_name, refuse_repeated
from tpu_embedding.export.tensor_files import TensorSpec
from tpu_embedding.export.writing import receivers
from tpu_embedding.functional.dynamic_ids import dynamic_rows
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.plan.dynamic_rows import dynamic_tables
from tpu_embedding.plan.stack_plan import TablePlan
from tpu_embedding.rows.id_directory import directory_name
from tpu_embedding.tables.row_stream import read_blocks


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

    def stored_spec(self, row_format: RowFormat) -> TensorSpec:
        """Returns the shape and dtype of the exported rows."""
        config = self.place.config
        num_rows = config.max_rows if self.ids is None else self.ids.num_rows
        return stored_spec(num_rows, config.dim, row_format)

    def tensor_specs(self, name: str, row_format: RowFormat) -> dict[str, TensorSpec]:
        """Returns the tensors of the exported table: its rows, and its ids."""
        specs = {name: self.stored_spec(row_format)}
        if self.ids is not None:
            tensor = self.ids.tensor
            specs[directory_name(name)] = TensorSpec(tensor.shape, tensor.dtype)
        return specs


class TableBlock(NamedTuple):
    """Some rows of a table.

    Attributes:
      name: name of the table in the export.
      places: their places in the export: consecutive ones, or any.
      rows: values of the rows, as `rows.file_rows.file_row` says.
    """

    name: str
    places: slice | np.ndarray
    rows: np.ndarray


def table_prefix(path: str, layers: Collection[str]) -> str:
    """Returns the prefix of the names of a layer's tables: its path, if not alone."""
    return f"{path}/" if len(layers) > 1 else ""


def tables_of_model(
    model: nnx.Module, store_ids: StoreIds = lines_of_buckets
) -> dict[str, LayerTable]:
    """Returns the tables of all embedding layers of a model, by name.

    Args:
      model: owns the layers.
      store_ids: form of the ids of dynamic tables.

    Raises:
      ExportError: if the model has no embedding layer, or a table has a name that an
        export cannot hold, or the name of another table or of another one's ids.
    """
    layers = embedding_layers(model)
    if not layers:
        raise ExportError(
            f"The model must own a TPUEmbedding to be exported, got a "
            f"{type(model).__name__} without one; use jax.export for it."
        )
    named: list[tuple[str, LayerTable]] = []
    for path, layer in layers.items():
        prefix = table_prefix(path, layers)
        found = dynamic_rows(layer.tables.get_value(), layer.plan)
        for stack in layer.plan.stacks:
            members = {x.table.name: x for x in dynamic_tables(stack)}
            for table in stack.tables:
                ids = None
                if table.name in members:
                    ids = store_ids(found[table.name], members[table.name])
                found_table = LayerTable(layer=layer, place=table, ids=ids)
                named.append((prefix + table.name, found_table))
    refuse_repeated("tables", (name for name, _ in named))
    tables = dict(named)
    for name, table in tables.items():
        check_name("table", name)
        if table.ids is not None and directory_name(name) in tables:
            raise ExportError(
                f"No table must have the name {directory_name(name)!r}, under which an "
                f"export holds the ids of the dynamic table {name!r}; rename one."
            )
    return tables


def read_tables(tables: Mapping[str, LayerTable]) -> Iterator[TableBlock]:
    """Yields the rows of some tables in blocks; see `read_blocks` for its bounds.

    In a job, all processes call it together, and each gets all rows.
    """
    names = {(id(x.layer), x.place.name): name for name, x in tables.items()}

    def block_of(name: str, start: int, rows: np.ndarray) -> TableBlock:
        ids = tables[name].ids
        if ids is None:
            return TableBlock(name, slice(start, start + len(rows)), rows)
        places = ids.places[start : start + len(rows)]
        is_stored = places >= 0
        return TableBlock(name, places[is_stored], rows[is_stored])

    for layer in {id(x.layer): x.layer for x in tables.values()}.values():
        packed = layer.tables.get_value()
        for stack in layer.plan.stacks:
            wanted = [t.name for t in stack.tables if (id(layer), t.name) in names]
            if not wanted:
                continue
            rows_of_stack = packed[stack.name]
            for blocks in read_blocks(
                rows_of_stack, stack, layer.plan, wanted, receivers()
            ):
                for table, start, rows in blocks:
                    yield block_of(names[id(layer), table], start, rows)
