"""Runs a training: steps, evaluations, checkpoints, and the result.

`train` is the whole of it, and `evaluate` is its last part for a saved run. In a job of
several processes, all call them. Each feeds its devices and writes its part of the
checkpoints; the first one prints, and writes records and plot.
"""

import contextlib
import dataclasses
import faulthandler
import fcntl
import math
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from tpu_embedding import distributed
from tpu_embedding.checkpoint.restoring import RestoreState, restore_state
from tpu_embedding.checkpoint.state_handler import SaveState
from tpu_embedding.extras import require_extra
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.prepare import shard_batch
from tpu_embedding.paths import is_local_path, local_path
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.strings.vocabulary_files import (
    load_vocabularies,
    save_vocabularies,
)
from tpu_embedding.tools.data.batch import DataError, Dataset
from tpu_embedding.tools.train.config import RunConfig
from tpu_embedding.tools.train.feeding import check_values, prepare_batch, train_batches
from tpu_embedding.tools.train.metrics import (
    LOSSES,
    Metrics,
    merge_batches,
    values_of,
)
from tpu_embedding.tools.train.mlperf import LOG_FILE, MLPerfLog
from tpu_embedding.tools.train.origin import RunOrigin
from tpu_embedding.tools.train.reporting import RunReport, format_tables
from tpu_embedding.tools.train.steps import (
    StepMetrics,
    abstract_train_state,
    init_train_state,
    make_evaluation_step,
    make_run_plan,
    make_train_step,
)

CHECKPOINTS_DIR: Final = "checkpoints"
LOCK_FILE: Final = "run.lock"
PROFILE_DIR: Final = "profile"

STEPS_IN_FLIGHT: Final = 2
"""Steps that are dispatched before the host waits for the first of them.

One step in flight hides the host's work behind the devices'. Many steps would keep many
batches in device memory."""

_STDERR: Final = 2

HANG_SECONDS: Final = 600
"""Time without a step after which the stacks of all threads are printed."""

ExistingRun = Literal["refuse", "resume"]
"""Treatment of a checkpoint in the output directory: raise an error, or continue from
it. `"resume"` starts a new run if there is none, so a restarted job can pass it too."""


class TrainingDivergedError(RuntimeError):
    """Raised if the loss, a gradient or a metric is NaN or infinite."""


