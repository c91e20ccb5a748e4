"""Records how a run was started, so that `tpu-embedding export` can load its config.

Anybody may have written a record, so it can only select a package config. No code that
it names is executed, and no file that it names is opened.
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
    """Command-line values that start a run; `config` is a config name or a file."""

    config: str
    settings: tuple[str, ...] = ()
    data_dir: str | None = None

    def load(self) -> RunConfig:
        return apply_overrides(load_config(self.config), self.settings)

    def record(self) -> dict[str, Any]:
        """Builds the record that `config_of_run` reads."""
        # Paths are absolute, because export may run in another folder and shows them in
        # its errors.
        config, data_dir = self.config, self.data_dir
        if config not in list_configs():
            config = str(local_path(config).resolve())
        if data_dir is not None and is_local_path(data_dir):
            data_dir = str(local_path(data_dir).resolve())
        return {"config": config, "data_dir": data_dir}

    def export_options(self) -> list[str]:
        """Lists the options that a user must pass to `tpu-embedding export`."""
        # Export doesn't execute or open the files that a record names, and a record
        # doesn't have the settings.
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
    """Loads a run config, by default the package config that the run recorded.

    All arguments except `directory` come from the user and are trusted.
    """
    origin, run = latest_start(directory)
    if config is not None:
        loaded = apply_overrides(load_config(config), settings)
        # Users may have changed this config on purpose, so changes are only printed.
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
    # Searches a list, because the name in a damaged record may not be hashable, for
    # example a JSON array. The message truncates the name, which may be very long.
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
    """Lists changed model fields, except for fields that `settings` change."""
    # `--set` accepts both spellings of a key.
    named = {setting.partition("=")[0].replace("-", "_") for setting in settings}
    before, now = run.get("model"), config.describe()["model"]
    if before is None:  # The record may lack the model.
        return []
    return [
        f"{name} {old!r} -> {new!r}"
        for name, old, new in changes({"model": before}, {"model": now})
        if name not in named
    ]
