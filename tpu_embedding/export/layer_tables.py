"""The tables of a model, by their names in an export, and their rows by blocks."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from flax import nnx

from tpu_embedding.export.row_formats import RowFormat, stored_spec
from tpu_embedding.export.signature import ExportError
from tpu_embedding.export.tensor_files import TensorSpec
from tpu_embedding.export.writing import receivers
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.plan.stack_plan import TablePlan
from tpu_embedding.tables.row_stream import read_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTable:
    """A table of a layer.

    Attributes:
      layer: owns the table.
      place: the table in the layer's plan.
    """

    layer: TPUEmbedding
    place: TablePlan

    def stored_spec(self, row_format: RowFormat) -> TensorSpec:
        """Returns the shape and dtype of the exported table."""
        config = self.place.config
        return stored_spec(config.max_rows, config.dim, row_format)


class TableBlock(NamedTuple):
    """The rows `start` and on of a table, as `rows.file_rows.file_row` says."""

    name: str
    start: int
    rows: np.ndarray


def table_prefix(path: str, layers: Collection[str]) -> str:
    """Returns the prefix of the names of a layer's tables: its path, if not alone."""
    return f"{path}/" if len(layers) > 1 else ""


def tables_of_model(model: nnx.Module) -> dict[str, LayerTable]:
    """Returns the tables of all embedding layers of a model, by name.

    Raises:
      ExportError: if the model has no embedding layer.
    """
    layers = embedding_layers(model)
    if not layers:
        raise ExportError(
            f"The model must own a TPUEmbedding to be exported, got a "
            f"{type(model).__name__} without one; use jax.export for it."
        )
    dynamic = [
        table.name
        for layer in layers.values()
        for stack in layer.plan.stacks
        if stack.is_dynamic
        for table in stack.tables
    ]
    if dynamic:
        raise ExportError(
            "An export cannot hold tables with a te.Dynamic vocabulary yet, got "
            f"{dynamic}; read ids and rows by te.functional.dynamic_rows."
        )
    return {
        table_prefix(path, layers) + table.name: LayerTable(layer=layer, place=table)
        for path, layer in layers.items()
        for stack in layer.plan.stacks
        for table in stack.tables
    }


def read_tables(tables: Mapping[str, LayerTable]) -> Iterator[TableBlock]:
    """Yields the rows of some tables in blocks; see `read_blocks` for its bounds.

    In a job, all processes call it together, and each gets all rows.
    """
    names = {(id(x.layer), x.place.name): name for name, x in tables.items()}
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
                    yield TableBlock(names[id(layer), table], start, rows)
