"""Runs the training loop on the host: steps, evaluations, checkpoints, result.

`train` is the entry point; the folder's docstring names the files in its order.
"""

import contextlib
import dataclasses
import datetime
import math
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import jax
from flax import nnx
from jax.sharding import Mesh

from tpu_embedding.checkpoint.errors import DamagedCheckpointError
from tpu_embedding.checkpoint.run_checkpoints import Fallback, RunCheckpoints
from tpu_embedding.distributed.job import Job, current_job
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.jobs.pulses import send_event
from tpu_embedding.tools.jobs.slow_steps import SlowStepWatch
from tpu_embedding.tools.jobs.stop_signals import StopRequest, stop_on_signals
from tpu_embedding.tools.plotting import check_plot_library
from tpu_embedding.tools.train.config.run_config import RunConfig
from tpu_embedding.tools.train.errors import ConfigError, TrainingDivergedError
from tpu_embedding.tools.train.loop.agreements import (
    agree_on_checkpoint,
    agree_on_run,
    claim_together,
    ending_job_when_stopped,
    evaluation_batches,
)
from tpu_embedding.tools.train.loop.loaders import load_grain
from tpu_embedding.tools.train.loop.profiling import ProfileWindow, StepProfiler
from tpu_embedding.tools.train.loop.read_ahead import put_batch, train_batches
from tpu_embedding.tools.train.loop.reporting import (
    PLOT_FILE,
    RunReport,
    SilentReport,
)
from tpu_embedding.tools.train.loop.run_directory import ExistingRun, RunDirectory
from tpu_embedding.tools.train.loop.run_program import RunProgram, prepare_run
from tpu_embedding.tools.train.loop.run_saver import RunSaver
from tpu_embedding.tools.train.loop.run_summary import (
    RunResult,
    describe_run,
    make_result,
    report_end,
    report_start,
)
from tpu_embedding.tools.train.loop.step import init_train_state
from tpu_embedding.tools.train.loop.step_meter import StepMeter
from tpu_embedding.tools.train.loop.tensorboard import load_tensorboard
from tpu_embedding.tools.train.metrics import (
    ClickScores,
    Metrics,
    exact_auc_of,
    merge_batches,
    values_of,
)


