"""Run configs, loaded from Python files such as the ones in `configs/`.

A config is plain data that `--set` can change. Instead of optimizers, it has functions
that make them, because learning rate schedules depend on `num_steps`, which `--set` may
change.
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
    """Builds a schedule that rises linearly from 0, then stays constant.

    Note that `optax.linear_schedule` computes the same values by subtraction, with a
    rounding error of 0.14 % in the first of 24,000 steps.

    Args:
      learning_rate: final learning rate.
      num_steps: steps until the schedule is constant. The first step has the rate 0.

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
"""Folder with the configs, either in the installed package or in a checkout."""


class ConfigError(ValueError):
    """Raised if a run config is missing, is invalid, or does not fit its data.

    Example:
      >>> try:
      ...     load_config("unknown")
      ... except ConfigError as error:
      ...     print(str(error)[:24])
      Unknown config 'unknown'
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The metric value that a config promises to reach on the held-out data.

    Attributes:
      metric: name of a metric that belongs to the loss. Lower is better for
        `"log_loss"`, `"rmse"`, `"mae"` and `"softmax_loss"`. Higher is better for
        `"auc"` and `"accuracy"`.
      at_most: maximum value, if lower is better. If `relative_to` is set, this is a
        multiple of the reference value.
      at_least: minimum value, if higher is better. If `relative_to` is set, this is a
        share of the teacher's lead over 0.5, the AUC of a random guess.
      relative_to: reference that the limit is relative to. `"teacher"` is the model
        that generated the labels in synthetic data; no trained model can beat it.
        With `None`, the limit is absolute.

    Example:
      >>> target = Target(metric="auc", at_least=0.9, relative_to="teacher")
      >>> target.is_met(0.78, teacher=0.8)
      True
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
        """Tells if a value reaches the target.

        If the limit is relative to an unknown teacher, the result is None.

        Args:
          value: metric value.
          teacher: reference value, or None if unknown.
        """
        chance, scale = 0.0, 1.0
        if self.relative_to is not None:
            if teacher is None:
                return None
            chance = 0.0 if self.at_least is None else 0.5
            scale = teacher - chance
        # Only the lead over chance is scaled. For example, 0.9 times an AUC of 0.55
        # would be worse than guessing.
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
          repeats events that an earlier start reported for later steps. It also repeats
          the evaluation after `step` itself if `config.evaluates_after(step)` is True.
        * `"start"`: the state is ready, and the next step follows.
        * `"train"`: progress is reported; the values are means since the last report.
        * `"evaluation_start"`: an evaluation begins.
        * `"evaluation"`: an evaluation has ended; the values are held-out metrics.
        * `"result"`: the run is done; the values are the `RunResult` fields.
      step: steps done.
      values: event values by name; may be empty.
      config: run config.
      data: opened data set.
      directory: run directory, where you can add files.

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
    """Does nothing. This is the default for `RunConfig.on_event`.

    Example:
      >>> load_config("synthetic").on_event is ignore_event
      True
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings for a training run, apart from its devices and file paths.

    Attributes:
      name: run name; the default output directory is `runs/<name>`.
      data: data source, a frozen dataclass; see `DataSource`.
      model: hyperparameters such as layer sizes, a frozen dataclass; see `ModelConfig`.
      loss: `"log_loss"` for clicks, `"squared_error"` for ratings, `"softmax"` for
        classes, or `"in_batch_softmax"` for choices among the items in the batch. With
        `"softmax"`, labels are class numbers, and scores are `[batch, classes]`.
      loss_weight: positive factor for the training loss; metrics do not use it.
      batch_size: samples per step, over all devices. It need not be divisible by the
        device count.
      num_steps: steps to train.
      table_learning_rate: learning rate for `make_table_optimizer`.
      dense_learning_rate: learning rate for `make_dense_optimizer`.
      make_table_optimizer: makes the table optimizer from this config.
      make_dense_optimizer: takes this config, and makes the optax optimizer for all
        other parameters.
      max_dense_norm: maximum global norm of the dense gradients. If the norm is larger,
        the dense gradients are scaled down. Table gradients are neither counted nor
        scaled. `None` sets no limit.
      target: metric value that the config promises to reach, or None.
      capacity: ids per destination in an exchange round. By default, the plan chooses
        the number. It affects the speed, never the results.
      backend: backend for lookups and updates, as in `make_plan`. It affects the speed,
        never the results.
      tables_split_over: devices that a table's rows are divided among. `"all"` means
        all devices. With `"slice"`, each slice has a copy of the table, divided among
        its devices. A table's own placement takes precedence.
      cache_rows: number of rows per table that all devices together cache, while the
        host has all rows; see `te.HostRows`. With 0, all rows are on the devices. A
        table's own placement takes precedence.
      rows_directory: directory for memory-mapped files with the host's rows, if you set
        `cache_rows`. By default, these rows are in host memory.
      seed: seed for the data and the initial values, from 0 to 2**32 - 1.
      log_every: steps between progress lines.
      evaluate_every: steps between evaluations; 0 evaluates only at the end.
      evaluate_from: first step after which the model may be evaluated.
      checkpoint_every: steps between checkpoints; 0 saves only at the end.
      checkpoints_kept: number of latest checkpoints to keep; older ones are deleted.
      keep_best: whether to also keep the checkpoint with the lowest main metric on the
        held-out data. This checkpoint is then the run's result, and every evaluation
        saves a checkpoint.
      patience: ends the run after this many evaluations in a row that don't lower the
        main metric. With 0, the run does all steps.
      on_event: function for your own logging. On the first process, `train` calls it
        with each `RunEvent`. If it's a dataclass with `__call__`, you can change its
        fields with `--set`.

    Example:
      >>> import tpu_embedding as te
      >>> from tpu_embedding.tools.train import models, SyntheticClicksSource
      >>> config = RunConfig(
      ...     name="clicks",
      ...     data=SyntheticClicksSource(num_evaluation_samples=1000),
      ...     model=models.ClickModelConfig(dim=16, hidden_sizes=(64, 32)),
      ...     loss="log_loss",
      ...     batch_size=256,
      ...     num_steps=1000,
      ...     table_learning_rate=0.1,
      ...     dense_learning_rate=0.01,
      ...     make_table_optimizer=lambda run: te.optimizers.adagrad(
      ...         run.table_learning_rate),
      ...     make_dense_optimizer=lambda run: optax.adam(run.dense_learning_rate))
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
        if self.target is not None and self.loss in [*LOSSES]:
            loss = LOSSES[self.loss]
            is_rising = self.target.at_least is not None
            rule = choice_rule(loss.rising_metrics if is_rising else loss.metrics)
            owner = f" for the loss {self.loss!r}"
            wrong = broken_rules(self.target, {"metric": rule}, owner)
            problems += [x._replace(field="RunConfig.target.metric") for x in wrong]
        raise_all(problems)

    def describe(self) -> dict[str, Any]:
        """Converts the fields to JSON values, leaving out functions."""
        # `on_event` may hold open files, which cannot be copied.
        fields = dataclasses.asdict(dataclasses.replace(self, on_event=ignore_event))
        fields = {name: field for name, field in fields.items() if not callable(field)}
        # Tuples become lists, because the result is compared with recorded configs.
        return json.loads(json.dumps(fields, default=str))

    def evaluates_after(self, step: int) -> bool:
        """Tells if an evaluation is due after `step` steps."""
        is_due = self.evaluate_every > 0 and step % self.evaluate_every == 0
        return step >= self.num_steps or (is_due and step >= max(1, self.evaluate_from))


