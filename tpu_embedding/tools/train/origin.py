"""Where the config of a run comes from: a config's name or a Python file.

A run records its origin for `tpu-embedding export`. The record is not trusted: it only
selects a config of the package. It never names code to run, an option, or a file to
open.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from tpu_embedding.paths import is_local_path, local_path
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.train.reporting import changes
from tpu_embedding.tools.train.run_config import (
    ConfigError,
    RunConfig,
    apply_overrides,
    list_configs,
    load_config,
)
from tpu_embedding.tools.train.run_directory import RECORDS_FILE, latest_start


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """What a user started a run with.

    Attributes:
      config: name of a config, or path of a Python file.
      settings: changes of the config, as in `apply_overrides`.
      data_dir: path of the data, or None if the config reads no file.
    """

    config: str
    settings: tuple[str, ...] = ()
    data_dir: str | None = None

    def load(self) -> RunConfig:
        """Returns the config with its changes.

        Raises:
          ConfigError: if the config is missing or invalid.
        """
        return apply_overrides(load_config(self.config), self.settings)

    def record(self) -> dict[str, Any]:
        """Returns a record for `config_of_run`; its errors show the absolute paths."""
        config, data_dir = self.config, self.data_dir
        if config not in list_configs():
            config = str(local_path(config).resolve())
        if data_dir is not None and is_local_path(data_dir):
            data_dir = str(local_path(data_dir).resolve())
        return {"config": config, "data_dir": data_dir}

    def export_options(self) -> list[str]:
        """Returns the options of `tpu-embedding export` that a run cannot record."""
        options = []
        if self.config not in list_configs():
            options += ["--config", self.config]
        if self.data_dir is not None:
            options += ["--data-dir", self.data_dir]
        return options + [word for text in self.settings for word in ("--set", text)]


def config_of_run(
    directory: pathlib.Path,
    *,
    config: str | None = None,
    settings: Sequence[str] = (),
    data_dir: str | None = None,
) -> RunConfig:
    """Returns the config of a run's latest start, from the package or from the user.

    Args:
      directory: directory of the run, which somebody else may have written.
      config: name or path of the config. Defaults to the package's config that the run
        recorded.
      settings: changes by the user, as in `apply_overrides`.
      data_dir: path of the data, or None.

    Raises:
      ConfigError: if the config is unknown, or its model differs from the run's.
      DataError: if the run read data and `data_dir` is None.
      RunDirectoryError: if a record is damaged.
    """
    origin, run = latest_start(directory)
    if config is not None:
        loaded = apply_overrides(load_config(config), settings)
        for change in _model_changes(run, loaded):
            print(f"changed since the run: {change}")
        return loaded
    if not (directory / RECORDS_FILE).exists():
        raise ConfigError(
            f"{directory} holds no run of tpu-embedding train; pass the output "
            "directory of a run."
        )
    if origin is None:
        raise ConfigError(
            f"The config of {directory} is unknown, because a script started the run. "
            "Pass it with --config, and its changes with --set."
        )
    name, recorded_dir = origin.get("config"), origin.get("data_dir")
    if name not in list(list_configs()):
        raise ConfigError(
            f"{directory} was started with {name!r:.200}, which is not executed "
            "automatically. Pass the Python file with --config, and its changes with "
            "--set."
        )
    if recorded_dir is not None and data_dir is None:
        raise DataError(
            f"{directory} was trained on {recorded_dir!r:.200}, which is not read "
            "automatically. Pass the path of the data with --data-dir."
        )
    loaded = apply_overrides(load_config(name), settings)
    if different := _model_changes(run, loaded, settings):
        raise ConfigError(
            f"The model of the config {name!r} differs from the run's in {directory}: "
            f"{', '.join(different):.400}. Pass the run's values with --set."
        )
    return loaded


def _model_changes(
    run: dict[str, Any], config: RunConfig, settings: Sequence[str] = ()
) -> list[str]:
    """Returns the model fields that differ from the run's and are not in settings."""
    named = {setting.partition("=")[0].replace("-", "_") for setting in settings}
    before, now = run.get("model"), config.describe()["model"]
    if before is None:  # A script may record none.
        return []
    return [
        f"{name} {old!r} -> {new!r}"
        for name, old, new in changes({"model": before}, {"model": now})
        if name not in named
    ]
