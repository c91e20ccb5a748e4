"""Reports a run with printed lines, records, TensorBoard scalars and a plot.

Records are JSON, one per line: `{"run": ...}` at each start, then `{"step": ...,
"train": ...}` and `{"step": ..., "evaluation": ...}`, and `{"result": ...}` at the end.
"""

import faulthandler
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import jax
import numpy as np

from tpu_embedding import distributed
from tpu_embedding.paths import write_atomically
from tpu_embedding.plan.memory import format_bytes, format_table
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.report import summarize_memory
from tpu_embedding.tables.slot_values import named_slots
from tpu_embedding.tools.train.run_config import RunConfig
from tpu_embedding.tools.train.run_directory import (
    PLOT_FILE,
    RECORDS_FILE,
    TENSORBOARD_DIR,
    latest_start,
    read_records,
    values_by_step,
)
from tpu_embedding.tools.train.run_steps import StepMetrics
from tpu_embedding.update.state import abstract_state

STEPS_IN_FLIGHT: Final = 2
"""Number of dispatched steps that the host does not wait for.

With steps in flight, host and devices work at the same time. Too many of them would
keep many batches in device memory."""

_STDERR: Final = 2

HANG_SECONDS: Final = 600
"""If no step begins for this long, the stack traces of all threads are printed."""


class TrainingDivergedError(RuntimeError):
    """Raised if the loss, a gradient or a metric is NaN or infinite.

    Example:
      Earlier checkpoints stay, so you can continue with other settings::

        try:
            train(config, "runs/clicks")
        except TrainingDivergedError:
            slower = dataclasses.replace(config, table_learning_rate=0.1)
            train(slower, "runs/clicks", existing_run="resume")
    """


class StepMeter:
    """Keeps step metrics on the devices, and reports their means."""

    def __init__(self, config: RunConfig, report: Callable[..., None]):
        self._config, self._report = config, report
        self._steps: list[StepMetrics] = []
        self._waited = 0.0
        self._since = time.perf_counter()

    def waiting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches, and measures how long the loop waits for them."""
        while True:
            begin = time.perf_counter()
            # Replaces the previous timer, which thus fires only if the loop hangs.
            faulthandler.dump_traceback_later(HANG_SECONDS, file=_STDERR)
            batch = next(batches, None)
            self._waited += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def add(self, done: int, metrics: StepMetrics) -> None:
        """Adds a dispatched step. If due, calls `read` and reports the means."""
        self._steps.append(metrics)
        if len(self._steps) > STEPS_IN_FLIGHT:
            jax.block_until_ready(self._steps[-1 - STEPS_IN_FLIGHT])
        if done % self._config.log_every == 0 or done == self._config.num_steps:
            self.read(done)
            # Read the clock after `read` has waited, so that `seconds` includes the
            # steps themselves.
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
            self._report("train", **loss, **speed, **means)
            self._steps, self._waited, self._since = [], 0.0, now

    def read(self, done: int) -> None:
        """Waits for all steps. Raises `TrainingDivergedError` if one diverged."""
        # Checking each step right after its dispatch would keep the host from running
        # ahead.
        self._steps = jax.device_get(self._steps)
        for step, metrics in enumerate(self._steps, done - len(self._steps) + 1):
            # Checked first, because a step that did not run also has a NaN loss.
            if metrics.get("not_run"):
                raise TrainingDivergedError(
                    f"The ids of step {step} exceed the limit of SparseCores, or a "
                    "weight is not finite, and te.SparseCore(exchange=False) has no "
                    "fallback. Resume the run with backend='sparse_core', or with a "
                    "larger max_ids."
                )
            if not metrics["is_finite"]:
                raise TrainingDivergedError(
                    f"The loss of step {step} is {metrics['loss']}: the loss, a "
                    "gradient or a learning rate is not finite. Lower the learning "
                    "rates, or check the input data for damaged values."
                )


class RunReport:
    """Writes lines, records and the plot. Only the first process writes."""

    def __init__(
        self,
        directory: pathlib.Path,
        config: RunConfig,
        first_step: int,
        origin: Mapping[str, Any] | None = None,
    ):
        self._path, self._config = directory / RECORDS_FILE, config
        self._file = self._board = None
        if not distributed.is_first():
            return
        description, (_, last) = config.describe(), latest_start(directory)
        for name, before, now in changes(last or description, description):
            self.line(f"changed since the last start: {name} {before!r} -> {now!r}")
        self._file = self._path.open("a", encoding="utf-8")
        if self._file.tell():
            self._file.write("\n")  # A killed run may have left half a line.
        self._board = _event_file(directory / TENSORBOARD_DIR, first_step)
        begin = f"resumed after step {first_step}" if first_step else "a new run"
        self.line(
            f"{config.name}: {config.num_steps} steps of {config.batch_size} samples, "
            f"seed {config.seed}, {begin}; files in {directory}"
        )
        self.record({"run": description, "first_step": first_step, "origin": origin})

    def line(self, text: str) -> None:
        if distributed.is_first():
            print(text, flush=True)

    def record(self, record: dict[str, Any]) -> None:
        """Writes a record immediately, so that killing the run cannot lose it."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        num_steps = self._config.num_steps
        text = "  ".join(
            f"{name} {value:.5g}"
            for name, value in values.items()
            # Counts of dynamic tables go only to the files.
            if group != "train" or "/" not in name
        )
        self.line(f"{group} {step:>{len(str(num_steps))}}/{num_steps}  {text}")
        self.record({"step": step, group: values})
        if self._board is not None:
            # tensorboardX and matplotlib come with the extra `train`.
            from tensorboardX import summary

            for name, value in values.items():
                scalar = summary.scalar(f"{group}/{name}", value)
                _write_event(self._board, step, summary=scalar)
            self._board.flush()

    def plot(self, metric: str, teacher: float | None) -> None:
        """Plots the training loss and a metric, with a line at the value `teacher`."""
        if self._file is None:
            return
        # Imported late, because it takes a third of a second.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        figure.suptitle(self._config.name)
        directory = self._path.parent
        # Curves come from the records, which include the steps before a resume.
        left.plot(*_curve(directory, "train", "loss"), linewidth=1)
        left.set(xlabel="step", ylabel="training loss")
        right.plot(*_curve(directory, "evaluation", metric), marker="o")
        right.set(xlabel="step", ylabel=f"{metric}, held-out data")
        if teacher is not None:
            right.axhline(teacher, color="gray", linestyle="--", label="teacher")
            right.legend()
        figure.savefig(self._path.with_name(PLOT_FILE), dpi=100)

    def close(self) -> None:
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()