_RULES: Final = {
    "loss": choice_rule(tuple(LOSSES)),
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
    """Lists the configs that come with the package, as a dict from name to file.

    Example:
      >>> "synthetic" in list_configs()
      True
    """
    return {path.stem: path for path in sorted(CONFIGS_DIR.glob("*.py"))}


def load_config(name_or_path: str) -> RunConfig:
    """Loads the run config that a Python file defines as `config`.

    Like a script, your file can import modules from its folder. Errors that your file
    raises propagate.

    Args:
      name_or_path: a name from `list_configs`, or the path to a Python file.

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
    # The prefix makes the name differ from any module that a process could import.
    module = ModuleType(f"config_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # Dataclasses look up their module.
    sys.path.insert(0, str(path.parent))
    # Bytes are compiled, because Python then uses the encoding that the file declares.
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
    """Chooses a field's type for `--set`, which cannot create nested dataclasses."""
    if dataclasses.is_dataclass(value):
        return type(value)  # The hint may be a protocol.
    # For example, `--set` can set `target` to None, but not to a new `Target`.
    simple = [x for x in typing.get_args(hint) if not dataclasses.is_dataclass(x)]
    has_sections = len(simple) < len(typing.get_args(hint))
    return typing.Union[tuple(simple)] if has_sections else hint  # noqa: UP007


def apply_overrides(config: Any, settings: Iterable[str]) -> Any:
    """Copies a config and changes some fields, as `--set` does.

    A wrong key or value ends the program with status 2 and a message that lists similar
    keys. The setting `help` prints all keys.

    Args:
      config: a frozen dataclass. Its sections, such as `model`, are also dataclasses.
      settings: strings `KEY=VALUE`, such as `num_steps=100` or `model.dim=8`. Spaces
        separate tuple values, and `None` is a valid value.

    Example:
      >>> config = apply_overrides(load_config("synthetic"), ["model.dim=8"])
      >>> config.model.dim
      8
    """
    arguments = []
    for setting in settings:
        key, _, value = setting.partition("=")
        arguments += [f"--{key}", *shlex.split(value)]
    # tyro gets a new dataclass, because hints such as `DataSource` lack the fields that
    # users set. The docstring is kept, because it has the texts for `--set help`.
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
        # Booleans take a value, and unions don't become subcommands.
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    )
    # `Settings` checks nothing, but `replace` runs the checks in `RunConfig`.
    try:
        return dataclasses.replace(config, **vars(changed))
    except ValueError as error:
        raise ConfigError(str(error)) from error