class RunDirectoryError(ValueError):
    """Raised if a run cannot start in its output directory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """The end of a run.

    Attributes:
      step: number of steps done, including those before a resume.
      metrics: metrics on the held-out data, the main one first; None if a signal
        stopped the run, whose state is saved.
      target_met: True if the config's target is met; None if it has none, or if the
        teacher's value is unknown.
    """

    step: int
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
    """Trains and evaluates a model; writes records, a plot and checkpoints.

    SIGTERM and Ctrl-C save the state after the step in progress, and end the run; a
    second signal ends it at once. In a job of several processes, a SIGTERM of one stops
    all of them at the same step.

    Args:
      config: config of the run.
      output_dir: directory for the files; created if it does not exist. All processes
        of a job share it.
      data_dir: path of the data, if the config's source reads files.
      mesh: mesh of the devices; None uses all devices.
      existing_run: treatment of a checkpoint in `output_dir`; see `ExistingRun`.
      stop_at: number of steps after which the run stops as if it got SIGTERM; None runs
        to the end.
      profile: steps done before and after those whose profile is recorded for xprof, in
        `profile/` of the output directory; None: none.
      origin: what the config was loaded from; the run records it for `tpu-embedding
        export`.
      verbose: True prints the whole plan, False its tables.

    Raises:
      ConfigError: if the model does not fit the config.
      DataError: if data are missing or damaged.
      CheckpointError: if the checkpoint to resume from is damaged, or does not fit.
      RunDirectoryError: if another process uses `output_dir`, or if `existing_run`
        forbids the checkpoint there.
      TrainingDivergedError: if a loss, a gradient or a metric is not finite.
      MissingExtraError: if a library of the extra `train` is not installed.
    """
    _require_libraries()
    directory = local_path(output_dir).resolve()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_stop_on_signals())
        data = open_data(config, data_dir)  # Wrong data leave no directory behind.
        stack.enter_context(_claimed(directory))
        run = _Run(config, directory, data, mesh, verbose)
        stack.enter_context(run.checkpoints)
        run.start(existing_run, origin)
        run.log = MLPerfLog(directory / LOG_FILE, config, run.data, first_step=run.step)
        stack.callback(run.report.close)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        if run.train(stop, stop_at or config.num_steps, profile) == "stopped":
            run.report.line(f"stopped; step {run.step} is saved, --resume continues")
            return RunResult(step=run.step)
        return run.finish()


def _require_libraries() -> None:
    """Raises before any work if a library that a run ends with is missing."""
    require_extra("train", "matplotlib", "tensorboardX", purpose="A run")


def evaluate(
    config: RunConfig,
    output_dir: str | pathlib.Path,
    *,
    data_dir: Any = None,
    mesh: Mesh | None = None,
) -> RunResult:
    """Evaluates the newest checkpoint of a run on the held-out data.

    Args and errors are those of `train`, whose records get the metrics.
    """
    _require_libraries()
    data = open_data(config, data_dir)
    run = _Run(config, local_path(output_dir).resolve(), data, mesh)
    with run.checkpoints:
        if run.checkpoints.latest_step() is None:
            raise RunDirectoryError(
                f"{output_dir} holds no checkpoint to evaluate; give the output "
                "directory of a run that saved one."
            )
        run.start("resume")
        with contextlib.closing(run.report):
            return run.finish()


def open_data(config: RunConfig, data_dir: Any) -> Dataset:
    """Returns the data set of a run.

    Args:
      config: config of the run.
      data_dir: path of the data, None, or what else the config's source takes.
    """
    if is_local_path(data_dir):
        data_dir = local_path(data_dir)
    return config.data.open(data_dir, batch_size=config.batch_size, seed=config.seed)


def check_vocabularies(data: Dataset, directory: pathlib.Path) -> None:
    """Refuses data whose strings have other ids than those that a run was trained on.

    Args:
      data: opened data set, which may have vocabularies.
      directory: output directory of the run.

    Raises:
      DataError: names the feature.
    """
    now = getattr(data, "vocabularies", {})
    for name, vocabulary in load_vocabularies(directory).items():
        if name in now and now[name].tokens != vocabulary.tokens:
            raise DataError(
                f"The strings of {name!r} must be those that the run in {directory} "
                "began with, but its data have changed since; restore them, or start "
                "a new run."
            )


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM and SIGINT set; a second signal ends the process.

    In a job of several processes, SIGTERM goes to JAX, which tells all of them.
    """
    event, before = threading.Event(), {}

    def stop(number: int, _: Any) -> None:
        event.set()
        signal.signal(number, signal.SIG_DFL)

    is_main_thread = threading.current_thread() is threading.main_thread()
    if distributed.num_processes() == 1 and is_main_thread:
        before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _claimed(directory: pathlib.Path) -> Iterator[None]:
    """Creates and locks a directory, by the first process of a job.

    The operating system frees the lock when the process ends, in whatever way.
    """
    if not distributed.is_first():
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"{directory} is in use by another process. Wait for it to end, or "
                "choose another --output-dir."
            ) from error
        except OSError:
            pass  # Some network file systems have no locks.
        yield


