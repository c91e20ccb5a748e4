"""Batches, data sets and data sources, as the training loop uses them."""

import abc
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tpu_embedding.argument_checks import (
    broken_rules,
    int_rule,
    invalid,
    is_int,
    raise_all,
)
from tpu_embedding.paths import is_local_path, local_path
from tpu_embedding.types import FeatureIds, RaggedIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch of samples, on the host until the training loop moves it to devices.

    Attributes:
      features: ids by feature name, as a `DenseIds`, a `RaggedIds`, a `SparseIds` or an
        int array. Arrays are `[batch]` or `[batch, valence]`, and padded with
        `PADDING_ROW_ID`. A model config may replace the features in its `with_inputs`.
      dense: dense inputs, finite numbers `[batch, num_dense]`. The loop converts dense
        inputs, labels and weights to float32. A dict of arrays `[batch, ...]` is also
        accepted; its integers become int32. `None` means no dense inputs.
      labels: finite numbers `[batch]`, in [0, 1] for the loss `"log_loss"`.
      weights: numbers `[batch]`, at least 0. Samples that pad the last evaluation batch
        have weight 0. Real samples typically have weight 1.

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
    """A data set with batches of one fixed size, opened by a `DataSource`.

    The training batch must be a pure function of the step. A resumed run then reads the
    same batches as the interrupted run, without any saved reader state.

    `ModelConfig.feature_config` and `ModelConfig.build` receive the data set, so you
    can add attributes that they need, such as vocabulary sizes. The loop itself uses
    two optional attributes:

    * `vocabularies`: dict from feature name to `Vocabulary`. A run stores them and
      checks them on resuming, and an export includes them.
    * `description`: text printed when a run starts.

    In a job with several processes, each process feeds its own devices. If your data
    set has a method `train_part(step, samples)`, like `BlockDataset`, each process
    reads only the samples for its devices. Otherwise, it reads the whole batch.

    Attributes:
      batch_size: samples per batch, over all devices, as passed to `open`.

    Example:
      >>> class Ones:
      ...     batch_size = 2
      ...
      ...     def train_batch(self, step):
      ...         ones = np.ones(2, np.float32)
      ...         ids = {"movie": np.array([step, 0])}
      ...         return Batch(features=ids, labels=ones, weights=ones)
      ...
      ...     def evaluation_batches(self):
      ...         yield self.train_batch(0)
      >>> data: Dataset = Ones()
      >>> data.train_batch(3).features["movie"].tolist()
      [3, 0]
    """

    batch_size: int

    def train_batch(self, step: int) -> Batch:
        """Makes the batch for training step `step`, counted from 0."""
        ...

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields each held-out sample once. Samples of weight 0 pad the last batch."""
        ...


class DataError(ValueError):
    """Raised for missing or damaged data. The message says where the problem is.

    Raise it in your own data sets. The training command prints it on one line.

    Example:
      >>> try:
      ...     required_files("absent/clicks", "click logs")
      ... except DataError as error:
      ...     print(error)
      --data-dir must be the path of click logs on this machine, got 'absent/clicks'.
    """


def join_samples(batches: Sequence[Batch], samples: Sequence[np.ndarray]) -> Batch:
    """Joins selected samples from several batches into one batch, in order.

    `samples[i]` has the numbers of the samples to take from `batches[i]`.

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
        # In the result, samples start at `ends - sizes`. A value is equally far from
        # its sample's start in `ids.values` and in the result.
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
    """Yields samples, given by number, in batches of equal size for evaluation.

    `read` makes a batch from sample numbers. Copies of the last sample, with weight 0,
    pad the last batch.

    Example:
      >>> def read(samples):
      ...     return Batch(features={}, labels=samples, weights=np.ones(len(samples)))
      >>> for batch in padded_batches(read, np.arange(3), batch_size=2):
      ...     print(batch.labels, batch.weights)
      [0 1] [1. 1.]
      [2 2] [1. 0.]
    """
    for start in range(0, len(samples), batch_size):
        places = start + np.arange(batch_size)
        # A shorter batch would recompile the evaluation step.
        batch = read(samples[np.minimum(places, len(samples) - 1)])
        weights = np.where(places < len(samples), batch.weights, 0)
        yield dataclasses.replace(batch, weights=weights.astype(np.float32))


class DataSource(Protocol):
    """Settings that open a data set. `RunConfig.data` has this type.

    Write your source as a frozen dataclass, whose fields are numbers, strings, paths or
    tuples of such values. The command line can then change the fields.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class RatingsSource:
      ...     num_held_out: int = 1000
      ...
      ...     def open(self, data_dir, *, batch_size, seed):
      ...         path = required_files(data_dir, "ratings")
      ...         return BlockDataset(
      ...             RatingsReader(path),
      ...             batch_size=batch_size,
      ...             num_evaluation_samples=self.num_held_out,
      ...             seed=seed,
      ...         )
      >>> RatingsSource(num_held_out=10)
      RatingsSource(num_held_out=10)
    """

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Dataset:
        """Opens the data set.

        Args:
          data_dir: path to the files, or None.
          batch_size: samples per batch, over all devices.
          seed: seed for the sample order, or for synthetic samples.

        Returns:
          The data set. Its batches have `batch_size` samples.

        Raises:
          DataError: if files are missing or damaged.
        """
        ...

    def outline(self, *, batch_size: int, seed: int) -> Dataset:
        """Makes a data set with the same sizes, without reading any file.

        Its batches have the real shapes but arbitrary values, which is enough to
        compile a step. Only `tpu-embedding compile` calls this method.
        """
        ...


def required_files(data_dir: Any, files: str) -> pathlib.Path:
    """Checks that the path to a source's files exists.

    Args:
      data_dir: the user's path, or None.
      files: words for the files in errors, such as "click logs".

    Returns:
      The path, with `~` expanded.

    Raises:
      DataError: if the path is None or does not exist.

    Example:
      >>> required_files(".", "click logs").as_posix()
      '.'
    """
    if is_local_path(data_dir) and local_path(data_dir).exists():
        return local_path(data_dir)
    rule = f"be the path of {files} on this machine"
    given = None if data_dir is None else str(data_dir)
    raise invalid("--data-dir", rule, given, kind=DataError)


def check_counts(settings: Any) -> None:
    """Raises a ValueError if any int fields are less than 1, and names them."""
    counts = [name for name, value in vars(settings).items() if is_int(value)]
    raise_all(broken_rules(settings, dict.fromkeys(counts, int_rule(1))))


class SyntheticSource(abc.ABC):
    """Base class for sources that read no file.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Dice(SyntheticSource):
      ...     num_evaluation_samples: int
      ...
      ...     def draw(self, *, batch_size, seed):
      ...         return DiceRolls(self, batch_size=batch_size, seed=seed)
      >>> Dice(num_evaluation_samples=10)
      Dice(num_evaluation_samples=10)
    """

    def __post_init__(self):
        check_counts(self)

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Dataset:
        """Draws the data set.

        Raises:
          DataError: if a directory is given.
        """
        if data_dir is not None:
            rule = "be left out, because this config generates its data"
            raise invalid("--data-dir", rule, str(data_dir), kind=DataError)
        return self.draw(batch_size=batch_size, seed=seed)

    def outline(self, *, batch_size: int, seed: int) -> Dataset:
        """Makes a data set with the same sizes as `open`, by default with `draw`."""
        return self.draw(batch_size=batch_size, seed=seed)

    @abc.abstractmethod
    def draw(self, *, batch_size: int, seed: int) -> Dataset:
        """Builds the data set."""
