"""Exports the model of a run from a checkpoint, and compares it with the live model.

The tables are restored on the devices of this process, sharded as in training, and
streamed from there to the files. Optimizer states are not restored.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tpu_embedding.checkpoint.differences import value_differences
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.format import describe
from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.checkpoint.saving import restore
from tpu_embedding.export.artifact import check_new_directory, read_document
from tpu_embedding.export.row_formats import RowFormat
from tpu_embedding.export.saved_model import open_saved_model, save_saved_model
from tpu_embedding.export.signature import ExportError
from tpu_embedding.export.stablehlo import load, save, save_tables
from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.train.config.run_config import RunConfig
from tpu_embedding.tools.train.loop.read_ahead import put_batch
from tpu_embedding.tools.train.loop.run_directory import CHECKPOINTS_DIR
from tpu_embedding.tools.train.loop.run_program import RunProgram, prepare_run
from tpu_embedding.tools.train.loop.run_summary import describe_run
from tpu_embedding.tools.train.loop.step import abstract_model_state

ExportFormat = Literal["stablehlo", "savedmodel", "safetensors"]

EXPORT_FORMATS: Final[tuple[ExportFormat, ...]] = get_args(ExportFormat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunExport:
    """The result of `export_run`.

    Attributes:
      step: number of steps done at the checkpoint.
      document: content of `export.json`.
      differences: largest difference between exported and live values by the name of
        the output, over the largest live value if that is above 1. Empty without a
        check.
    """

    step: int
    document: dict[str, Any]
    differences: dict[str, float]


def export_run(
    config: RunConfig,
    run_dir: pathlib.Path,
    output: pathlib.Path,
    *,
    format: ExportFormat,
    dtype: RowFormat = "float32",
    batch_size: int | None = None,
    data_dir: pathlib.Path | None = None,
    mesh: Mesh | None = None,
    num_checked: int = 0,
) -> RunExport:
    """Exports the model of a run from its newest checkpoint.

    Args:
      config: config of the run.
      run_dir: output directory of the run.
      output: new directory for the export.
      format: format of the export.
      dtype: type of the tables; see `tpu_embedding.export.save`.
      batch_size: None: any.
      data_dir: path of the data, if the config's source reads files.
      mesh: mesh of the devices; None uses all devices. It may differ from the run's.
      num_checked: held-out batches on which exported and live outputs are compared.

    Raises:
      ConfigError, DataError: as in `train`.
      CheckpointError: if there is no checkpoint, or it is damaged or of another config.
      ExportError: if the model cannot be exported, or `output` holds files.
    """
    if num_checked and format == "safetensors":
        raise ExportError(
            "An export of tables alone has no outputs to check; export.json holds "
            "the error of each table."
        )
    run_dir, output = local_path(run_dir), local_path(output)
    check_new_directory(output)
    path = _newest_checkpoint(run_dir)
    program = prepare_run(config, data_dir, mesh=mesh)
    _check_description(path, program)
    graph, state = abstract_model_state(config, program.data.data, program.plan)
    (model,) = nnx.merge(graph, restore(path, state, plan=program.plan))
    batch = program.data.first_batch
    example = (batch.features, batch.dense)
    if format == "safetensors":
        save_tables(model, output, dtype=dtype)
    else:
        write = save if format == "stablehlo" else save_saved_model
        write(model, output, *example, dtype=dtype, batch_size=batch_size)
    differences = {}
    if num_checked:
        read = load if format == "stablehlo" else open_saved_model
        differences = _compare(model, read(output), program, num_checked)
    return RunExport(
        step=int(path.name), document=read_document(output), differences=differences
    )


def _newest_checkpoint(run_dir: pathlib.Path) -> pathlib.Path:
    checkpoints = run_dir / CHECKPOINTS_DIR
    steps = saved_steps(checkpoints)
    if not steps:
        raise CheckpointError(
            f"There is no complete checkpoint in {checkpoints} to export; give the "
            "output directory of a run that saved one."
        )
    return checkpoints / str(max(steps))


def _check_description(path: pathlib.Path, program: RunProgram) -> None:
    # As JSON has it: lists for tuples, strings for keys.
    wanted = json.loads(json.dumps(describe_run(program)))
    problems = value_differences(describe(path).description, wanted)
    if problems:
        raise CheckpointError(
            f"The checkpoint {path} belongs to a run with other settings. Export with "
            "the settings of the run:\n  " + "\n  ".join(problems)
        )


def _compare(
    model: Any, served: Callable[..., Any], program: RunProgram, num_batches: int
) -> dict[str, float]:
    """Returns the largest difference of each output over some held-out batches."""
    model.eval()
    graph, state = nnx.split(model)

    @jax.jit
    def run_live(state: nnx.State, batch: Batch) -> Any:
        return nnx.merge(graph, state)(batch.features, batch.dense)

    differences: dict[str, float] = {}
    batches = program.data.evaluation_batches()
    for number, batch in zip(range(num_batches), batches, strict=False):
        owner = f"Evaluation batch {number}"
        on_mesh = put_batch(batch, program.plan, owner, program.evaluation_sizes)
        live = run_live(state, on_mesh)
        exported = served(batch.features, batch.dense)
        for field in dataclasses.fields(live):
            value = np.asarray(getattr(live, field.name), np.float64)
            difference = np.abs(np.asarray(exported[field.name], np.float64) - value)
            largest = difference.max() / max(1.0, np.abs(value).max())
            # A NaN in any batch stays.
            so_far = differences.get(field.name, 0.0)
            differences[field.name] = float(np.maximum(so_far, largest))
    return differences