class _Run:
    """A run in progress, whose state is that after `step` steps."""

    def __init__(
        self,
        config: RunConfig,
        directory: pathlib.Path,
        data: Dataset,
        mesh: Mesh | None,
        verbose: bool = False,
    ):
        self.config, self.directory, self.verbose = config, directory, verbose
        self.data = data
        self.plan: EmbeddingPlan = make_run_plan(config, self.data, mesh)
        options = ocp.CheckpointManagerOptions(max_to_keep=config.checkpoints_kept)
        path = directory / CHECKPOINTS_DIR
        self.checkpoints = ocp.CheckpointManager(path, options=options)
        self._evaluation_sizes = BufferSizes()
        self.log = MLPerfLog(None, config, self.data)

    def start(self, existing_run: ExistingRun, origin: RunOrigin | None = None) -> None:
        """Makes the state, or restores it, and reports the start."""
        config, data, plan = self.config, self.data, self.plan
        graph, abstract = abstract_train_state(config, data, plan)
        self.train_step = make_train_step(graph, abstract, config, plan)
        self.evaluation_step = jax.jit(
            make_evaluation_step(graph, config.loss), out_shardings=plan.replicated
        )
        self.step = self.checkpoints.latest_step() or 0
        if self.step and existing_run == "refuse":
            raise RunDirectoryError(
                f"{self.directory} holds a run, saved at step {self.step}. Continue it "
                "with --resume, choose another --output-dir, or delete it."
            )
        self.state = None
        if self.step:
            check_vocabularies(data, self.directory)
            path = self.directory / CHECKPOINTS_DIR / str(self.step)
            self.state = restore_state(path, RestoreState(abstract, plan=plan))
        record = origin and origin.record()
        self.report = RunReport(self.directory, config, self.step, record)
        if not self.step and distributed.is_first():
            save_vocabularies(self.directory, getattr(data, "vocabularies", {}))
        if description := getattr(data, "description", None):
            self.report.line(description)
        self.report.line(str(plan) if self.verbose else format_tables(plan))
        if self.state is None:
            _, self.state = init_train_state(config, data, plan)

    def train(
        self,
        stop: threading.Event,
        stop_at: int,
        profile: tuple[int, int] | None,
    ) -> Literal["done", "stopped"]:
        """Runs steps, evaluates and saves when due, and saves the state at the end."""
        config = self.config
        self.log.write_start(self.step)
        meter = _Meter(config, self.report)
        steps = range(self.step, max(self.step, config.num_steps))
        with contextlib.closing(
            train_batches(config, self.data, self.plan, steps)
        ) as batches:
            for step, batch in meter.waiting(batches):
                if profile is not None and step == profile[0]:
                    jax.profiler.start_trace(self.directory / PROFILE_DIR)
                self.state, metrics = self.train_step(self.state, batch)
                self.step = done = step + 1
                meter.add(done, metrics)
                if profile is not None and done == profile[1]:
                    jax.block_until_ready(metrics)
                    jax.profiler.stop_trace()
                is_last = done == config.num_steps
                stops = self.checkpoints.reached_preemption(done) or stop.is_set()
                stops = (stops or done == stop_at) and not is_last
                if stops or is_last or _is_due(done, config.checkpoint_every):
                    meter.read(done)
                    self._save()
                if stops:
                    break
                evaluates = _is_due(done, config.evaluate_every)
                if evaluates and not is_last and done >= config.evaluate_from:
                    meter.read(done)
                    self.evaluate()
        with _named_errors(self.directory):
            self.checkpoints.wait_until_finished()
        return "done" if self.step >= config.num_steps else "stopped"

    def _save(self) -> None:
        """Starts to save the state; the next step may then donate it."""
        state = SaveState(self.state, self.plan)
        with _named_errors(self.directory):
            self.checkpoints.save(self.step, args=state, force=True)

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics on the held-out data, and reports them."""

        def evaluated() -> Iterator[Metrics]:
            for number, batch in enumerate(self.data.evaluation_batches()):
                check_values(batch, self.config, f"Evaluation batch {number}")
                prepared = prepare_batch(
                    batch, self.plan, self._evaluation_sizes, model=self.config.model
                )
                on_devices = shard_batch(prepared, self.plan)
                yield self.evaluation_step(self.state, on_devices)

        self.log.write("block_stop", "eval_start", step=self.step)
        metrics = values_of(merge_batches(evaluated()))
        if not metrics:
            raise DataError(
                f"{type(self.data).__name__}.evaluation_batches() must yield a sample "
                "of positive weight, got none."
            )
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise TrainingDivergedError(
                    f"The evaluation after step {self.step} has the {name} {value}."
                )
        self.report.scalars(self.step, "evaluation", metrics)
        self.log.write("eval_accuracy", step=self.step, value=metrics.get("auc"))
        self.log.write("eval_stop", "block_start", step=self.step)
        return metrics

    def finish(self) -> RunResult:
        """Evaluates the trained model; reports the result and the target."""
        config, target = self.config, self.config.target
        metrics = self.evaluate()
        metric = LOSSES[config.loss].metric
        if target is not None and target.metric in metrics:
            metric = target.metric
        teacher = None
        name = "teacher_auc" if metric == "auc" else "teacher_log_loss"
        if hasattr(self.data, name):
            teacher = getattr(self.data, name)()
        is_met = None
        if target is not None and target.metric in metrics:
            is_met = target.is_met(metrics[target.metric], teacher)
        result = RunResult(step=self.step, metrics=metrics, target_met=is_met)
        status = "success" if is_met else "aborted"
        self.log.write("block_stop", "run_stop", step=self.step, status=status)
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
        self.report.line(f"result: {metric} {metrics[metric]:.4f}{against}")
        return result


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


@contextlib.contextmanager
def _named_errors(directory: pathlib.Path) -> Iterator[None]:
    """Makes an OSError of TensorStore's errors, as that of a full disk."""
    try:
        yield
    except ValueError as error:
        raise OSError(f"A checkpoint of {directory} is not saved: {error}") from error


