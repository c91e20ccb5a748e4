"""Runs training (`train`), or only evaluates a saved run (`evaluate`).

All processes in a job call these functions. Each process feeds its own devices and
writes its part of the checkpoints. The first process also prints, records and plots.
docs/guides/training_command.md describes a run.
"""

import contextlib
import dataclasses
import faulthandler
import math
import operator
import pathlib
import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Final, Literal, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from tpu_embedding import distributed
from tpu_embedding.checkpoint import describe
from tpu_embedding.checkpoint.records import errors_of_reading
from tpu_embedding.checkpoint.restoring import RestoreState, restore_state
from tpu_embedding.checkpoint.saving import SaveState
from tpu_embedding.extras import require_extra
from tpu_embedding.host_rows.cached_rows import MappedRows
from tpu_embedding.host_rows.training import host_rows
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.prepare import shard_batch
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.paths import is_local_path, local_path
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.strings.string_ids import save_vocabularies
from tpu_embedding.tools.data.batch import DataError, Dataset
from tpu_embedding.tools.train import run_directory, run_steps
from tpu_embedding.tools.train.losses import LOSSES, values_of
from tpu_embedding.tools.train.origin import RunOrigin
from tpu_embedding.tools.train.reporting import (
    RunReport,
    StepMeter,
    TrainingDivergedError,
    drop_repeated_records,
    format_tables,
)
from tpu_embedding.tools.train.run_config import RunConfig, RunEvent, RunEventKind
from tpu_embedding.tools.train.run_directory import CHECKPOINTS_DIR, RunDirectoryError

_SIZES: Final = "buffer_sizes"
"""Key in a checkpoint's description for the buffer sizes of ragged features."""

_Item = TypeVar("_Item")

ExistingRun = Literal["refuse", "resume"]
"""How to handle a checkpoint in the output directory: raise an error, or continue from
it. Without a checkpoint, `"resume"` starts a new run, so a job can always resume."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run.

    If a signal stopped the run, its state is saved, and only `step` is known.

    Attributes:
      step: steps done, including steps before a resume.
      best_step: step after which `metrics` were computed. If the config has
        `keep_best`, this is the best saved step.
      metrics: metrics on the held-out data, the main metric first.
      target_met: whether the target is met. It is None without a target, or if the
        teacher value is unknown.

    Example:
      >>> result = RunResult(step=2000, metrics={"log_loss": 0.367}, target_met=True)
      >>> result.metrics["log_loss"]
      0.367
    """

    step: int
    best_step: int | None = None
    metrics: dict[str, float] | None = None
    target_met: bool | None = None


