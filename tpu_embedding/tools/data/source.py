"""The data section of a run config: settings that open a data set."""

import abc
import pathlib
from typing import Any, Protocol

from tpu_embedding.field_checks import is_int, raise_all
from tpu_embedding.paths import is_local_path, local_path
from tpu_embedding.tools.data.batch import DataError, Dataset


class DataSource(Protocol):
    """Settings of a data set, which opens it: the type of `RunConfig.data`.

    A frozen dataclass with a method `open`. Its fields are numbers, strings, paths, or
    tuples of them, so that the command line can change them.
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


def required_files(data_dir: Any, files: str) -> pathlib.Path:
    """Returns the path of the files that a source reads.

    Args:
      data_dir: the path that the user gave, or None.
      files: what the source reads, for errors.

    Raises:
      DataError: if there is no path, or nothing exists there.
    """
    if data_dir is None:
        raise DataError(f"This config reads {files}: pass their path with --data-dir.")
    if not is_local_path(data_dir) or not local_path(data_dir).exists():
        raise DataError(
            f"{data_dir} is missing on this machine; give the path of {files}."
        )
    return local_path(data_dir)


def check_counts(settings: Any) -> None:
    """Raises a ValueError that names each int field which is less than 1.

    Args:
      settings: a dataclass, such as a source.
    """
    raise_all(
        [
            f"{type(settings).__name__}.{name} must be at least 1, got {value}"
            for name, value in vars(settings).items()
            if is_int(value) and value < 1
        ]
    )


class SyntheticSource(abc.ABC):
    """Base of the sources that read no file: their data set is its own outline."""

    def __post_init__(self):
        check_counts(self)

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Dataset:
        """Returns the data set.

        Raises:
          DataError: if a directory is given, because the source reads no file.
        """
        if data_dir is not None:
            raise DataError(
                "This config generates its data and reads no file, got "
                f"{data_dir}; leave --data-dir out."
            )
        return self.draw(batch_size=batch_size, seed=seed)

    def outline(self, *, batch_size: int, seed: int) -> Dataset:
        """Returns a data set of the same sizes, by default the data set itself."""
        return self.draw(batch_size=batch_size, seed=seed)

    @abc.abstractmethod
    def draw(self, *, batch_size: int, seed: int) -> Dataset:
        """Returns the data set."""
