"""Checks what a data set returns, before any of it reaches the devices.

A wrong batch would fail deep inside the compiled step, or train on nonsense: a label of
4 under `log_loss` has a loss without a lower bound. The loop therefore reads all data
sets, those of the package included, through `CheckedDataset`.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from tpu_embedding.paths import is_local_path, local_path
from tpu_embedding.tools.data.batch import Batch, DataError, Dataset
from tpu_embedding.tools.data.batch_part import slice_batch
from tpu_embedding.tools.train.config.run_config import RunConfig
from tpu_embedding.tools.train.errors import ConfigError, as_config_error
from tpu_embedding.tools.train.metrics import LOSSES, LossName

_DenseShapes = tuple[int | None] | dict[str, tuple[int, ...]] | None
"""Shape of a sample's dense inputs, by name for a dict of them."""


def open_data(config: RunConfig, data_dir: Any) -> "CheckedDataset":
    """Opens the data set of a config.

    Args:
      config: config of the run.
      data_dir: path of the files, or None. What is no path of this machine reaches the
        source as it is, such as `"gs://bucket/clicks"` or a list.

    Raises:
      ConfigError: if the source raises an error, or returns no data set.
      DataError: if files are missing or damaged.
    """
    if is_local_path(data_dir):
        data_dir = local_path(data_dir)
    with as_config_error(f"{type(config.data).__name__}.open"):
        data = config.data.open(
            data_dir,
            batch_size=config.batch_size,
            seed=config.seed,
        )
    return CheckedDataset(data, config)