def train(
    config: RunConfig,
    output_dir: str | pathlib.Path,
    *,
    data_dir: Any = None,
    mesh: Mesh | None = None,
    existing_run: ExistingRun = "refuse",
    stop_at: int | None = None,
    profile: tuple[int, int] | None = None,
    origin: RunOrigin | None = None,
    verbose: bool = False,
) -> RunResult:
    """Trains and evaluates a model, and writes records, a plot and checkpoints.

    After SIGTERM or Ctrl-C, the run finishes its current step, saves its state and
    ends. A second signal ends it immediately. In a multi-process job, a SIGTERM to one
    process stops all processes at the same step.

    Args:
      config: run config.
      output_dir: directory for the files, shared by all processes. Created if it does
        not exist.
      data_dir: path to your data, if the data source reads files.
      mesh: device mesh. Defaults to all devices.
      existing_run: `"refuse"` raises an error if `output_dir` has a checkpoint, and
        `"resume"` continues from it. Without a checkpoint, both start a new run, so a
        job can always pass `"resume"`.
      stop_at: step after which the run stops as if it had received SIGTERM. By default,
        it runs to the end.
      profile: two steps. An xprof profile between them is recorded into `profile/` in
        the output directory. By default, nothing is recorded.
      origin: where you loaded the config from, recorded for `tpu-embedding export`.
      verbose: whether to print the whole plan instead of only its tables.

    Raises:
      ConfigError: if the model does not fit the config.
      DataError: if data are missing or damaged.
      CheckpointError: if the checkpoint to resume from is damaged, or does not fit.
      RunDirectoryError: if another process uses `output_dir`, or if the directory has a
        checkpoint and `existing_run` is `"refuse"`.
      TrainingDivergedError: if a loss, a gradient or a metric is not finite.
      MissingExtraError: if a library of the extra `train` is not installed.

    Example:
      For example, change a config, and start its run or continue it::

        config = apply_overrides(load_config("synthetic"), ["num_steps=500"])
        result = train(config, "runs/synthetic", existing_run="resume")
        print(result.metrics)
    """
    # A run ends with a plot. If a library for it is missing, the run should not start.
    require_extra("train", "matplotlib", "tensorboardX", purpose="A run")
    directory = local_path(output_dir).resolve()
    with contextlib.ExitStack() as stack:
        # Comes first, so that a signal during the start stops the run after one step.
        stop = stack.enter_context(_stop_on_signals())
        # If the data are wrong, this raises before the directory is created.
        data = open_data(config, data_dir)
        stack.enter_context(run_directory.claimed(directory))
        run = _Run(config, directory, data, mesh)
        # When this context ends, the manager waits for a save in progress.
        stack.enter_context(run.checkpoints)
        run.restore(existing_run)
        if distributed.is_first():
            run.tells_events = True
            # This call replaces the records file, so the report must open it later.
            drop_repeated_records(directory, run.step, evaluates=run.evaluates_first)
        run.tell("init")
        run.start_report(origin, verbose=verbose)
        stack.callback(run.report.close)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        if run.train(stop, stop_at or config.num_steps, profile) == "stopped":
            run.report.line(f"stopped at step {run.step}; --resume continues from it")
            return RunResult(step=run.step)
        return run.finish()


def evaluate(
    config: RunConfig,
    output_dir: str | pathlib.Path,
    *,
    data_dir: Any = None,
    mesh: Mesh | None = None,
) -> RunResult:
    """Evaluates a run's best or newest checkpoint on the held-out data.

    Adds the metrics to the run's records. Arguments and errors are as in `train`.

    Example:
      After you have called `train`::

        metrics = evaluate(load_config("synthetic"), "runs/synthetic").metrics
    """
    require_extra("train", "matplotlib", "tensorboardX", purpose="A run")
    data = open_data(config, data_dir)
    directory = local_path(output_dir).resolve()
    run_directory.check_files(directory)
    checkpoint = run_directory.result_checkpoint(directory)
    if checkpoint is None:
        raise RunDirectoryError(
            f"{output_dir} has no checkpoint to evaluate. Pass the output directory "
            "of a run that saved one."
        )
    run = _Run(config, directory, data, mesh)
    with run.checkpoints:
        run.restore("resume", step=int(checkpoint.name))
        run.start_report()
        with contextlib.closing(run.report):
            return run.finish()


