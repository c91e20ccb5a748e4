"""Where the config of a run comes from: a config's name, a Python file or a CSV file.

A run keeps it in its directory, so that `tpu-embedding export` needs nothing else.
"""

import dataclasses
import gzip
import json
import pathlib
from typing import Any, Final, Self

from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.source import required_files
from tpu_embedding.tools.train.config import (
    ConfigError,
    RunConfig,
    apply_overrides,
    load_config,
)

ORIGIN_FILE: Final = "origin.json"
CODE_FILE: Final = "config.py"

CSV_SUFFIXES: Final = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """What a run was started with.

    Attributes:
      config: name of a config, or path of a Python file or of a CSV file.
      settings: changes of the config, as `apply_overrides` takes them.
      data_dir: path of the data, or None. A CSV file is its own.
      code: text of the Python file; None: what the file holds now.
    """

    config: str
    settings: tuple[str, ...] = ()
    data_dir: str | None = None
    code: str | None = None

    def load(self) -> RunConfig:
        """Returns the config with its changes.

        Raises:
          ConfigError: if the config is missing or invalid.
          DataError: if the CSV file is missing.
        """
        if self.config.endswith(CSV_SUFFIXES):
            config = csv_run(local_path(self.config))
        else:
            config = load_config(self.config, self.code)
        return apply_overrides(config, self.settings)

    def save(self, directory: pathlib.Path) -> None:
        """Writes the origin to the directory of a run, with absolute paths."""
        is_file = local_path(self.config).is_file()
        record = {
            "config": str(local_path(self.config).resolve())
            if is_file
            else self.config,
            "settings": list(self.settings),
            "data_dir": self.data_dir and str(local_path(self.data_dir).resolve()),
        }
        (directory / ORIGIN_FILE).write_text(json.dumps(record, indent=2) + "\n")
        if is_file and self.config.endswith(".py"):
            code = local_path(self.config).read_text(encoding="utf-8")
            (directory / CODE_FILE).write_text(code, encoding="utf-8")

    @classmethod
    def of_run(cls, directory: pathlib.Path) -> Self:
        """Returns the origin of a run.

        Raises:
          ConfigError: if the run has none that can be read.
        """
        code = directory / CODE_FILE
        try:
            record: Any = json.loads((directory / ORIGIN_FILE).read_text())
            return cls(
                config=record["config"],
                settings=tuple(record["settings"]),
                data_dir=record["data_dir"],
                code=code.read_text(encoding="utf-8") if code.exists() else None,
            )
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{directory} must be the directory of a run that `tpu-embedding "
                f"train` started, but {ORIGIN_FILE} cannot be read: {error}. Name the "
                "config of another run by --config."
            ) from None


def csv_run(path: pathlib.Path) -> RunConfig:
    """Returns the config `csv` for the size of a file.

    A batch has about a 500th of the rows, a power of two from 32 to 4,096. There are
    20 reports and 5 evaluations.

    Args:
      path: path of the CSV file, by which the run is named.

    Raises:
      DataError: if the file is missing.
    """
    opens: Any = gzip.open if path.suffix == ".gz" else open
    with opens(required_files(path, "a CSV file"), "rb") as file:
        num_rows = sum(
            block.count(b"\n") for block in iter(lambda: file.read(2**20), b"")
        )
    config = load_config("csv")
    batch_size = 2 ** min(max(5, (num_rows // 500).bit_length()), 12)
    num_steps = max(20, EPOCHS * num_rows // batch_size)
    return dataclasses.replace(
        config,
        name=path.name.partition(".")[0],
        batch_size=batch_size,
        num_steps=num_steps,
        log_every=-(-num_steps // 20),
        evaluate_every=-(-num_steps // 5),
        checkpoint_every=-(-num_steps // 5),
    )


EPOCHS: Final = 3
"""Passes over a CSV file; more of them overfit the tables' rows."""