class CheckedDataset:
    """A data set whose batches fit the config; others raise `DataError`.

    Attributes:
      data: the data set that the source returned.
      batch_size: samples per batch.
      first_batch: the batch of step 0, which is checked at construction.
    """

    def __init__(self, data: Dataset, config: RunConfig):
        """Checks the data set and its first batch.

        Args:
          data: return value of the source's `open` or `outline`.
          config: config of the run.

        Raises:
          ConfigError: if the value lacks a method, or has another batch size.
          DataError: if its first batch does not fit.
        """
        methods = ("train_batch", "evaluation_batches")
        missing = [m for m in methods if not callable(getattr(data, m, None))]
        if missing:
            raise ConfigError(
                f"{type(config.data).__name__} must open a "
                "tpu_embedding.tools.train.Dataset, got a "
                f"{type(data).__name__} without "
                f"{' and '.join(missing)}."
            )
        name = type(data).__name__
        batch_size = getattr(data, "batch_size", None)
        if batch_size != config.batch_size:
            raise ConfigError(
                f"{name}.batch_size must be {config.batch_size}, the batch size of "
                f"the config, got {batch_size!r}."
            )
        self.data = data
        self.batch_size = config.batch_size
        self._name = name
        self._loss: LossName = config.loss
        self._dense_shapes: _DenseShapes | Literal["any"] = "any"
        self._dense_dtypes: dict[str, np.dtype] = {}
        self.first_batch = self.train_batch(0)
        dense = self.first_batch.dense
        self._dense_shapes = _shapes_of(dense)
        if isinstance(dense, Mapping):
            self._dense_dtypes = {name: x.dtype for name, x in dense.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the first batch, which loader processes do not need."""
        return {k: v for k, v in self.__dict__.items() if k != "first_batch"}

    @property
    def reads_parts(self) -> bool:
        """True if the data set reads a part of a batch without the rest of it."""
        return callable(getattr(self.data, "train_part", None))

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, with float32 arrays."""
        owner = f"{self._name}.train_batch({step})"
        with as_config_error(owner):
            batch = self.data.train_batch(step)
        return self._checked(batch, owner)

    def train_part(self, step: int, samples: range) -> Batch:
        """Returns some samples of the batch of training step `step`.

        The data set reads only them if it has a method `train_part`; see `Dataset`.
        Otherwise they are cut out of the whole batch.

        Args:
          step: number of the step, counted from 0.
          samples: positions within the batch, with a step of 1. All of them return
            `train_batch(step)`.
        """
        if len(samples) == self.batch_size:
            return self.train_batch(step)
        if not self.reads_parts:
            return slice_batch(self.train_batch(step), samples)
        data: Any = self.data
        owner = f"{self._name}.train_part({step}, {samples})"
        with as_config_error(owner):
            batch = data.train_part(step, samples)
        return self._checked(batch, owner, samples)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out data once, with float32 arrays."""
        owner = f"{self._name}.evaluation_batches()"
        with as_config_error(owner):
            batches = iter(self.data.evaluation_batches())
        for number in itertools.count():
            with as_config_error(owner):
                batch = next(batches, None)
            if batch is None:
                if number == 0:
                    raise DataError(
                        f"{owner} must yield at least one batch, got none; hold out "
                        "some samples."
                    )
                return
            yield self._checked(batch, f"Batch {number} of {owner}")

    def _checked(self, batch: Any, owner: str, samples: range | None = None) -> Batch:
        """Returns the batch, whose labels, weights and dense inputs are float32.

        Args:
          batch: return value of the data set.
          owner: name of the batch, for errors.
          samples: part of the global batch that the data has; None: all.
        """
        if not isinstance(batch, Batch):
            raise DataError(
                f"{owner} must be a tpu_embedding.tools.train.Batch, got a "
                f"{type(batch).__name__}."
            )
        is_whole = samples is None
        samples = range(self.batch_size) if samples is None else samples
        size = len(samples)
        labels = _as_floats(batch.labels, "labels", (size,), owner)
        weights = _as_floats(batch.weights, "weights", (size,), owner)
        dense = self._checked_dense(batch.dense, size, owner)
        batch = dataclasses.replace(batch, labels=labels, weights=weights, dense=dense)
        self._check_values(batch, owner, samples.start)
        # The samples of another process may have the positive weights.
        if is_whole and not batch.weights.any():
            raise DataError(
                f"{owner}: weights must be positive for at least one sample, got 0 for "
                "all."
            )
        return batch

    def _checked_dense(
        self, dense: Any, size: int, owner: str
    ) -> np.ndarray | dict[str, np.ndarray] | None:
        """Returns the dense inputs; all batches have the shapes of the first."""
        shapes = self._dense_shapes
        if shapes == "any":
            shapes = _shapes_of(dense)
        if shapes is None:
            if dense is None:
                return None
            raise DataError(
                f"{owner}: dense must be None, as in the first batch, got an array of "
                f"shape {list(np.shape(dense))}."
            )
        if not isinstance(shapes, dict):
            return _as_floats(dense, "dense", (size, *shapes), owner)
        if not isinstance(dense, Mapping) or dense.keys() != shapes.keys():
            found = sorted(dense) if isinstance(dense, Mapping) else type(dense)
            raise DataError(
                f"{owner}: dense must be a dict of {sorted(shapes)}, as in the first "
                f"batch, got {found}."
            )
        arrays = {
            name: _as_numbers(dense[name], f"dense[{name!r}]", (size, *shape), owner)
            for name, shape in shapes.items()
        }
        for name, wanted in self._dense_dtypes.items():
            if arrays[name].dtype != wanted:
                words = {"i": "integers", "f": "floats"}
                raise DataError(
                    f"{owner}: dense[{name!r}] must hold {words[wanted.kind]}, as in "
                    f"the first batch, got {words[arrays[name].dtype.kind]}; use one "
                    "type for all batches."
                )
        return arrays

    def _check_values(self, batch: Batch, owner: str, first_sample: int) -> None:
        limits = LOSSES[self._loss].label_range
        dense = batch.dense if isinstance(batch.dense, Mapping) else {"": batch.dense}
        for name, values, low, high in (
            ("labels", batch.labels, *(limits or (-np.inf, np.inf))),
            ("weights", batch.weights, 0.0, np.inf),
            *(
                (f"dense[{key!r}]" if key else "dense", array, -np.inf, np.inf)
                for key, array in dense.items()
            ),
        ):
            if values is None or values.dtype.kind == "i":
                continue
            is_wrong = ~np.isfinite(values) | (values < low) | (values > high)
            if not is_wrong.any():
                continue
            sample, *column = np.argwhere(is_wrong)[0].tolist()
            rule = "must be finite"
            if np.isfinite([low, high]).all():
                rule = f"must lie in [{low:g}, {high:g}] for the loss {self._loss!r}"
            elif np.isfinite(low):
                rule = f"must be finite and at least {low:g}"
            place = _place(batch, sample, first_sample) + "".join(
                f", column {i}" for i in column
            )
            raise DataError(
                f"{owner}: {name} {rule}, got {values[sample, *column]:g} for {place}, "
                f"and {is_wrong.sum()} such values in all."
            )


def _shapes_of(dense: Any) -> _DenseShapes:
    """Returns the shape of a sample's dense inputs; one axis unless it is a dict."""
    if dense is None:
        return None
    if isinstance(dense, Mapping):
        return {name: np.shape(array)[1:] for name, array in dense.items()}
    is_matrix = isinstance(dense, np.ndarray) and dense.ndim == 2
    return (dense.shape[1],) if is_matrix else (None,)


def _place(batch: Batch, sample: int, first_sample: int) -> str:
    """Returns a sample's number in the global batch, and its origin if it is known."""
    origin = "" if batch.origin is None else f" ({batch.origin(sample)})"
    return f"sample {first_sample + sample}{origin}"


def _as_floats(
    value: Any, name: str, shape: tuple[int | None, ...], owner: str
) -> np.ndarray:
    """Returns a field of a batch as a float32 array of a given shape; None is any."""
    return _as_array(value, name, shape, owner).astype(np.float32)


def _as_numbers(
    value: Any, name: str, shape: tuple[int | None, ...], owner: str
) -> np.ndarray:
    """Returns a field as an array of int32 if it has integers, else of float32."""
    array = _as_array(value, name, shape, owner)
    if array.dtype.kind not in "iu":
        return array.astype(np.float32)
    limits = np.iinfo(np.int32)
    if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise DataError(
            f"{owner}: {name} must fit into int32, got values from {array.min()} to "
            f"{array.max()}; pass floats, or differences."
        )
    return array.astype(np.int32)


def _as_array(
    value: Any, name: str, shape: tuple[int | None, ...], owner: str
) -> np.ndarray:
    """Returns a field of a batch as numbers of a given shape; None is any."""
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    wanted = f"{owner}: {name} must be an array of numbers of shape [{sizes}]"
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{wanted}, got rows of different lengths.") from error
    if array.dtype.kind not in "biuf":
        found = "None" if value is None else f"dtype {array.dtype}"
        raise DataError(f"{wanted}, got {found}.")
    if array.ndim != len(shape) or any(
        size not in (None, actual)
        for size, actual in zip(shape, array.shape, strict=True)
    ):
        raise DataError(f"{wanted}, got shape {list(array.shape)}.")
    return array