def open_data(config: RunConfig, data_dir: Any) -> Dataset:
    """Opens the data set; `data_dir` is a path, or anything that the source accepts."""
    if is_local_path(data_dir):
        data_dir = local_path(data_dir)
    return config.data.open(data_dir, batch_size=config.batch_size, seed=config.seed)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM and SIGINT set."""
    event, before = threading.Event(), {}

    def stop(number: int, _: Any) -> None:
        event.set()
        # A second signal ends the process, even if the current step hangs.
        signal.signal(number, signal.SIG_DFL)

    # Python can set handlers only in the main thread. In a multi-process job, JAX
    # handles SIGTERM and notifies all processes; see `_Run.train`.
    is_main_thread = threading.current_thread() is threading.main_thread()
    if distributed.num_processes() == 1 and is_main_thread:
        before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    """A run in progress. `state` is the state after `step` steps."""

    def __init__(
        self,
        config: RunConfig,
        directory: pathlib.Path,
        data: Dataset,
        mesh: Mesh | None,
    ):
        self.config, self.directory, self.data = config, directory, data
        self.plan: EmbeddingPlan = run_steps.make_run_plan(config, data, mesh)
        # Orbax's own policy for the best checkpoint needs the metrics at each save, but
        # the run evaluates after saving.
        options = ocp.CheckpointManagerOptions(preservation_policy=_Kept(self))
        path = directory / CHECKPOINTS_DIR
        self.checkpoints = ocp.CheckpointManager(path, options=options)
        self.tells_events = False
        self.evaluations: dict[int, dict[str, float]] = {}
        # Batches are prepared ahead, so `sizes` may already include later batches.
        self.sizes, self.sizes_so_far = BufferSizes(), {}
        self.exchanged: dict[str, Any] = {}

    def restore(self, existing_run: ExistingRun, step: int | None = None) -> None:
        """Restores a saved step, by default the newest one, or prepares a new run."""
        config, data, plan = self.config, self.data, self.plan
        graph, abstract = run_steps.abstract_train_state(config, data, plan)
        self.graph, self.abstract = graph, abstract
        self.evaluation_step = jax.jit(
            run_steps.make_evaluation_step(graph, config.loss),
            out_shardings=plan.replicated,
        )
        self.step = step or self.checkpoints.latest_step() or 0
        if self.step and existing_run == "refuse":
            raise RunDirectoryError(
                f"{self.directory} already has a run, saved at step {self.step}. "
                "Continue it with --resume, choose another --output-dir, or delete it."
            )
        self.state = None
        if self.step:
            # Checked before reading the tables, which can be large.
            run_directory.check_vocabularies(data, self.directory)
            path = self.directory / CHECKPOINTS_DIR / str(self.step)
            self.state = restore_state(path, RestoreState(abstract, plan=plan))
            with errors_of_reading(f"The description of the checkpoint {path}"):
                saved = dict(describe(path).description).get(_SIZES)
                self.sizes = BufferSizes.from_json(saved) if saved else BufferSizes()
        # A resumed run repeats this step's evaluation and all later evaluations.
        if step is None:
            recorded = run_directory.values_by_step(self.directory, "evaluation")
            self.evaluations = {s: x for s, x in recorded.items() if s < self.step}

    @property
    def best_step(self) -> int:
        """Best saved step if `keep_best`, else the current step."""
        if not self.config.keep_best:
            return self.step
        saved = self.checkpoints.all_steps()
        return run_directory.best_step(self.evaluations, saved) or self.step

    @property
    def ends_early(self) -> bool:
        """True if the best evaluation is not among the last `patience` evaluations."""
        best = run_directory.best_step(self.evaluations, self.evaluations) or 0
        num_worse = sum(step > best for step in self.evaluations)
        return 0 < self.config.patience <= num_worse

    @property
    def evaluates_first(self) -> bool:
        """True if a resumed run evaluates before its next step."""
        # The earlier run may have stopped or crashed before this evaluation ended.
        return self.step > 0 and self.config.evaluates_after(self.step)

    def start_report(
        self, origin: RunOrigin | None = None, *, verbose: bool = False
    ) -> None:
        """Reports the start. For a new run, also creates the state."""
        config, data, plan = self.config, self.data, self.plan
        record = origin and origin.record()
        self.report = RunReport(self.directory, config, self.step, record)
        if not self.step and distributed.is_first():
            save_vocabularies(self.directory, getattr(data, "vocabularies", {}))
        if description := getattr(data, "description", None):
            self.report.line(description)
        self.report.line(str(plan) if verbose else format_tables(plan))
        if self.state is None:
            _, self.state = run_steps.init_train_state(config, data, plan)
        # Rows on the host are a static part of a state's structure. The step must be
        # made for this state's structure, not for the abstract state's.
        structure = jax.tree.structure(self.state)
        abstract = structure.unflatten(jax.tree.leaves(self.abstract))
        self.train_step = run_steps.make_train_step(self.graph, abstract, config, plan)

    def tell(self, kind: RunEventKind, /, **values: Any) -> None:
        """Reports event values, and calls `on_event` if `tells_events` is True."""
        if kind in ("train", "evaluation"):
            self.report.scalars(self.step, kind, values)
        if self.tells_events:
            event = RunEvent(
                kind=kind,
                step=self.step,
                values=values,
                config=self.config,
                data=self.data,
                directory=self.directory,
            )
            self.config.on_event(event)

    def train(
        self,
        stop: threading.Event,
        stop_at: int,
        profile: tuple[int, int] | None,
    ) -> Literal["done", "stopped"]:
        config = self.config
        self.tell("start")
        meter = StepMeter(config, self.tell)
        # The range is empty if a resumed run is done, for example if `num_steps` is
        # smaller than before.
        steps = range(self.step, max(self.step, config.num_steps))
        if self.evaluates_first and steps:
            self.evaluate()
            if self.ends_early:
                return "done"
        ready = run_steps.train_batches(config, self.data, self.plan, steps, self.sizes)
        with_rows = self.with_host_rows(ready)
        # `break` leaves the generators suspended. Closing `ready` ends its reading
        # thread. `with_rows` reads from `ready`, so `with_rows` must close first.
        with contextlib.closing(ready), contextlib.closing(with_rows) as batches:
            for step, batch, self.sizes_so_far, _ in meter.waiting(batches):
                if profile is not None and step == profile[0]:
                    jax.profiler.start_trace(self.directory / run_directory.PROFILE_DIR)
                self.state, metrics = self.train_step(self.state, batch)
                self.step = done = step + 1
                meter.add(done, metrics | self.exchanged)
                if profile is not None and done == profile[1]:
                    jax.block_until_ready(metrics)
                    jax.profiler.stop_trace()
                is_last = done == config.num_steps
                # `reached_preemption` must not come after `or`. Every process must call
                # it at every step, so that JAX can choose one step where all stop.
                stops = self.checkpoints.reached_preemption(done) or stop.is_set()
                stops = (stops or done == stop_at) and not is_last
                every = config.checkpoint_every
                # The best checkpoint can be kept only if each evaluation saves one.
                is_due = config.keep_best and config.evaluates_after(done)
                is_due = is_due or (every > 0 and done % every == 0)
                if stops or is_last or is_due:
                    # `read` raises if a step diverged, so its values are never saved.
                    meter.read(done)
                    self._save()
                if stops:
                    break
                # `finish` evaluates the last step.
                if not is_last and config.evaluates_after(done):
                    meter.read(done)
                    self.evaluate()
                    if self.ends_early:
                        num = f"{config.patience} evaluations"
                        self.report.line(f"ends early: no improvement in {num}")
                        break
        # The result must not be reported before its checkpoint is complete.
        with _named_errors(self.directory):
            self.checkpoints.wait_until_finished()
        is_done = self.step >= config.num_steps or self.ends_early
        return "done" if is_done else "stopped"

    def with_host_rows(self, batches: Iterable[_Item]) -> Generator[_Item, None, None]:
        """Puts a batch's `te.HostRows` rows into the state, then yields the batch."""
        if all(stack.storage.holds_all_rows for stack in self.plan.stacks):
            yield from batches
            return
        # `host_rows` changes this model in place, but the step is a pure function of
        # `self.state`. So arrays move from the model to the state before each step, and
        # back after it.
        model, optimizer = nnx.merge(self.graph, self.state)
        layers = embedding_layers(model).values()
        tables = [rows for x in layers for rows in x.tables.get_value().values()]
        hosts = [rows.host for rows in tables if isinstance(rows, MappedRows)]
        row_bytes = [x.shards.record_bytes for x in hosts]

        def total() -> np.ndarray:
            return np.array([(x.num_ids, x.num_fetched) for x in hosts]).T

        before, features_of = total(), operator.attrgetter("features")
        for batch in host_rows(batches, model, optimizer, features_of=features_of):
            num_ids, num_fetched = total() - before
            # The hit rate is the share of distinct rows that were already on this
            # process's devices. Bytes of the missing rows count twice, because a row
            # moves to the devices and back.
            self.exchanged = {
                "hit_rate": 1 - num_fetched.sum() / max(1, num_ids.sum()),
                "exchanged_bytes": 2 * num_fetched @ row_bytes,
            }
            self.state = nnx.state((model, optimizer))
            yield batch
            # The step donated the arrays that this model held.
            nnx.update((model, optimizer), self.state)
            before = total()  # Leaves out rows that evaluations exchange.

    def _save(self) -> None:
        """Starts a save. When this method has returned, a step may donate the state."""
        state = SaveState(self.state, self.plan, {_SIZES: self.sizes_so_far})
        with _named_errors(self.directory):
            # Without `force`, Orbax's own interval policy decides whether to save.
            self.checkpoints.save(self.step, args=state, force=True)

    def evaluate(self) -> None:
        self.tell("evaluation_start")
        batches = run_steps.evaluation_batches(self.config, self.data, self.plan)
        metrics = values_of(
            self.evaluation_step(self.state, shard_batch(batch, self.plan))
            for batch in self.with_host_rows(batches)
        )
        if not metrics:
            raise DataError(
                f"{type(self.data).__name__}.evaluation_batches() must yield a sample "
                "with a positive weight, but yielded none."
            )
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise TrainingDivergedError(
                    f"The {name} of the evaluation after step {self.step} is {value}."
                )
        self.tell("evaluation", **metrics)
        self.evaluations[self.step] = metrics

    def finish(self) -> RunResult:
        """Evaluates the last step if necessary, and reports the result."""
        config, target = self.config, self.config.target
        if self.step not in self.evaluations:
            self.evaluate()
        best_step = self.best_step
        metrics = self.evaluations[best_step]
        metric, *_ = LOSSES[config.loss].metrics
        if target is not None and target.metric in metrics:
            metric = target.metric
        # Only synthetic data sets have a teacher.
        name = "teacher_auc" if metric == "auc" else "teacher_log_loss"
        teacher = getattr(self.data, name, lambda: None)()
        is_met = None
        if target is not None and target.metric in metrics:
            is_met = target.is_met(metrics[target.metric], teacher)
        result = RunResult(
            step=self.step, best_step=best_step, metrics=metrics, target_met=is_met
        )
        self.tell("result", **dataclasses.asdict(result))
        self.report.record({"result": dataclasses.asdict(result)})
        self.report.plot(metric, teacher)
        if target is not None:
            words = {True: "met", False: "not met", None: "unknown"}[is_met]
            if target.metric not in metrics:
                words += ", because the held-out labels are all equal"
            self.report.line(f"target: {target}: {words}")
        against = ""
        if teacher is not None:
            ratio = metrics[metric] / teacher
            against = f" (teacher {teacher:.4f}, ratio {ratio:.4f})"
        if best_step != self.step:
            against += f", of the best checkpoint, step {best_step}"
        self.report.line(f"result: {metric} {metrics[metric]:.4f}{against}")
        return result


class _Kept:
    """Orbax policy that keeps the latest checkpoints and the best one."""

    def __init__(self, run: _Run):
        self._run = run

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        """Tells for each checkpoint whether to keep it. The oldest comes first."""
        del context
        config, best = self._run.config, self._run.best_step
        first = len(checkpoints) - config.checkpoints_kept
        return [i >= first or x.step == best for i, x in enumerate(checkpoints)]


@contextlib.contextmanager
def _named_errors(directory: pathlib.Path) -> Iterator[None]:
    """Turns TensorStore errors, such as a full disk, into an OSError."""
    # The command prints an OSError on one line, but a ValueError with a traceback.
    try:
        yield
    except ValueError as error:
        raise OSError(f"Could not save a checkpoint of {directory}: {error}") from error
