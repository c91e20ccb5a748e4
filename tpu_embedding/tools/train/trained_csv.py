"""The trained model of a CSV run, opened from the run's directory alone.

`tpu-embedding predict`, `evaluate` and `export` use it. Somebody else may have written
the directory, so nothing in it is executed, and no file that it names is opened.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.checkpoint.saving import restore
from tpu_embedding.export.documents import PREPROCESSING_DIR
from tpu_embedding.export.stablehlo import ServedModel, load
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.prepare import shard_batch
from tpu_embedding.paths import local_path
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.strings.string_ids import Vocabulary
from tpu_embedding.tools.data.batch import (
    Batch,
    DataError,
    Dataset,
    join_samples,
    padded_batches,
)
from tpu_embedding.tools.data.csv_labels import LabelColumn
from tpu_embedding.tools.data.csv_schema import CellError, CsvSchema
from tpu_embedding.tools.data.csv_text import CsvBlock, find_encoding, read_blocks
from tpu_embedding.tools.train import run_directory, run_steps
from tpu_embedding.tools.train.losses import values_of
from tpu_embedding.tools.train.run_config import RunConfig
from tpu_embedding.tools.train.run_directory import (
    CHECKPOINTS_DIR,
    SCHEMA_FILE,
    RunDirectoryError,
)
from tpu_embedding.types import PADDING_ROW_ID

BATCH_ROWS: Final = 4096
"""Number of rows predicted at a time."""


@dataclasses.dataclass(frozen=True)
class CsvEncoder:
    """Encodes rows of text as a run did, with its schema and vocabularies.

    Like the run's data set, it also has the sizes for building the model.
    """

    schema: CsvSchema
    vocabularies: dict[str, Vocabulary]
    source: Any = None
    file: pathlib.Path | None = None
    batch_size: int = BATCH_ROWS

    @classmethod
    def read(cls, directory: pathlib.Path, **fields: Any) -> "CsvEncoder":
        """Reads the files of a run or of an export's preprocessing.

        Raises:
          RunDirectoryError: if a file is missing or damaged.
        """
        path = directory / SCHEMA_FILE
        vocabularies = run_directory.vocabularies_of(directory)
        try:
            schema = CsvSchema.from_json(json.loads(path.read_text("utf-8")))
            schema.feature_sizes(vocabularies)
        except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise RunDirectoryError(
                f"{path} must be the schema of a CSV run: {str(error)[:300]}. An older "
                "run has none; pass its file with --data-dir, or train again."
            ) from error
        return cls(schema, vocabularies, **fields)

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """Rows of each feature's table."""
        return self.schema.feature_sizes(self.vocabularies)

    @property
    def sequence_lengths(self) -> Mapping[str, int]:
        """Number of columns of each feature that joins several columns."""
        return self.schema.sequence_lengths

    @property
    def number_scales(self) -> dict[str, tuple[float, ...]]:
        """Placeholders for the scales in the checkpoint."""
        return dict.fromkeys(self.schema.number_names, (0.0, 1.0) * 2)

    @property
    def label_scale(self) -> tuple[float, float] | None:
        """A placeholder in a regression, like `number_scales`; otherwise None."""
        return (0.0, 1.0) if self.source.task == "regression" else None

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the label, or None for other tasks."""
        source = self.source
        return len(source.classes) if source.task == "classes" else None

    def encode(
        self, cells: Mapping[str, Sequence[str]], error: CellError | None = None
    ) -> Batch:
        """Returns rows of text as a batch without labels."""
        features, dense = self.schema.encode(cells, self.vocabularies, error)
        num_rows = len(next(iter(cells.values())))
        zeros = np.zeros(num_rows, np.float32)
        return Batch(
            features=features, dense=dense or None, labels=zeros, weights=zeros + 1
        )

    def features_of_cell(self, name: str, text: str) -> dict[str, list[int]]:
        """Returns the rows that a cell of a column looks up, by table.

        Raises:
          DataError: if the text is not a value of the column, or looks up no row.
        """
        empty = {column.name: [""] for column in self.schema.columns}
        found, nothing = {}, self.encode(empty).features
        for table, ids in self.encode(empty | {name: [text]}).features.items():
            row, of_empty = _ids_of(ids), _ids_of(nothing[table])
            if changed := [x for x in row if x not in of_empty]:
                found[table] = changed
        if not found:
            raise DataError(f"{text!r} in column {name!r} looks up no row.")
        return found

    def train_batch(self, step: int) -> Batch:
        """Returns a batch with the shapes of a training batch."""
        del step
        cells = {}
        for column in self.schema.columns:
            vocabulary = self.vocabularies.get(column.name)
            text = vocabulary.tokens[0] if vocabulary is not None else ""
            cells[column.name] = [text] * self.batch_size
        return self.encode(cells)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the rows of `file`, all of them held out."""
        assert self.file is not None, "the command rejects a run without a file"
        for block in self.blocks(self.file):
            num_rows = len(block.lines)
            if not num_rows:
                continue
            name = self.source.label
            if name not in block.cells:
                raise DataError(f"{self.file} has no label column {name!r}.")
            column = LabelColumn(self.file, name)
            column.add(block)
            labels = column.labels(self.source)
            batch = self.encode(block.cells, block.error)
            batch = dataclasses.replace(batch, labels=labels)
            rows = np.flatnonzero(~np.isnan(labels))
            yield from padded_batches(
                lambda samples, batch=batch: join_samples([batch], [samples]),
                rows,
                self.batch_size,
            )

    def blocks(self, path: pathlib.Path) -> Iterator[CsvBlock]:
        """Yields the rows of a file in the format of the run's file."""
        source = self.source
        encoding = source.encoding or find_encoding(path)
        yield from read_blocks(
            path, source.delimiter, source.column_names, encoding=encoding
        )