def format_tables(plan: EmbeddingPlan) -> str:
    """Formats table sizes, slot variables and memory per device."""
    rows = [("table", "slot variables", "rows", "dim", "memory per device", "devices")]
    for stack in plan.stacks:
        slots, dim, devices = "-", str(stack.dim), str(stack.num_shards)
        if stack.is_trained:
            named = named_slots(abstract_state(stack), stack)
            slots = ", ".join(x.name for x in named if x.kind == "rows") or "-"
        # A stack's arrays, including slot variables and padding, are divided among its
        # tables in proportion to their rows.
        num_bytes = sum(stack.array_bytes)
        for table in stack.tables:
            num_rows = f"{table.config.max_rows:,}"
            size = num_bytes * table.num_rows / stack.num_rows
            rows.append((table.name, slots, num_rows, dim, format_bytes(size), devices))
    return f"{format_table(rows, num_left_aligned=2)}\n{summarize_memory(plan)}"


def changes(
    before: Mapping[str, Any], now: Mapping[str, Any], section: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, old value, new value) for each changed field.

    Example:
      >>> list(changes({"seed": 1, "model": {"dim": 4}}, {"model": {"dim": 8}}))
      [('model.dim', 4, 8)]
    """
    for name, value in now.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            yield from changes(old, value, f"{section}{name}.")
        elif old != value:
            yield f"{section}{name}", old, value


def drop_repeated_records(
    directory: pathlib.Path, step: int, *, evaluates: bool
) -> None:
    """Removes the records that a run repeats if it resumes after `step`.

    With `evaluates`, the run also repeats the evaluation after `step` itself.
    """
    path = directory / RECORDS_FILE
    kept = ""
    for record in read_records(path):
        done = record.get("step", record.get("result", {}).get("step", 0))
        is_repeated = evaluates and "train" not in record and done == step
        # Records of starts stay, because `latest_start` reads them.
        if "run" in record or not (done > step or is_repeated):
            kept += json.dumps(record) + "\n"
    # Written atomically, so that killing the run leaves either the old or the new file.
    if path.exists():
        write_atomically(path, kept)


def _curve(
    directory: pathlib.Path, group: Literal["train", "evaluation"], name: str
) -> tuple[list[int], list[float]]:
    # A step may lack a metric. For example, AUC is undefined if all labels are equal.
    steps = {k: x for k, x in values_by_step(directory, group).items() if name in x}
    return list(steps), [x[name] for x in steps.values()]


def _event_file(directory: pathlib.Path, first_step: int) -> Any:
    # tensorboardX's `SummaryWriter` writes in a thread. Killing the run would lose
    # scalars, and a full disk would not end the run.
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2

    directory.mkdir(parents=True, exist_ok=True)
    # The file's name has a time in whole seconds, which two starts can share.
    suffix = f".{time.time_ns()}"
    file = event_file_writer.EventsWriter(str(directory / "events"), suffix)
    # Makes TensorBoard drop the steps that a resumed run repeats.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    _write_event(file, first_step + 1, session_log=start)
    return file


def _write_event(file: Any, step: int, **content: Any) -> None:
    from tensorboardX.proto import event_pb2

    file.write_event(event_pb2.Event(step=step, wall_time=time.time(), **content))
