"""The batch, the data set and the data source of the training loop."""

import abc
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tpu_embedding.argument_checks import is_int, raise_all
from tpu_embedding.paths import is_local_path, local_path
from tpu_embedding.types import FeatureIds, RaggedIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch of samples, on the host until the training loop moves it to devices.

    Attributes:
      features: ids by feature name. Each value is an int array `[batch]` or
        `[batch, valence]` (padded with `PADDING_ROW_ID`), a `DenseIds`, a `RaggedIds`
        or a `SparseIds`; or what `ModelConfig.with_inputs` makes these of.
      dense: finite numbers `[batch, num_dense]`, the dense inputs, which the loop
        converts to float32, as it does labels and weights. Or a dict of arrays
        `[batch, ...]`, whose integers become int32. None if there are none.
      labels: finite numbers `[batch]`. The loss `"log_loss"` needs them in [0, 1].
      weights: numbers `[batch]` of at least 0: 1 for a sample, 0 for padding samples in
        the last batch of an evaluation.

    Example:
      >>> batch = Batch(
      ...     features={"movie": np.array([3, 5])},
      ...     labels=np.array([0.0, 1.0]),
      ...     weights=np.ones(2),
      ... )
      >>> batch.dense is None
      True
    """

    features: Mapping[str, FeatureIds | Mapping[str, FeatureIds]]
    dense: np.ndarray | Mapping[str, np.ndarray] | None = None
    labels: np.ndarray
    weights: np.ndarray


class Dataset(Protocol):
    """A source of batches of one fixed size, as `DataSource.open` returns it.

    The training batch is a pure function of the step. A resumed run therefore reads the
    same batches as the interrupted run, and no reader state needs saving.

    `ModelConfig.feature_config` and `ModelConfig.build` get the data set. It may have
    further attributes for them, such as the sizes of its vocabularies. The loop knows
    three: `vocabularies`, a dict of the `Vocabulary` of each feature that has one,
    which a run checks when it resumes, and an export carries; `schema`, whose
    `to_json()` a run keeps and an export carries; and `description`, a text that is
    printed when a run starts.

    In a job of several processes, each process feeds its own devices. It reads the
    samples of these devices alone if the data set has a further method
    `train_part(step, samples)`, as `BlockDataset` has, and otherwise the whole batch.

    Attributes:
      batch_size: samples per batch, over all devices, as `open` got it.
    """

    batch_size: int

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        ...

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out data once; samples of weight 0 pad the last batch."""
        ...


class DataError(ValueError):
    """Raised for missing or damaged data; the message names file and line.

    Data sets of your own also raise it. The training command prints it as one line.
    """


def join_samples(batches: Sequence[Batch], samples: Sequence[np.ndarray]) -> Batch:
    """Returns some samples of several batches as one batch, in their order.

    Args:
      batches: batches with the same inputs.
      samples: numbers of the samples to take from each batch.

    Example:
      >>> batch = Batch(features={}, labels=np.array([0, 1, 2]), weights=np.ones(3))
      >>> join_samples([batch, batch], [np.array([2, 0]), np.array([1])]).labels
      array([2, 0, 1])
    """

    def join(*arrays: Any) -> Any:
        if isinstance(arrays[0], RaggedIds):
            return _join_ragged(arrays, samples)
        pairs = zip(arrays, samples, strict=True)
        return np.concatenate([array[numbers] for array, numbers in pairs])

    return jax.tree.map(
        join, *batches, is_leaf=lambda leaf: isinstance(leaf, RaggedIds)
    )


def _join_ragged(
    inputs: Sequence[RaggedIds], samples: Sequence[np.ndarray]
) -> RaggedIds:
    values, lengths = [], []
    for ids, numbers in zip(inputs, samples, strict=True):
        splits = np.asarray(ids.row_splits)
        starts, sizes = splits[numbers], splits[numbers + 1] - splits[numbers]
        ends = np.cumsum(sizes)
        # Value `i` of the result is `i - (ends - sizes)` values after its sample's
        # start.
        places = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
        values.append(np.asarray(ids.values)[places])
        lengths.append(sizes)
    return RaggedIds(
        values=np.concatenate(values),
        row_splits=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]),
    )


def padded_batches(
    read: Callable[[np.ndarray], Batch], samples: np.ndarray, batch_size: int
) -> Iterator[Batch]:
    """Yields samples in batches of one size, as an evaluation needs them.

    Copies of the last sample, with weight 0, pad the last batch.

    Args:
      read: returns the batch of the given samples.
      samples: numbers of the samples.
      batch_size: samples of a batch.
    """
    for start in range(0, len(samples), batch_size):
        places = start + np.arange(batch_size)
        batch = read(samples[np.minimum(places, len(samples) - 1)])
        weights = np.where(places < len(samples), batch.weights, 0)
        yield dataclasses.replace(batch, weights=weights.astype(np.float32))


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
      DataError: if the path is None, or nothing exists there.
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
