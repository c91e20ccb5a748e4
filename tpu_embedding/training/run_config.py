"""Defines `RunConfig`, the type of the value that a file in `configs/` defines.

A run config is plain data in sections, plus two functions that make the optimizers.
They are functions because a learning rate schedule depends on `num_steps`, which the
command line can override.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import optax

from tpu_embedding.optimizers.row_optimizer import TableOptimizer
from tpu_embedding.plan.backends import BACKENDS
from tpu_embedding.training.models.model import ModelConfig
from tpu_embedding.training.sources import DataSource

LossName = Literal["log_loss", "squared_error", "in_batch_softmax"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The metric that a config promises to reach on the held-out data.

    Attributes:
      metric: `"log_loss"`, `"rmse"` or `"softmax_loss"`; lower is better.
      at_most: maximum value of the metric. With `relative_to`, it is a multiple of the
        teacher's value.
      relative_to: `"teacher"` for synthetic data, or None. The teacher is the model
        that generated the labels; no trained model can beat it.
    """

    metric: str
    at_most: float
    relative_to: Literal["teacher"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a training run, apart from its devices and the paths of its files.

    Attributes:
      name: name of the run; its default output directory is `runs/<name>`.
      data: data source of the batches.
      model: sizes and other hyperparameters of the model.
      loss: `"log_loss"` for clicks, `"squared_error"` for ratings, or
        `"in_batch_softmax"` for choices among the items of the batch.
      batch_size: samples per step, over all devices. It need not be divisible by the
        number of devices.
      num_steps: number of training steps.
      table_learning_rate: learning rate that `make_table_optimizer` uses.
      dense_learning_rate: learning rate that `make_dense_optimizer` uses.
      make_table_optimizer: returns the optimizer of the tables, given this config.
      make_dense_optimizer: returns the optax optimizer of all other parameters, given
        this config.
      target: metric that the config promises to reach, or None.
      capacity: ids per destination and round of the exchange; None lets the plan
        choose. It changes the speed, never the results.
      kernels: backend that reads and updates rows, as in `make_plan`.
      seed: seed of the data and the initial values.
      log_every: steps per line of progress.
      evaluate_every: steps between evaluations; 0 evaluates only at the end.
      checkpoint_every: steps between checkpoints; 0 saves only at the end.
      checkpoints_kept: number of latest checkpoints to keep; older ones are deleted.
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
    target: Target | None = None
    capacity: int | None = None
    kernels: str = "xla"
    seed: int = 0
    log_every: int = 100
    evaluate_every: int = 0
    checkpoint_every: int = 0
    checkpoints_kept: int = 3

    def __post_init__(self):
        problems = [
            f"RunConfig.{name} must be an int of at least {minimum}, got {value!r}"
            for name, minimum, value in (
                ("batch_size", 1, self.batch_size),
                ("num_steps", 1, self.num_steps),
                ("capacity", 1, 1 if self.capacity is None else self.capacity),
                ("seed", 0, self.seed),
                ("log_every", 1, self.log_every),
                ("evaluate_every", 0, self.evaluate_every),
                ("checkpoint_every", 0, self.checkpoint_every),
                ("checkpoints_kept", 1, self.checkpoints_kept),
            )
            if not isinstance(value, int) or value < minimum
        ]
        problems += [
            f"RunConfig.{name} must be finite and not negative, got {value!r}"
            for name, value in (
                ("table_learning_rate", self.table_learning_rate),
                ("dense_learning_rate", self.dense_learning_rate),
            )
            if not (math.isfinite(value) and value >= 0)
        ]
        if self.loss not in get_args(LossName):
            problems.append(
                f"RunConfig.loss must be one of {list(get_args(LossName))}, got "
                f"{self.loss!r}"
            )
        if self.kernels not in BACKENDS:
            problems.append(
                f"RunConfig.kernels must be one of {list(BACKENDS)}, got "
                f"{self.kernels!r}"
            )
        if problems:
            raise ValueError("; ".join(problems) + f" (config {self.name!r}).")

    def describe(self) -> dict[str, Any]:
        """Returns the fields as JSON values, without the two functions."""
        description = _describe(self)
        del description["type"]
        return description


def _describe(value: Any) -> Any:
    """Returns a JSON value; a dataclass becomes a dict with its type's name."""
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: _describe(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not callable(getattr(value, field.name))
        }
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [_describe(item) for item in value]
    return value
