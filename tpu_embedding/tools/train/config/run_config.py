"""Defines `RunConfig`, the type of the value that a file in `configs/` defines.

A run config is plain data in sections, plus two functions that make the optimizers.
They are functions because a learning rate schedule depends on `num_steps`, which the
command line can override.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, get_args

import numpy as np
import optax

from tpu_embedding.checkpoint.run_checkpoints import MAX_SAVE_SECONDS
from tpu_embedding.field_checks import raise_all
from tpu_embedding.optimizers.row_optimizer import TableOptimizer
from tpu_embedding.plan.backend_request import AUTO, BACKENDS
from tpu_embedding.tools.data.source import DataSource
from tpu_embedding.tools.train.metrics import LOSSES, LossName
from tpu_embedding.tools.train.models.model import ModelConfig

MAX_SEED: Final = 2**32 - 1
"""Maximum seed; JAX would take a larger one for another with the same lower bits."""

NonFinite = Literal["raise", "skip_step"]
"""Treatment of a step whose loss or gradients are not finite; see `RunConfig`."""

SplitOver = Literal["all", "slice"]
"""Devices that share the rows of a table; see `RunConfig.tables_split_over`."""

_TRAINED_DTYPES: Final = ("float32", "bfloat16", "float16")

_MAX_COUNT: Final = 2**31 - 1

_LONGEST_SAVE_SECONDS: Final = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The metric that a config promises to reach on the held-out data.

    Attributes:
      metric: `"log_loss"`, `"rmse"`, `"mae"` or `"softmax_loss"`, as the run's loss
        has it, for which lower is better; or `"auc"`.
      at_most: maximum value of the metric. With `relative_to`, it is a multiple of the
        teacher's value. None for `"auc"`.
      at_least: minimum value of `"auc"`; None for the others. With `relative_to`, it is
        a share of what the teacher's AUC has above 0.5, the AUC of chance.
      relative_to: `"teacher"` for synthetic data, or None. The teacher is the model
        that generated the labels; no trained model can beat it.
    """

    metric: str
    at_most: float | None = None
    at_least: float | None = None
    relative_to: Literal["teacher"] | None = None

    def __post_init__(self):
        problems = [
            f"Target.{name} must be a finite number, got {value!r}"
            for name in ("at_most", "at_least")
            if (value := getattr(self, name)) is not None and not _is_finite(value)
        ]
        if (self.at_most is None) == (self.at_least is None):
            problems.append(
                "Target must have at_most or at_least, and not both, got "
                f"{self.at_most!r} and {self.at_least!r}"
            )
        if self.relative_to not in ("teacher", None):
            problems.append(
                f"Target.relative_to must be 'teacher' or None, got "
                f"{self.relative_to!r}"
            )
        raise_all(problems)

    def is_met(self, value: float, teacher: float | None) -> bool | None:
        """Returns True if a value reaches the target; None if that is unknown.

        Args:
          value: value of the metric.
          teacher: value of the teacher, or None.
        """
        chance, scale = 0.0, 1.0
        if self.relative_to == "teacher":
            if teacher is None:
                return None
            chance = 0.0 if self.at_least is None else 0.5
            scale = teacher - chance
        if self.at_least is not None:
            return value - chance >= self.at_least * scale
        assert self.at_most is not None
        return value <= self.at_most * scale

    def __str__(self) -> str:
        is_minimum = self.at_least is not None
        limit = self.at_least if is_minimum else self.at_most
        unit = " times the teacher's" if self.relative_to else ""
        if is_minimum and self.relative_to:
            unit = " of the teacher's lead over 0.5"
        words = "at least" if is_minimum else "at most"
        return f"{self.metric} {words} {limit:g}{unit}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a training run, apart from its devices and the paths of its files.

    Attributes:
      name: name of the run; its default output directory is `runs/<name>`, so it holds
        no path separator.
      data: data source of the batches, a frozen dataclass; see `DataSource`.
      model: sizes and other hyperparameters of the model, a frozen dataclass; see
        `ModelConfig`.
      loss: `"log_loss"` for clicks, `"squared_error"` for ratings, or
        `"in_batch_softmax"` for choices among the items of the batch.
      loss_weight: factor of the loss in training, positive; metrics do without it.
      batch_size: samples per step, over all devices. It need not be divisible by the
        number of devices.
      num_steps: number of training steps.
      table_learning_rate: learning rate that `make_table_optimizer` uses.
      dense_learning_rate: learning rate that `make_dense_optimizer` uses.
      make_table_optimizer: returns the optimizer of the tables, given this config.
      make_dense_optimizer: returns the optax optimizer of all other parameters, given
        this config.
      max_dense_norm: largest norm of all dense gradients together; longer ones are
        scaled down to it. Those of the tables neither count nor change. None: no limit.
      target: metric that the config promises to reach, or None.
      exact_auc: True computes the AUC from the scores of all held-out samples, which
        stay in host memory: 12 bytes each. Labels are 0 and 1, and so are weights.
        False counts scores in bins, whose error is reported where it matters.
      capacity: ids per destination and round of the exchange; None lets the plan
        choose. It changes the speed, never the results.
      kernels: backend that reads and updates rows, as in `make_plan`. `"auto"`: kernels
        where the verdict of `tpu-embedding doctor` allows them, else XLA.
      table_dtype: storage type of all tables, `"float32"`, `"bfloat16"` or `"float16"`;
        None leaves that of the model's tables.
      tables_split_over: devices that the rows of a table are split over: `"all"`, or
        `"slice"`, those of a slice, with a copy of the table in each. A table's own
        placement wins.
      non_finite: treatment of a step whose loss or gradients are NaN or infinite.
        `"raise"` ends the run. `"skip_step"` leaves tables, parameters and optimizer
        states as they are, bit by bit, counts the step, and goes on; several such steps
        in a row end the run. New ids of dynamic tables keep the rows that they got.
      seed: seed of the data and the initial values, from 0 to 2**32 - 1.
      loader_processes: processes that read batches ahead of the training process, by
        grain; 0 reads in a thread of it. It changes the speed, never the results.
      log_every: steps per line of progress.
      evaluate_every: steps between evaluations; 0 evaluates only at the end.
      checkpoint_every: steps between checkpoints; 0 saves only at the end.
      checkpoints_kept: number of latest checkpoints to keep; older ones are deleted.
      keep_time_interval: seconds after which one more checkpoint is kept for good,
        beside the latest ones; None keeps no other. The name is Orbax's.
      max_save_seconds: time within which a checkpoint must be complete; the run then
        ends with an error, on all hosts.
    """

    name: str
    data: DataSource
    model: ModelConfig
    loss: LossName
    batch_size: int
    num_steps: int
    table_learning_rate: float
    dense_learning_rate: float
    make_table_optimizer: Callable[["RunConfig"], TableOptimizer]
    make_dense_optimizer: Callable[["RunConfig"], optax.GradientTransformation]
    loss_weight: float = 1.0
    max_dense_norm: float | None = None
    target: Target | None = None
    exact_auc: bool = False
    capacity: int | None = None
    kernels: str = AUTO
    table_dtype: str | None = None
    tables_split_over: SplitOver = "all"
    non_finite: NonFinite = "raise"
    seed: int = 0
    loader_processes: int = 0
    log_every: int = 100
    evaluate_every: int = 0
    checkpoint_every: int = 0
    checkpoints_kept: int = 3
    keep_time_interval: float | None = None
    max_save_seconds: float = MAX_SAVE_SECONDS

    def __post_init__(self):
        problems = [
            *self._problems_of_name(),
            *self._problems_of_sections(),
            *self._problems_of_numbers(),
            *self._problems_of_choices(),
        ]
        if not problems:
            problems += _description_problems("RunConfig", self.describe())
        if problems:
            raise ValueError("; ".join(problems) + f" (config {self.name!r}).")

    def _problems_of_name(self) -> Iterator[str]:
        name = self.name
        if (
            not isinstance(name, str)
            or name.strip() in ("", ".", "..")
            or not name.isprintable()
            or any(separator in name for separator in ("/", "\\", os.sep))
        ):
            yield (
                "RunConfig.name must be a string without path separators, got "
                f"{name!r}; --output-dir takes a path"
            )

    def _problems_of_sections(self) -> Iterator[str]:
        for name, protocol, methods in (
            ("data", "DataSource", ("open",)),
            ("model", "ModelConfig", ("feature_config", "build")),
        ):
            value = getattr(self, name)
            missing = [m for m in methods if not callable(getattr(value, m, None))]
            is_value = dataclasses.is_dataclass(value) and not isinstance(value, type)
            if missing or not is_value:
                yield (
                    f"RunConfig.{name} must be an instance of a frozen dataclass with "
                    f"the methods of tpu_embedding.tools.train.{protocol}, "
                    f"{' and '.join(methods)}, got {value!r}"
                    + (f" without {' and '.join(missing)}" if missing else "")
                )
        for name in ("make_table_optimizer", "make_dense_optimizer"):
            value = getattr(self, name)
            if not callable(value) or isinstance(value, type):
                yield (
                    f"RunConfig.{name} must be a function of the config, such as "
                    f"lambda run: ..., got {value!r}"
                )

    def _problems_of_numbers(self) -> Iterator[str]:
        for name, minimum in (
            ("batch_size", 1),
            ("num_steps", 1),
            ("capacity", 1),
            ("seed", 0),
            ("loader_processes", 0),
            ("log_every", 1),
            ("evaluate_every", 0),
            ("checkpoint_every", 0),
            ("checkpoints_kept", 1),
        ):
            value = getattr(self, name)
            if name == "capacity" and value is None:
                continue
            if type(value) is not int or value < minimum:
                yield (
                    f"RunConfig.{name} must be an int of at least {minimum}, got "
                    f"{value!r}"
                )
            elif value > (MAX_SEED if name == "seed" else _MAX_COUNT):
                limit = "2**32 - 1" if name == "seed" else "2**31 - 1"
                yield f"RunConfig.{name} must be at most {limit}, got {value!r}"
        seconds = self.max_save_seconds
        if not (_is_finite(seconds) and 0 < seconds <= _LONGEST_SAVE_SECONDS):
            yield (
                "RunConfig.max_save_seconds must be a positive number of seconds, at "
                f"most {_LONGEST_SAVE_SECONDS:,.0f}, got {seconds!r}"
            )
        seconds = self.keep_time_interval
        if seconds is not None and not (_is_finite(seconds) and seconds > 0):
            yield (
                "RunConfig.keep_time_interval must be a positive number of seconds or "
                f"None, got {seconds!r}"
            )
        if not (_is_finite(self.loss_weight) and self.loss_weight > 0):
            yield (
                "RunConfig.loss_weight must be finite and positive, got "
                f"{self.loss_weight!r}"
            )
        norm = self.max_dense_norm
        if norm is not None and not (_is_finite(norm) and norm > 0):
            yield (
                "RunConfig.max_dense_norm must be finite and positive, or None, got "
                f"{norm!r}"
            )
        for name in ("table_learning_rate", "dense_learning_rate"):
            value = getattr(self, name)
            if not (_is_finite(value) and value >= 0):
                yield (
                    f"RunConfig.{name} must be finite and not negative, got {value!r}"
                )

    def _problems_of_choices(self) -> Iterator[str]:
        for name, choices in {
            "kernels": (*BACKENDS, AUTO),
            "tables_split_over": get_args(SplitOver),
            "non_finite": get_args(NonFinite),
            "table_dtype": (*_TRAINED_DTYPES, None),
            "loss": get_args(LossName),
        }.items():
            value = getattr(self, name)
            if value not in choices:
                yield f"RunConfig.{name} must be one of {list(choices)}, got {value!r}"
        if type(self.exact_auc) is not bool:
            yield f"RunConfig.exact_auc must be a bool, got {self.exact_auc!r}"
        elif self.exact_auc and self.loss != "log_loss":
            yield (
                "RunConfig.exact_auc must be False unless the loss is 'log_loss', got "
                f"True for {self.loss!r}"
            )
        if not isinstance(self.target, Target | None):
            yield f"RunConfig.target must be a Target or None, got {self.target!r}"
        elif self.target is not None and self.loss in get_args(LossName):
            metrics = LOSSES[self.loss].metrics
            if self.target.at_least is not None:
                metrics = LOSSES[self.loss].rising_metrics
            elif self.target.relative_to == "teacher":
                metrics = metrics[:1]  # The teacher has no other.
            if self.target.metric not in metrics:
                yield (
                    f"RunConfig.target.metric must be one of {list(metrics)} for the "
                    f"loss {self.loss!r}, got {self.target.metric!r}"
                )

    def describe(self) -> dict[str, Any]:
        """Returns the fields as JSON values, without the two functions."""
        description = json_of(self)
        del description["type"]
        return description


def json_of(value: Any) -> Any:
    """Returns a JSON value of a setting; a dataclass becomes a dict with its type."""
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: json_of(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not callable(getattr(value, field.name))
        }
        return {"type": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(key): json_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_of(item) for item in value]
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    return value


def _description_problems(owner: str, value: Any) -> Iterator[str]:
    """Yields a message for each value of a description that JSON does not have."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _description_problems(f"{owner}.{key}", item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{owner} must be finite, got {value!r}"
    elif not isinstance(value, str | int | float | None):
        yield (
            f"{owner} must be a number, string, path, None, or a tuple, dict or "
            f"dataclass of them, got a {type(value).__name__}; records and checkpoints "
            "describe the run by it"
        )


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
