"""What a run is: the value that a file in `configs/` defines.

A run config is plain data in sections, with two functions in it, because a learning
rate schedule has to follow an override of `num_steps`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import optax

from tpu_embedding.optimizers.row_optimizer import TableOptimizer
from tpu_embedding.training.models.model import ModelConfig
from tpu_embedding.training.sources import DataSource

LossName = Literal["log_loss", "squared_error", "in_batch_softmax"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The number that a config promises for the held-out data.

    Attributes:
      metric: `"log_loss"`, `"rmse"` or `"softmax_loss"`; lower is better.
      at_most: its largest value; with `relative_to` a multiple of that.
      relative_to: `"teacher"`: what made the data, and no model can beat; or None.
    """

    metric: str
    at_most: float
    relative_to: Literal["teacher"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run, but for the machine it runs on and the place of its files.

    Attributes:
      name: of the run; part of its default output directory.
      data: source of the batches.
      model: sizes and other hyperparameters of the model.
      loss: `"log_loss"` of clicks, `"squared_error"` of ratings, or
        `"in_batch_softmax"` of choices, among the items of the batch.
      batch_size: samples per step, over all devices. Any number.
      num_steps: training steps.
      table_learning_rate: for `make_table_optimizer`.
      dense_learning_rate: for `make_dense_optimizer`.
      make_table_optimizer: returns the row rule of the tables, given this config.
      make_dense_optimizer: returns the optax rule of all else, given this config.
      target: what the config promises, or None.
      capacity: ids per destination and round of the exchange; None lets the plan
        choose. Changes speed, never results.
      seed: of data and initial values.
      log_every: steps from one line of progress to the next.
      evaluate_every: steps from one evaluation to the next; 0: only at the end.
      checkpoint_every: steps from one checkpoint to the next; 0: only at the end.
      checkpoints_kept: how many of the latest checkpoints stay.
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
    seed: int = 0
    log_every: int = 100
    evaluate_every: int = 0
    checkpoint_every: int = 0
    checkpoints_kept: int = 3

    def __post_init__(self):
        problems = [
            f"RunConfig.{name} must be an int of at least {least}, got {value!r}"
            for name, least, value in (
                ("batch_size", 1, self.batch_size),
                ("num_steps", 1, self.num_steps),
                ("capacity", 1, 1 if self.capacity is None else self.capacity),
                ("seed", 0, self.seed),
                ("log_every", 1, self.log_every),
                ("evaluate_every", 0, self.evaluate_every),
                ("checkpoint_every", 0, self.checkpoint_every),
                ("checkpoints_kept", 1, self.checkpoints_kept),
            )
            if not isinstance(value, int) or value < least
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
        if problems:
            raise ValueError("; ".join(problems) + f" (config {self.name!r}).")

    def describe(self) -> dict[str, Any]:
        """Returns the fields as JSON values; the two functions are left out."""
        description = _describe(self)
        del description["type"]
        return description


def _describe(value: Any) -> Any:
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
