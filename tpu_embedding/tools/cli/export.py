"""The command `tpu-embedding export`."""

import dataclasses
import pathlib
from typing import Annotated, Any, Literal

import tyro
from flax import nnx

from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.checkpoint.saving import restore
from tpu_embedding.export.documents import check_new_directory
from tpu_embedding.export.saved_model import save_tensorflow
from tpu_embedding.export.stablehlo import check_serving_extra, save, save_tables
from tpu_embedding.export.table_files import RowFormat
from tpu_embedding.paths import local_path
from tpu_embedding.strings.string_ids import VOCABULARIES_DIR
from tpu_embedding.tools.cli.arguments import emulated_mesh
from tpu_embedding.tools.train import run_directory, run_steps
from tpu_embedding.tools.train.origin import config_of_run
from tpu_embedding.tools.train.run import open_data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Exports a run's model for serving, from its best or newest checkpoint.

    If the config of the run is in the package, you can leave out --config. Nothing in
    the run directory is executed. Files outside of the run directory are not read,
    unless --data-dir names them. The tables are restored on the devices and streamed to
    the export. Slot variables are not restored.
    """

    run_dir: Annotated[pathlib.Path, tyro.conf.Positional]
    """Output directory of the run."""

    output: Annotated[pathlib.Path, tyro.conf.Positional]
    """New directory for the export."""

    format: Literal["stablehlo", "savedmodel", "safetensors"] = "stablehlo"
    """Exports a StableHLO program, a TensorFlow SavedModel, or only the tables."""

    dtype: RowFormat = "float32"
    """Type of the tables in the export."""

    batch_size: int | None = None
    """Samples per batch. By default, batches can have any size."""

    config: str | None = None
    """Config name or Python file.
    Required if a script started the run, or if the run's config is not in the package.
    """

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Changes the config with KEY=VALUE, as in training."""

    data_dir: str | None = None
    """File or directory with the data, if the run read files."""

    devices: int | None = None
    """Number of CPU devices to emulate, instead of using the machine's devices."""

    def run(self) -> int:
        # Restoring the tables can take long, so all checks come first.
        output, run_dir = local_path(self.output), local_path(self.run_dir)
        check_new_directory(output)
        if self.format != "safetensors":
            check_serving_extra()
        run_directory.check_files(run_dir)
        checkpoint = run_directory.result_checkpoint(run_dir)
        if checkpoint is None:
            raise CheckpointError(
                f"{run_dir / run_directory.CHECKPOINTS_DIR} has no complete "
                "checkpoint. Pass the output directory of a run that saved one."
            )
        config = config_of_run(
            run_dir, config=self.config, settings=self.set, data_dir=self.data_dir
        )
        mesh = None if self.devices is None else emulated_mesh(self.devices)
        data = open_data(config, self.data_dir)
        run_directory.check_vocabularies(data, run_dir)
        plan = run_steps.make_run_plan(config, data, mesh)
        graph, state = run_steps.abstract_model_state(config, data, plan)
        # Restores only the model, so that slot variables don't take device memory.
        (model,) = nnx.merge(graph, restore(checkpoint, state, plan=plan))
        vocabularies = getattr(data, "vocabularies", {})
        if self.format == "safetensors":
            save_tables(model, output, dtype=self.dtype)
        else:
            batch = data.train_batch(0)
            # The program skips `with_inputs`, so its inputs are what the model reads.
            with_inputs = getattr(config.model, "with_inputs", None)
            if with_inputs is not None:
                batch = with_inputs(batch, None, samples="global")
            example = (batch.features, batch.dense)
            options: Any = {"dtype": self.dtype, "batch_size": self.batch_size}
            if self.format == "stablehlo":
                options["vocabularies"] = vocabularies
                save(model, output, *example, **options)
            else:
                save_tensorflow(model, output, *example, **options)
        print(f"exported step {checkpoint.name} to {output} as {self.format}")
        if vocabularies and self.format != "stablehlo":
            print(f"inputs are ids; the strings are in {run_dir / VOCABULARIES_DIR}")
        return 0