def train(
    config: RunConfig,
    output_dir: str | pathlib.Path,
    *,
    data_dir: pathlib.Path | None = None,
    mesh: Mesh | None = None,
    existing_run: ExistingRun = "refuse",
    fallback: Fallback = "refuse",
    stop_at: int | None = None,
    compiler_options: Mapping[str, str] | None = None,
    tensorboard: bool = False,
    profile: ProfileWindow | None = None,
) -> RunResult | None:
    """Trains and evaluates a model; writes records, a plot and checkpoints.

    In a job of several processes, all call it. Each feeds its devices and writes its
    part of the checkpoints; the first one prints, and writes records and plot. An error
    in one of them ends the others only within `distributed.ending_together`.

    All that can be checked before the first step is checked before any file is touched:
    the config, the data, the plan, the model and its outputs, and both optimizers.

    Args:
      config: config of the run.
      output_dir: directory for the files; created if it does not exist.
      data_dir: path of the data, if the config's source reads files.
      mesh: mesh of the devices; None uses all devices.
      existing_run: treatment of an earlier run in `output_dir`. `"refuse"`: raise an
        error. `"resume"`: continue from its latest checkpoint, or from the beginning if
        it saved none. `"move_aside"`: move its files to a new directory,
        `<output_dir>.old-1` or the next number, and start anew.
      fallback: treatment of a damaged checkpoint when a run resumes. `"refuse"`: raise
        an error. `"older"`: continue from the latest checkpoint that is whole. Damaged
        ones are renamed to `damaged-STEP`.
      stop_at: number of steps after which the run saves a checkpoint and stops, as if
        interrupted; None runs to the end.
      compiler_options: XLA options of the train step, only for TPUs. They are added to
        the hardware's defaults, and override them.
      tensorboard: True also writes the records as TensorBoard scalars.
      profile: steps whose profile is recorded for xprof, by each process; None: none.

    Returns:
      The result, or None if the run stopped before its last step.

    Raises:
      ConfigError: if settings are wrong or contradict each other.
      DataError: if data are missing or damaged.
      CheckpointError: if the checkpoint to resume from is damaged, or belongs to
        another run.
      RunDirectoryError: if another process uses `output_dir`, if `existing_run` forbids
        the files that it holds, or if there is no run to resume.
      TrainingDivergedError: if the loss, a metric, or the model at a checkpoint is not
        finite.
      MissingPlotLibraryError: if matplotlib, which draws the plot, is not installed.
      DisagreementError: on all processes, if their settings, versions or data differ.
      RunStopped: after SIGTERM or SIGHUP, with the state saved; see `stop_on_signals`.
      KeyboardInterrupt: after SIGINT, likewise.
    """
    begin = time.perf_counter()
    job = current_job()
    _check_choices(job, existing_run, fallback, stop_at)
    check_plot_library(PLOT_FILE)  # Fails before the training, not after it.
    if tensorboard:
        load_tensorboard()
    if profile is not None:
        profile.check_within(min(config.num_steps, stop_at or config.num_steps))
    if config.loader_processes:
        load_grain()
    directory = RunDirectory(output_dir)
    if job.is_first:
        directory.check(existing_run)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        with (
            ending_job_when_stopped(job),
            stop.interrupting("the run has not started"),
        ):
            program = prepare_run(
                config, data_dir, mesh=mesh, compiler_options=compiler_options
            )
        agree_on_run(job, program, {"existing_run": existing_run, "stop_at": stop_at})
        moved_to = stack.enter_context(claim_together(job, directory, existing_run))
        checkpoints = _open_checkpoints(directory, program)
        stack.push(_close_unless_failed(checkpoints, job))
        description = describe_run(program)
        found = None
        if existing_run == "resume":
            found = agree_on_checkpoint(job, checkpoints)
        first_step, state = 0, None
        if found is not None:
            first_step, state = _restore(
                checkpoints, found, program, description, fallback
            )
        report = (RunReport if job.is_first else SilentReport)(directory.path)
        stack.callback(report.close)
        send_event("started")
        if found is not None:
            send_event("saved", first_step)
        if moved_to is not None:
            report.line(f"moved the earlier run to {moved_to}")
        if found is not None and first_step < found:
            report.line(
                f"checkpoint {found} is damaged, and now named damaged-{found}; the "
                f"latest one that is whole is {first_step}"
            )
        if tensorboard:
            report.start_tensorboard(first_step)
        report_start(report, program, first_step)
        profiler = stack.enter_context(
            StepProfiler(profile, directory.path, report.line, first_step)
        )
        if state is None:
            with program.compiling():
                _, state = init_train_state(config, program.data.data, program.plan)
        last_step = max(first_step, min(config.num_steps, stop_at or config.num_steps))
        saver = RunSaver(
            *(checkpoints, description, report), max_seconds=config.max_save_seconds
        )
        run = _Run(
            program=program,
            report=report,
            saver=saver,
            stop=stop,
            profiler=profiler,
            state=state,
        )
        done = run.train(first_step, last_step)
        if done == last_step < config.num_steps and not stop.requested_by_any():
            report.line(f"stopped after step {last_step}; --resume continues the run")
            return None
        metrics = run.evaluate(done) if done == config.num_steps else None
        if metrics is None:
            stop.exit(f"{_describe_saved(checkpoints)}; --resume continues the run")
        result = make_result(config, program.data.data, metrics, last_step, begin)
        report_end(report, config, result, last_step - first_step)
        return result


def _check_choices(
    job: Job, existing_run: str, fallback: str, stop_at: int | None
) -> None:
    """Refuses arguments of `train` that are unknown, or wrong for the job."""
    if existing_run not in get_args(ExistingRun):
        raise ConfigError(
            f"existing_run must be one of {get_args(ExistingRun)}, got "
            f"{existing_run!r}; it decides what becomes of an earlier run."
        )
    if fallback not in get_args(Fallback):
        raise ConfigError(
            f"fallback must be one of {get_args(Fallback)}, got {fallback!r}; it "
            "decides what becomes of a damaged checkpoint."
        )
    if stop_at is not None and stop_at < 1:
        raise ConfigError(
            f"stop_at must be at least 1, or None for the whole run, got {stop_at!r}."
        )
    if job.num_processes > 1 and fallback != "refuse":
        raise ConfigError(
            f"fallback must be 'refuse' in a job of several processes, got {fallback!r}"
            "; to continue from an older checkpoint, rename the damaged one."
        )


def _close_unless_failed(checkpoints: RunCheckpoints, job: Job) -> Any:
    """Returns an exit of a context that closes the checkpoints.

    After an error in one of several processes, closing would wait for the others.
    """

    def exit_context(kind: type[BaseException] | None, *_: Any) -> None:
        is_failed = kind is not None and issubclass(kind, Exception)
        if job.num_processes == 1 or not is_failed:
            checkpoints.close()

    return exit_context