def saved_checkpoint(run_dir: pathlib.Path) -> pathlib.Path:
    """Returns a run's best or newest checkpoint, or raises a CheckpointError."""
    checkpoint = run_directory.result_checkpoint(run_dir)
    if checkpoint is None:
        raise CheckpointError(
            f"{run_dir / CHECKPOINTS_DIR} has no complete checkpoint. Pass the output "
            "directory of a run that saved one."
        )
    return checkpoint


def restored_model(
    config: RunConfig, data: Any, run_dir: pathlib.Path, mesh: Mesh | None
) -> tuple[Any, EmbeddingPlan, pathlib.Path]:
    """Returns the model of a run's best or newest checkpoint, its plan, and its path.

    Raises:
      CheckpointError: if the checkpoint is missing, or does not fit the config.
    """
    checkpoint = saved_checkpoint(run_dir)
    plan = run_steps.make_run_plan(config, data, mesh)
    graph, state = run_steps.abstract_model_state(config, data, plan)
    state = restore(checkpoint, state, plan=plan)
    (model,) = nnx.merge(graph, state)
    return model, plan, checkpoint


def _ids_of(ids: Any) -> list[int]:
    values = np.asarray(getattr(ids, "values", ids)).ravel()
    return values[values != PADDING_ROW_ID].tolist()


def evaluate_rows(
    config: RunConfig, model: Any, data: Dataset | CsvEncoder, plan: EmbeddingPlan
) -> dict[str, float]:
    """Returns a model's metrics on the evaluation batches of a data set.

    Raises:
      DataError: if there are no rows, or labels have no meaning for the loss.
    """
    graph, state = nnx.split((model,))
    step = jax.jit(run_steps.make_evaluation_step(graph, config.loss))
    batches = run_steps.evaluation_batches(config, data, plan)
    metrics = values_of(step(state, shard_batch(batch, plan)) for batch in batches)
    if not metrics:
        raise DataError("The file must have rows to evaluate, but has none.")
    return metrics


def predictor(
    model: Any, encoder: CsvEncoder, plan: EmbeddingPlan
) -> Callable[[CsvBlock], np.ndarray]:
    """Returns a function from a block to predictions `[rows]` or `[rows, classes]`."""
    model.eval()
    graph, state = nnx.split(model)
    sizes = BufferSizes()

    @jax.jit
    def step(state: Any, batch: Batch) -> jax.Array:
        return nnx.merge(graph, state)(batch.features, batch.dense).predictions

    def predict(block: CsvBlock) -> np.ndarray:
        num_rows, made = len(block.lines), []
        for first in range(0, num_rows, BATCH_ROWS):
            lines = block.lines[first : first + BATCH_ROWS]
            padding = BATCH_ROWS - len(lines)
            cells = {
                name: texts[first : first + BATCH_ROWS] + [texts[-1]] * padding
                for name, texts in block.cells.items()
            }
            part = CsvBlock(block.path, [*lines, *[lines[-1]] * padding], cells)
            batch = encoder.encode(cells, part.error)
            batch = run_steps.prepare_batch(batch, plan, sizes)
            made.append(np.asarray(step(state, shard_batch(batch, plan)))[: len(lines)])
        return np.concatenate(made) if made else np.zeros(0)

    return predict


@dataclasses.dataclass(frozen=True)
class ServedCsv:
    """An exported model of a CSV run that takes raw rows."""

    served: ServedModel
    encoder: CsvEncoder

    def __call__(self, cells: Mapping[str, Sequence[str]]) -> Any:
        """Returns the model's outputs for rows of text, as in the CSV file.

        Args:
          cells: texts `[rows]` of each column, such as `{"tags": ["a|b", ""]}`.

        Raises:
          DataError: if a column is missing, or a number or date is invalid.
        """
        batch = self.encoder.encode(cells)
        return self.served(batch.features, batch.dense)


def load_served(directory: str | pathlib.Path) -> ServedCsv:
    """Reads an export of a CSV run.

    Raises:
      ExportError: if a file is damaged; see `te.export.load`.
      RunDirectoryError: if the export has no schema, like exports of other models.
    """
    served = load(directory, takes_ids=True)
    path = local_path(directory) / PREPROCESSING_DIR
    return ServedCsv(served, CsvEncoder.read(path))
