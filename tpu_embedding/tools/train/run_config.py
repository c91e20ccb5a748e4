"""Run configs, and functions that load a config from a Python file and change it.

A config is plain data in sections, plus two functions that make the optimizers. The
config has functions instead of optimizers because a learning rate schedule depends on
`num_steps`, which the command line can change.
"""

import dataclasses
import json
import pathlib
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Final, Literal

import jax.numpy as jnp
import optax
import tyro

import tpu_embedding
from tpu_embedding.argument_checks import (
    broken_rules,
    choice_rule,
    int_rule,
    invalid,
    raise_all,
    type_name,
)
from tpu_embedding.optimizers.row_optimizer import TableOptimizer
from tpu_embedding.paths import local_path
from tpu_embedding.plan.backend import BackendName
from tpu_embedding.sparse_core.backend import SparseCore
from tpu_embedding.tools.data.batch import DataSource
from tpu_embedding.tools.train.losses import LOSSES, LossName
from tpu_embedding.tools.train.models.click import ModelConfig


def warm_up(learning_rate: float, num_steps: int) -> optax.Schedule:
    """Returns a schedule that rises linearly from 0, then stays constant.

    `optax.linear_schedule` computes the same values by subtraction, with a rounding
    error of 0.14 % at the first of 24,000 steps.

    Args:
      learning_rate: final learning rate.
      num_steps: number of steps of the rise. The first step's learning rate is 0.

    Raises:
      ValueError: if `num_steps` is less than 1.

    Example:
      >>> [float(warm_up(2.0, 4)(step)) for step in (0, 1, 4, 9)]
      [0.0, 0.5, 2.0, 2.0]
    """
    if num_steps < 1:
        fix = "To train without a warm-up, use the learning rate itself."
        raise invalid("warm_up: num_steps", "be at least 1", num_steps, fix)
    return lambda step: learning_rate * jnp.minimum(1.0, step / num_steps)


_PACKAGE: Final = pathlib.Path(tpu_embedding.__file__).parent

CONFIGS_DIR: Final = next(
    filter(pathlib.Path.is_dir, (_PACKAGE / "configs", _PACKAGE.parent / "configs")),
    _PACKAGE / "configs",
)
"""Folder of the configs: in the installed package, or in a checkout."""


class ConfigError(ValueError):
    """Raised if a run config is missing, is invalid, or does not fit its data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The metric value that a config promises to reach on the held-out data.

    Attributes:
      metric: one of the loss's metrics: `"log_loss"`, `"rmse"`, `"mae"` or
        `"softmax_loss"`, where lower is better, or `"auc"`.
      at_most: maximum value, for metrics other than `"auc"`. With `relative_to`, a
        multiple of the reference's value.
      at_least: minimum value, for `"auc"`. With `relative_to`, a share of the amount by
        which the teacher's AUC exceeds 0.5, the AUC of chance.
      relative_to: reference that the limit is relative to. `"teacher"` is the model
        that generated the labels of synthetic data; no trained model can beat it.
        `None` makes the limit absolute.
    """

    metric: str
    at_most: float | None = None
    at_least: float | None = None
    relative_to: Literal["teacher"] | None = None

    def __post_init__(self):
        if (self.at_most is None) == (self.at_least is None):
            limits, rule = [self.at_most, self.at_least], "be one number and one None"
            raise invalid("Target: at_most and at_least", rule, limits)

    def is_met(self, value: float, teacher: float | None) -> bool | None:
        """Returns True if a value reaches the target, or None if that is unknown.

        Args:
          value: the metric's value.
          teacher: the reference's value, or None if unknown.
        """
        chance, scale = 0.0, 1.0
        if self.relative_to is not None:
            if teacher is None:
                return None
            chance = 0.0 if self.at_least is None else 0.5
            scale = teacher - chance
        if self.at_least is not None:
            return value - chance >= self.at_least * scale
        assert self.at_most is not None
        return value <= self.at_most * scale

    def __str__(self) -> str:
        if self.at_least is not None:
            unit = " of the teacher's lead over 0.5" if self.relative_to else ""
            return f"{self.metric} at least {self.at_least:g}{unit}"
        unit = " times the teacher's" if self.relative_to else ""
        return f"{self.metric} at most {self.at_most:g}{unit}"


