"""Says what a run is, how it starts and how it ends: description, lines and result.

`training_loop.py` calls these functions around the steps.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Final

import flax
import jax
import numpy as np

from tpu_embedding.optimizers.rule_description import describe_rule
from tpu_embedding.tools.data.batch import Dataset
from tpu_embedding.tools.data.teacher import TeacherDataset
from tpu_embedding.tools.train.config.run_config import RunConfig
from tpu_embedding.tools.train.loop.reporting import RunReport
from tpu_embedding.tools.train.loop.run_plan import describe_plan, kernel_hint
from tpu_embedding.tools.train.loop.run_program import RunProgram
from tpu_embedding.tools.train.metrics import LOSSES

MAY_CHANGE_ON_RESUME: Final = (
    "name",
    "num_steps",
    "target",
    "exact_auc",
    "capacity",
    "kernels",
    "tables_split_over",
    "loader_processes",
    "non_finite",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "checkpoints_kept",
    "keep_time_interval",
    "max_save_seconds",
)
"""Fields of the config that a resumed run may change.

They do not affect the numbers that a step computes. The exception is `num_steps`: a run
can continue beyond its end, with learning rate schedules of the new length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a completed run.

    Attributes:
      step: number of steps done, including those before a resume.
      metrics: metrics on the held-out data, the main one first.
      metric: `"auc"` if the config has a target for it; else the main metric.
      teacher: teacher's value of `metric`, which no model can beat; None if unknown.
      target_met: True if the config's target is met; None if there is no target, or
        if the teacher's value is unknown.
      seconds: wall time of this process, from opening the data to the end of the
        evaluation.
    """

    step: int
    metrics: dict[str, float]
    metric: str
    teacher: float | None
    target_met: bool | None
    seconds: float


def describe_run(program: RunProgram) -> dict[str, Any]:
    """Returns the description that a checkpoint and a resumed run must share."""
    run = program.config.describe()
    for name in MAY_CHANGE_ON_RESUME:
        del run[name]
    data = program.data.data
    dataset = {
        "type": type(data).__name__,
        "num_train_samples": getattr(data, "num_train_samples", None),
        "digest": getattr(data, "digest", None),
    }
    dense_optimizer = program.config.make_dense_optimizer(program.config)
    return {
        "run": run,
        "dataset": dataset,
        "dense_optimizer": describe_rule(dense_optimizer),
    }


def report_start(report: RunReport, program: RunProgram, first_step: int) -> None:
    """Writes the record of the start of a run, and prints its plan.

    Args:
      report: report of the run.
      program: program of the run.
      first_step: number of steps done before; 0 for a new run.
    """
    config, plan = program.config, program.plan
    device = plan.mesh.devices.flat[0]
    versions = {m.__name__: m.__version__ for m in (jax, flax, np)}
    report.record(
        {
            "run": config.describe(),
            "first_step": first_step,
            "devices": {"kind": device.device_kind, "count": plan.num_shards},
            "versions": versions,
            "plan": describe_plan(plan),
        }
    )
    start = f"resumed after step {first_step}" if first_step else "from the beginning"
    report.line(
        f"{config.name}: {config.num_steps} steps of {config.batch_size} samples, seed "
        f"{config.seed}, {start}; files in {report.directory}"
    )
    report.line(str(plan))
    hint = kernel_hint(plan)
    if hint is not None:
        report.line(hint)
    report.line(
        f"per device: {-(-config.batch_size // plan.num_shards)} samples a step, "
        + ", ".join(_id_counts(program))
    )


def _id_counts(program: RunProgram) -> Iterator[str]:
    """Yields, as text, the static number of ids per device and step of each stack."""
    plan = program.plan
    leaves = plan.flatten(program.batch.features)
    for stack in plan.stacks:
        num_ids = sum(
            jax.tree.leaves(leaves[i])[0].size for i in plan.features_of(stack)
        )
        num_ids = -(-num_ids // plan.num_shards)
        yield f"{stack.name} up to {num_ids:,} ids"


def make_result(
    config: RunConfig, data: Dataset, metrics: dict[str, float], step: int, begin: float
) -> RunResult:
    """Returns the result of a completed run.

    Args:
      config: config of the run.
      data: data set of the run, which may know a teacher.
      metrics: on the held-out data, the main one first.
      step: number of steps done.
      begin: time of `time.perf_counter` at the start of the process's work.
    """
    target, metric = config.target, LOSSES[config.loss].metric
    if target is not None and target.at_least is not None and target.metric in metrics:
        metric = target.metric
    teacher = _teacher_of(data, metric)
    is_met = None
    if target is not None and target.metric in metrics:
        is_met = target.is_met(metrics[target.metric], teacher)
    return RunResult(
        step=step,
        metrics=metrics,
        metric=metric,
        teacher=teacher,
        target_met=is_met,
        seconds=time.perf_counter() - begin,
    )


def _teacher_of(data: Any, metric: str) -> float | None:
    """Returns the teacher's value of the AUC or the main metric; None if unknown."""
    if not isinstance(data, TeacherDataset):
        return None
    if metric != "auc":
        return data.teacher_log_loss()
    teacher_auc = getattr(data, "teacher_auc", None)
    return None if teacher_auc is None else teacher_auc()


def report_end(
    report: RunReport, config: RunConfig, result: RunResult, num_steps: int
) -> None:
    """Writes the record of the result, draws the plot, and prints the last lines.

    Args:
      report: report of the run.
      config: config of the run.
      result: result of the run.
      num_steps: steps done by this process.
    """
    metric = result.metric
    value = result.metrics[metric]
    report.record({"result": dataclasses.asdict(result)})
    report.plot(config.name, metric, result.teacher)
    if result.target_met is not None:
        met = "met" if result.target_met else "not met"
        report.line(f"target: {config.target}: {met}")
    elif config.target is not None:
        reason = "the data set knows no teacher"
        if config.target.metric not in result.metrics:
            reason = "all labels of the held-out samples are equal"
        report.line(f"target: {config.target}: unknown, as {reason}")
    against = ""
    if result.teacher is not None:
        against = f" ({_against_teacher(metric, value, result.teacher)})"
    report.line(
        f"result: {metric} {value:.4f}{against}, {num_steps} steps in "
        f"{result.seconds:.1f} s"
    )


def _against_teacher(metric: str, value: float, teacher: float) -> str:
    """Returns the teacher's value, and how near a value is, as its target counts it."""
    text = f"teacher {teacher:.4f}"
    if metric != "auc":
        return f"{text}, ratio {value / teacher:.4f}"
    if teacher <= 0.5:
        return text
    share = (value - 0.5) / (teacher - 0.5)
    return f"{text}, {share:.4f} of its lead over 0.5"