def _open_checkpoints(directory: RunDirectory, program: RunProgram) -> RunCheckpoints:
    seconds = program.config.keep_time_interval
    return RunCheckpoints(
        directory.checkpoints,
        kept=program.config.checkpoints_kept,
        keep_every=None if seconds is None else datetime.timedelta(seconds=seconds),
        plan=program.plan,
        max_save_seconds=program.config.max_save_seconds,
    )


def _restore(
    checkpoints: RunCheckpoints,
    step: int,
    program: RunProgram,
    description: dict[str, Any],
    fallback: Fallback,
) -> tuple[int, nnx.State]:
    """Restores the checkpoint of a step, and adds the way out if it is damaged."""
    try:
        return checkpoints.restore(
            program.state, description, step=step, fallback=fallback
        )
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{error} --resume --fallback older continues from the latest checkpoint "
            "that is whole, and deletes none."
        ) from error


def _describe_saved(checkpoints: RunCheckpoints) -> str:
    if checkpoints.latest_step is None:
        return "stopped before the first step"
    return f"stopped; step {checkpoints.latest_step} is saved"


@dataclasses.dataclass(kw_only=True)
class _Run:
    """A run in progress, whose state is that after the latest step."""

    program: RunProgram
    report: RunReport
    saver: RunSaver
    stop: StopRequest
    profiler: StepProfiler
    state: nnx.State

    def train(self, first_step: int, last_step: int) -> int:
        """Runs steps, evaluates and saves when due; saves the state after the last.

        A signal ends the steps. The step in progress is completed and saved.

        Returns:
          Number of steps done.
        """
        config, program, saver = self.program.config, self.program, self.saver
        watch = SlowStepWatch()
        meter = StepMeter(
            config.batch_size,
            config.log_every,
            lambda record: self.report.progress(record, config.num_steps),
            non_finite=config.non_finite,
            watch=watch,
            places=_places_of(program.plan),
        )
        steps = range(first_step, last_step)
        saved = done = first_step
        with (
            contextlib.closing(watch),
            contextlib.closing(
                train_batches(
                    program.data,
                    program.plan,
                    steps,
                    program.train_sizes,
                    self.stop,
                    num_processes=config.loader_processes,
                    input_wait=meter.input_wait,
                )
            ) as batches,
        ):
            for step, batch in batches:
                self.state, metrics = self.profiler.run(
                    step, program.train_step, self.state, batch
                )
                done = step + 1
                meter.add(done, metrics)
                saver.poll()
                is_last = done == last_step
                if is_last:
                    meter.finish(done)
                if is_last or _is_due(done, config.checkpoint_every):
                    meter.flush()
                    saver.save(done, self.state)
                    saved = done
                if done < config.num_steps and _is_due(done, config.evaluate_every):
                    meter.flush()
                    self.evaluate(done)
                watch.resume()
            if saved < done:  # A signal ended the steps.
                meter.finish(done)
                saver.save(done, self.state)
        saver.wait()
        return done

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Returns the metrics on the held-out data, and reports them.

        Returns None if a signal ends the evaluation.
        """
        begin = time.perf_counter()
        program = self.program
        scores: list[ClickScores] = []

        def evaluated() -> Iterator[Metrics]:
            batches = evaluation_batches(current_job(), program, self.stop)
            for i, batch in enumerate(batches):
                metrics = program.evaluation_step(
                    self.state,
                    put_batch(
                        *(batch, program.plan, f"Evaluation batch {i}"),
                        program.evaluation_sizes,
                    ),
                )
                if program.config.exact_auc:
                    metrics, of_batch = metrics
                    # The host copies scores only after the next batch is dispatched.
                    scores[-1:] = jax.device_get(scores[-1:])
                    scores.append(of_batch)
                yield metrics

        merged = merge_batches(evaluated())
        if self.stop.requested_by_any():
            return None
        metrics = values_of(merged)
        if scores and "auc" in metrics:
            metrics["auc"] = exact_auc_of(scores)
            metrics.pop("auc_max_error", None)
        if not metrics:
            raise DataError(
                f"{type(program.data.data).__name__}.evaluation_batches() must yield a "
                "sample of positive weight, got none."
            )
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise TrainingDivergedError(
                    f"The evaluation after step {step} has the {name} {value}; lower "
                    "the learning rates, or check the input data for damaged values."
                )
        self.report.evaluation(step, metrics, time.perf_counter() - begin)
        return metrics


def _places_of(plan: EmbeddingPlan) -> dict[str, int]:
    """Returns the number of places for ids by dynamic table."""
    vocabularies = {
        table.name: table.config.dynamic
        for stack in plan.stacks
        for table in stack.tables
    }
    return {name: x.num_places for name, x in vocabularies.items() if x is not None}


def _is_due(num_steps_done: int, every: int) -> bool:
    return every > 0 and num_steps_done % every == 0