RunEventKind = Literal[
    "init", "start", "train", "evaluation_start", "evaluation", "result"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened in a run, passed to `RunConfig.on_event`.

    Attributes:
      kind: what happened.

        * `"init"`: the run begins, or resumes if `step` is positive. A resumed run
          repeats events of later steps that an earlier start already reported. It also
          repeats an evaluation after this step if `config.evaluates_after(step)`.
        * `"start"`: the state is ready, and the next step follows.
        * `"train"`: progress is reported; the values are means since the last report.
        * `"evaluation_start"`: an evaluation begins.
        * `"evaluation"`: an evaluation has ended; the values are held-out metrics.
        * `"result"`: the run is done; the values are the fields of `RunResult`.
      step: number of steps done.
      values: the event's values by name; may be empty.
      config: config of the run.
      data: opened data set.
      directory: directory of the run, where you can add files.

    Example:
      >>> def log(event):
      ...     if event.kind in ("train", "evaluation"):
      ...         print(event.step, dict(event.values))
      >>> config = dataclasses.replace(load_config("synthetic"), on_event=log)
    """

    kind: RunEventKind
    step: int
    values: Mapping[str, Any]
    config: "RunConfig"
    data: Any
    directory: pathlib.Path


def ignore_event(event: RunEvent) -> None:
    """Does nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a training run, apart from its devices and the paths of its files.

    Attributes:
      name: name of the run; its default output directory is `runs/<name>`.
      data: data source of the batches, a frozen dataclass; see `DataSource`.
      model: sizes and other hyperparameters of the model, a frozen dataclass; see
        `ModelConfig`.
      loss: `"log_loss"` for clicks, `"squared_error"` for ratings, `"softmax"` for one
        of several classes (labels are class numbers, scores `[batch, classes]`), or
        `"in_batch_softmax"` for choices among the items of the batch.
      loss_weight: positive factor of the training loss; metrics do not use it.
      batch_size: samples per step, over all devices. It need not be divisible by the
        number of devices.
      num_steps: number of training steps.
      table_learning_rate: learning rate for `make_table_optimizer`.
      dense_learning_rate: learning rate for `make_dense_optimizer`.
      make_table_optimizer: returns the tables' optimizer, given this config.
      make_dense_optimizer: returns the optax optimizer of all other parameters, given
        this config.
      max_dense_norm: maximum global norm of the dense gradients. Larger gradients are
        scaled down; table gradients are neither counted nor scaled. `None` sets no
        limit.
      target: metric value that the config promises to reach, or None.
      capacity: number of ids per destination in a round of the exchange. By default,
        the plan chooses it. It affects the speed, never the results.
      backend: backend of lookups and updates, as in `make_plan`. It affects the speed,
        never the results.
      tables_split_over: devices that a table's rows are split over: `"all"`, or
        `"slice"` for a copy of the table in each slice. A placement set for a table
        takes precedence.
      cache_rows: number of rows of each table that all devices cache together, while
        the host keeps all rows; see `te.HostRows`. 0 keeps all rows on the devices. A
        placement set for a table takes precedence.
      rows_directory: directory for memory-mapped files with the rows of tables that
        `cache_rows` keeps on the host. By default, these rows are in the host's memory.
      seed: seed of the data and the initial values, from 0 to 2**32 - 1.
      log_every: number of steps per progress line.
      evaluate_every: number of steps between evaluations; 0 evaluates only at the end.
      evaluate_from: first step after which the model may be evaluated.
      checkpoint_every: number of steps between checkpoints; 0 saves only at the end.
      checkpoints_kept: number of latest checkpoints to keep; older ones are deleted.
      keep_best: whether to also keep the checkpoint with the lowest main metric on the
        held-out data, and make it the result. Every evaluation then saves a checkpoint.
      patience: number of evaluations in a row after which the run ends if none of them
        has lowered the main metric; 0 runs all steps.
      on_event: called with each `RunEvent` of `train` on the job's first process, for
        your own logging. It can be a dataclass with `__call__`, whose fields `--set`
        can change.
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
    capacity: int | None = None
    backend: BackendName | SparseCore = "xla"
    tables_split_over: Literal["all", "slice"] = "all"
    cache_rows: int = 0
    rows_directory: str | None = None
    seed: int = 0
    log_every: int = 100
    evaluate_every: int = 0
    evaluate_from: int = 0
    checkpoint_every: int = 0
    checkpoints_kept: int = 3
    keep_best: bool = False
    patience: int = 0
    on_event: Callable[["RunEvent"], None] = ignore_event

    def __post_init__(self):
        rules = dict(_RULES)
        if self.cache_rows:
            fix = "with cache_rows, te.HostRows keeps one copy of each table"
            rules["tables_split_over"] = choice_rule(("all",), fix)
        problems = [*broken_rules(self, rules)]
        if self.target is not None:
            loss = LOSSES[self.loss]
            is_rising = self.target.at_least is not None
            rule = choice_rule(loss.rising_metrics if is_rising else loss.metrics)
            owner = f" for the loss {self.loss!r}"
            wrong = broken_rules(self.target, {"metric": rule}, owner)
            problems += [x._replace(field="RunConfig.target.metric") for x in wrong]
        raise_all(problems)

    def describe(self) -> dict[str, Any]:
        """Returns the fields as JSON values, without the functions."""
        # An event listener may hold open files, which cannot be copied.
        fields = dataclasses.asdict(dataclasses.replace(self, on_event=ignore_event))
        fields = {name: field for name, field in fields.items() if not callable(field)}
        return json.loads(json.dumps(fields, default=str))

    def evaluates_after(self, step: int) -> bool:
        """Returns True if an evaluation is due after `step` steps."""
        is_due = self.evaluate_every > 0 and step % self.evaluate_every == 0
        return step >= self.num_steps or (is_due and step >= max(1, self.evaluate_from))


_RULES: Final = {
    "batch_size": int_rule(1),
    "num_steps": int_rule(1),
    "cache_rows": int_rule(0),
    "seed": int_rule(0, 2**32 - 1),  # JAX would truncate a larger seed.
    "log_every": int_rule(1),
    "evaluate_every": int_rule(0),
    "evaluate_from": int_rule(0),
    "checkpoint_every": int_rule(0),
    "checkpoints_kept": int_rule(1),
    "patience": int_rule(0),
}


def list_configs() -> dict[str, pathlib.Path]:
    """Returns the package's configs, as a dict from name to file."""
    return {path.stem: path for path in sorted(CONFIGS_DIR.glob("*.py"))}


def load_config(name_or_path: str) -> RunConfig:
    """Returns the run config that a Python file defines as `config`.

    Like a script, the file can import modules from its folder. Errors that it raises
    propagate.

    Args:
      name_or_path: a name from `list_configs`, or the path of a Python file.

    Raises:
      ConfigError: if the file does not exist, or defines no `config`.

    Example:
      >>> load_config("synthetic").batch_size
      2048
    """
    known = list_configs()
    path = known.get(name_or_path, local_path(name_or_path)).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(
            f"Unknown config {name_or_path!r}. Pass a Python file, or one of "
            f"{', '.join(sorted(known))}."
        )
    # Other processes cannot import a module of this name either.
    module = ModuleType(f"config_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # Dataclasses look up their module.
    sys.path.insert(0, str(path.parent))
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    finally:
        sys.path.remove(str(path.parent))
    config = getattr(module, "config", None)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"{path} must define `config` as a tpu_embedding.tools.train.RunConfig, "
            f"got {type_name(config)}."
        )
    return config


def _type_of_setting(value: Any, hint: Any) -> Any:
    """Returns a field's type for `--set`, which cannot create sections."""
    if dataclasses.is_dataclass(value):
        return type(value)  # The hint may be a protocol.
    simple = [x for x in typing.get_args(hint) if not dataclasses.is_dataclass(x)]
    has_sections = len(simple) < len(typing.get_args(hint))
    return typing.Union[tuple(simple)] if has_sections else hint  # noqa: UP007


def apply_overrides(config: Any, settings: Iterable[str]) -> Any:
    """Returns a copy of a config with some fields replaced.

    A wrong key or value ends the program with status 2 and a message that lists similar
    keys. The setting `help` prints all keys.

    Args:
      config: a frozen dataclass, whose sections are also dataclasses.
      settings: strings `KEY=VALUE`, such as `num_steps=100` or `model.dim=8`. Spaces
        separate the values of a tuple, and `None` is a valid value.

    Example:
      >>> config = apply_overrides(load_config("synthetic"), ["model.dim=8"])
      >>> config.model.dim
      8
    """
    arguments = []
    for setting in settings:
        key, _, value = setting.partition("=")
        arguments += [f"--{key}", *shlex.split(value)]
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    hints = typing.get_type_hints(type(config))
    types = [
        (name, _type_of_setting(value, hints[name])) for name, value in values.items()
    ]
    settings_type = dataclasses.make_dataclass(
        "Settings", types, namespace={"__doc__": type(config).__doc__}, frozen=True
    )
    changed = tyro.cli(
        settings_type,
        prog="--set",
        args=arguments,
        default=settings_type(**values),
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    )
    try:
        return dataclasses.replace(config, **vars(changed))
    except ValueError as error:
        raise ConfigError(str(error)) from error
