"""The command `tpu-embedding export`."""

import dataclasses
import pathlib
from typing import Annotated, Literal

import orbax.checkpoint as ocp
import tyro
from flax import nnx

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.saving import restore
from tpu_embedding.export.directories import check_new_directory
from tpu_embedding.export.row_formats import RowFormat
from tpu_embedding.export.saved_model import save_tensorflow
from tpu_embedding.export.stablehlo import save, save_tables
from tpu_embedding.paths import local_path
from tpu_embedding.tools.cli.arguments import RunCommand, emulated_mesh
from tpu_embedding.tools.train.run import CHECKPOINTS_DIR, open_data
from tpu_embedding.tools.train.steps import abstract_model_state, make_run_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(RunCommand):
    """Exports the model of a run from its newest checkpoint, for serving.

    The tables are restored on the devices of this process, sharded as in training, and
    streamed from there to the files. Slot variables are not restored.
    """

    output: Annotated[pathlib.Path, tyro.conf.Positional]
    """New directory to write."""

    run_dir: pathlib.Path | None = None
    """Output directory of the run; runs/NAME by default."""

    format: Literal["stablehlo", "savedmodel", "safetensors"] = "stablehlo"
    """A StableHLO program, a TensorFlow SavedModel, or the tables alone."""

    dtype: RowFormat = "float32"
    """Type of the tables in the files."""

    batch_size: int | None = None
    """Samples of a batch; any number by default."""

    def run(self) -> int:
        """Writes the export; returns the exit status.

        Raises:
          ConfigError, DataError: if the config or the data are wrong.
          CheckpointError: if there is no checkpoint, or it is of another config.
          ExportError: if the model cannot be exported, or the output holds files.
        """
        output = local_path(self.output)
        check_new_directory(output)
        config = self.load()
        run_dir = local_path(self.run_dir or pathlib.Path("runs") / config.name)
        checkpoints = run_dir / CHECKPOINTS_DIR
        step = max(ocp.utils.checkpoint_steps(checkpoints), default=None)
        if step is None:
            raise CheckpointError(
                f"There is no complete checkpoint in {checkpoints} to export; give the "
                "output directory of a run that saved one by --run-dir."
            )
        mesh = None if self.devices is None else emulated_mesh(self.devices)
        data = open_data(config, self.data_dir)
        plan = make_run_plan(config, data, mesh)
        graph, state = abstract_model_state(config, data, plan)
        state = restore(checkpoints / str(step), state, plan=plan)
        (model,) = nnx.merge(graph, state)
        if self.format == "safetensors":
            save_tables(model, output, dtype=self.dtype)
        else:
            batch = data.train_batch(0)
            with_inputs = getattr(config.model, "with_inputs", None)
            if with_inputs is not None:
                batch = with_inputs(batch, None, samples="global")
            write = save if self.format == "stablehlo" else save_tensorflow
            example = (batch.features, batch.dense)
            options = {"dtype": self.dtype, "batch_size": self.batch_size}
            write(model, output, *example, **options)
        print(f"exported step {step} to {output}, {self.format}")
        return 0