class _Meter:
    """Keeps the metrics of steps on the devices, and reports their means."""

    def __init__(self, config: RunConfig, report: RunReport):
        self._config, self._report = config, report
        self._steps: list[StepMetrics] = []
        self._waited = 0.0
        self._since = time.perf_counter()

    def waiting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches, and counts the time in which the loop waits for them."""
        while True:
            begin = time.perf_counter()
            faulthandler.dump_traceback_later(HANG_SECONDS, file=_STDERR)
            batch = next(batches, None)
            self._waited += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def add(self, done: int, metrics: StepMetrics) -> None:
        """Adds the metrics of a step that was just dispatched; reports when due.

        Raises:
          TrainingDivergedError: if a step was not finite whose metrics are read now.
        """
        self._steps.append(metrics)
        if len(self._steps) > STEPS_IN_FLIGHT:
            jax.block_until_ready(self._steps[-1 - STEPS_IN_FLIGHT])
        if done % self._config.log_every == 0 or done == self._config.num_steps:
            self.read(done)
            self._report_means(done)

    def read(self, done: int) -> None:
        """Waits for all steps, the last of which is `done`.

        Raises:
          TrainingDivergedError: if one was not finite.
        """
        self._steps = jax.device_get(self._steps)
        for step, metrics in enumerate(self._steps, done - len(self._steps) + 1):
            if not metrics["is_finite"]:
                raise TrainingDivergedError(
                    f"The loss of step {step} is {metrics['loss']}, and the loss, a "
                    "gradient or a learning rate is not finite; lower the learning "
                    "rates, or check the input data for damaged values."
                )

    def _report_means(self, done: int) -> None:
        now = time.perf_counter()
        seconds, steps = now - self._since, len(self._steps)
        means = {
            name: float(np.mean([metrics[name] for metrics in self._steps]))
            for name in self._steps[0]
            if name != "is_finite"
        }
        speed = {
            "steps_per_second": steps / seconds,
            "samples_per_second": steps * self._config.batch_size / seconds,
            "input_wait": self._waited / seconds,
        }
        loss = {"loss": means.pop("loss")}
        self._report.scalars(done, "train", loss | speed | means)
        self._steps, self._waited, self._since = [], 0.0, now
