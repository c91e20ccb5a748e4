"""The data section of a run config: settings that open a data set.

A config declares the settings. The path of the files comes from the command line.
"""

import pathlib
from typing import Any, Protocol

from tpu_embedding.paths import is_local_path, local_path
from tpu_embedding.tools.data.batch import DataError, Dataset


class DataSource(Protocol):
    """Settings of a data set, which opens it: the type of `RunConfig.data`.

    A frozen dataclass with a method `open`. Its fields are numbers, strings, paths, or
    tuples of them. Records and checkpoints describe the run by them, and `--set` can
    change them.
    """

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Dataset:
        """Returns the data set.

        Args:
          data_dir: path of the files, or None.
          batch_size: samples per batch, over all devices.
          seed: seed of the order of samples, or of synthetic samples.

        Returns:
          The data set, whose batches have `batch_size` samples.

        Raises:
          DataError: if files are missing or damaged.
        """
        ...

    def outline(self, *, batch_size: int, seed: int) -> Dataset:
        """Returns a data set of the same sizes without reading any file.

        Its batches have the shapes of the real ones, but arbitrary values. They serve
        to compile a step. Only `tpu-embedding compile` calls this method.
        """
        ...


def local_data_dir(data_dir: Any) -> pathlib.Path:
    """Returns the path of a source that reads files of this machine.

    Raises:
      DataError: if it is something else.
    """
    if not is_local_path(data_dir):
        raise DataError(
            f"data_dir must be a path of this machine for this config, got "
            f"{data_dir!r}; mount or copy the files, and give their directory."
        )
    return local_path(data_dir)


def refuse_data_dir(data_dir: Any) -> None:
    """Raises a DataError if a source that reads no file gets a path."""
    if data_dir is not None:
        raise DataError(
            f"This config generates its data and reads no file, got {data_dir}; leave "
            "--data-dir out."
        )
