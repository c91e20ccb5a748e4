"""Checks a run before it starts, and makes its program.

Nothing here writes a file or allocates a table, so a wrong setting costs nothing: an
earlier run in the output directory is still as it was.
"""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.train.config.run_config import RunConfig
from tpu_embedding.tools.train.errors import ConfigError, as_config_error
from tpu_embedding.tools.train.loop.checked_data import CheckedDataset, open_data
from tpu_embedding.tools.train.loop.read_ahead import prepare_batch
from tpu_embedding.tools.train.loop.run_plan import make_run_plan
from tpu_embedding.tools.train.loop.step import (
    abstract_train_state,
    jit_train_step,
    make_evaluation_step,
    make_scored_evaluation_step,
    make_train_step,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunProgram:
    """A checked run: its data, its plan, and its two steps under `jax.jit`.

    Attributes:
      config: config of the run.
      data: opened data set, which checks its batches.
      plan: plan of the embedding layer.
      batch: first training batch, prepared, on the host.
      train_sizes: buffer sizes of the ragged features of training batches.
      evaluation_sizes: those of evaluation batches.
      state: shapes, dtypes and shardings of the state.
      train_step: `(state, batch) -> (state, StepMetrics)`; donates the state.
      evaluation_step: `(state, batch) -> Metrics`; with `RunConfig.exact_auc`,
        `(state, batch) -> (Metrics, ClickScores)`.
    """

    config: RunConfig
    data: CheckedDataset
    plan: EmbeddingPlan
    batch: Batch
    train_sizes: BufferSizes
    evaluation_sizes: BufferSizes
    state: nnx.State
    train_step: Any
    evaluation_step: Any

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compiles the train step in a thread while the caller does other work.

        At the end of the block it is compiled. The first call finds it, if its batch
        has the shapes of the first one.
        """
        batch = compile_report.abstract_batch(self.batch, self.plan)
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
            compiled = thread.submit(
                lambda: self.train_step.lower(self.state, batch).compile()
            )
            yield
        compiled.result()


def prepare_run(
    config: RunConfig,
    data_dir: pathlib.Path | None,
    *,
    mesh: Mesh | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> RunProgram:
    """Checks a run, and returns what it needs to start.

    The data set is opened, and its first training and evaluation batches are prepared.
    Both steps are traced, which runs the model on shapes without values.

    Args:
      config: config of the run.
      data_dir: path of the data, if the config's source reads files.
      mesh: mesh of the devices; None uses all devices.
      compiler_options: XLA options of the train step, only for TPUs.

    Raises:
      ConfigError: if settings are wrong, or code of the config raises an error or
        returns a wrong value.
      DataError: if data are missing or damaged, or do not fit the config.
    """
    data = open_data(config, data_dir)
    _check_teacher(config, data.data)
    train_sizes, evaluation_sizes = BufferSizes(), BufferSizes()
    with as_config_error("The config"):
        plan = make_run_plan(config, data.data, mesh, compiler_options=compiler_options)
        batch = prepare_batch(data.first_batch, plan, "Training batch 0", train_sizes)
        for held_out in data.evaluation_batches():
            prepare_batch(held_out, plan, "Evaluation batch 0", evaluation_sizes)
            break
        graphdef, state = abstract_train_state(config, data.data, plan)
        step = make_train_step(
            graphdef,
            config.loss,
            loss_weight=config.loss_weight,
            max_dense_norm=config.max_dense_norm,
            non_finite=config.non_finite,
        )
        train_step = jit_train_step(step, state, plan)
        make_evaluation = make_evaluation_step
        if config.exact_auc:
            make_evaluation = make_scored_evaluation_step
        evaluation_step = jax.jit(
            make_evaluation(graphdef, config.loss), out_shardings=plan.replicated
        )
        for step in (train_step, evaluation_step):
            step.eval_shape(state, compile_report.abstract_batch(batch, plan))
    return RunProgram(
        config=config,
        data=data,
        plan=plan,
        batch=batch,
        train_sizes=train_sizes,
        evaluation_sizes=evaluation_sizes,
        state=state,
        train_step=train_step,
        evaluation_step=evaluation_step,
    )


def _check_teacher(config: RunConfig, data: Any) -> None:
    """Refuses a target relative to an AUC that the data set does not know."""
    target = config.target
    if target is None or target.metric != "auc" or target.relative_to is None:
        return
    if not callable(getattr(data, "teacher_auc", None)):
        raise ConfigError(
            "RunConfig.target.relative_to must be None, because "
            f"{type(data).__name__} has no method teacher_auc, got 'teacher'; give "
            "at_least as an AUC."
        )
