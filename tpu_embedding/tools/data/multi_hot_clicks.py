"""The multi-hot click log of MLPerf's DLRM-DCNv2, as its preprocessing writes it.

Each day N has three files: `day_N_dense.npy`, `day_N_labels.npy` and
`day_N_sparse_multi_hot.npz`. The scripts of `recommendation_v2/torchrec_dlrm` in
github.com/mlcommons/training write them, and `data/multi_hot_criteo.py` there reads
them. The dense inputs are `log(x + 3)` already; see `tsv_to_npys` of
`torchrec/datasets/criteo.py`.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tpu_embedding.field_checks import raise_all
from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.argument_checks import count_problems
from tpu_embedding.tools.data.array_files import MappedArray, open_npy, open_npz
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.block_dataset import BlockDataset
from tpu_embedding.tools.data.block_order import block_bounds, by_part, runs_of
from tpu_embedding.tools.data.criteo_format import NUM_DENSE
from tpu_embedding.tools.data.criteo_lines import find_days
from tpu_embedding.tools.data.digests import join_digests

BLOCK_SIZE: Final = 4096
"""Consecutive rows that stay together when the order is shuffled.

The preprocessing has shuffled the samples of all training days already. A block is 16
kB of a one-hot feature, and a batch of 65,536 samples mixes 16 of them.
"""

SOURCE: Final = (
    "Preprocess Criteo's 1TB log as the README of recommendation_v2/torchrec_dlrm in "
    "github.com/mlcommons/training says; it writes day_0_dense.npy and so on."
)


class MultiHotClicks(BlockDataset):
    """Days of the multi-hot log, whose arrays are mapped into memory.

    Features: int32 `[batch]` for valence 1, otherwise int32 `[batch, valence]` without
    padding. An id beyond the vocabulary is taken modulo its size, as in the reference.
    Dense: float32 `[batch, 13]`.

    With two days or more, the last day is held out, as in the reference: its first
    `num_evaluation_samples` rows are the held-out samples, and no row of it is trained
    on. With one day, its last rows are held out.

    Attributes:
      batch_size: samples per batch.
      vocabulary_sizes: number of rows by feature name.
      valences: ids per sample by feature name.
      num_dense: dense inputs per sample.
      num_train_samples: number of training rows.
      num_evaluation_samples: number of held-out rows.
    """

    num_dense = NUM_DENSE

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        batch_size: int,
        vocabulary_sizes: Mapping[str, int],
        valences: Mapping[str, int],
        num_evaluation_samples: int,
        max_valence: int | None = None,
        seed: int = 0,
        block_size: int = BLOCK_SIZE,
    ):
        """Maps the files and checks their headers.

        Args:
          directory: directory of the files, whose days are consecutive.
          batch_size: samples per batch.
          vocabulary_sizes: number of rows by feature name, in the order of the arrays
            `"0"`, `"1"` and so on.
          valences: columns of these arrays, for the same features.
          num_evaluation_samples: number of held-out samples.
          max_valence: ids per sample that are read of each feature; None reads all.
          seed: seed of the training order, at least 0.
          block_size: rows that stay together when the order is shuffled.

        Raises:
          ValueError: if arguments are out of range.
          DataError: if a file is missing, truncated or compressed, or has another
            shape or dtype.
        """
        problems = list(
            count_problems(
                "MultiHotClicks",
                block_size=block_size,
                num_evaluation_samples=num_evaluation_samples,
            )
        )
        raise_all(problems)
        self.vocabulary_sizes = dict(vocabulary_sizes)
        self.valences = {
            name: min(valence, max_valence or valence)
            for name, valence in valences.items()
        }
        days = [
            _Day(path, list(valences.values()))
            for path in _find_days(local_path(directory))
        ]
        has_last_day = len(days) > 1
        super().__init__(
            self._rows(days[:-1] if has_last_day else days, block_size),
            batch_size=batch_size,
            num_evaluation_samples=None if has_last_day else num_evaluation_samples,
            evaluation_reader=(
                self._rows(days[-1:], block_size, num_evaluation_samples)
                if has_last_day
                else None
            ),
            seed=seed,
        )

    def _rows(
        self,
        days: Sequence["_Day"],
        block_size: int,
        num_rows: int | None = None,
    ) -> "_Rows":
        return _Rows(days, self.vocabulary_sizes, self.valences, block_size, num_rows)


class _Day:
    """The three files of a day, whose headers are checked."""

    def __init__(self, dense_path: pathlib.Path, valences: Sequence[int]):
        self.path = dense_path.with_name(dense_path.name.removesuffix("_dense.npy"))
        self.dense = _expected(open_npy(dense_path), "f", (None, NUM_DENSE))
        self.num_rows = self.dense.shape[0]
        of_day = f"as many rows as {dense_path.name}"
        self.labels = _expected(
            open_npy(pathlib.Path(f"{self.path}_labels.npy")),
            "iuf",
            (self.num_rows, 1),
            of_day,
        )
        path = pathlib.Path(f"{self.path}_sparse_multi_hot.npz")
        arrays = open_npz(path)
        names = [str(number) for number in range(len(valences))]
        if sorted(arrays) != sorted(names):
            missing = sorted(set(names) - set(arrays), key=int)
            extra = sorted(set(arrays) - set(names))
            raise DataError(
                f"{path} must hold the arrays '0' to '{names[-1]}', got "
                f"{len(arrays)}: without {missing} and with {extra} besides."
            )
        self.ids = [
            _expected(arrays[name], "iu", (self.num_rows, valence), of_day)
            for name, valence in zip(names, valences, strict=True)
        ]


class _Rows:
    """A `SampleReader` of the rows of some days.

    Attributes:
      block_bounds: first row of each block, and the number of rows.
      digest: digest of pieces of the files, which are not read as a whole.
    """

    def __init__(
        self,
        days: Sequence[_Day],
        vocabulary_sizes: Mapping[str, int],
        valences: Mapping[str, int],
        block_size: int,
        num_rows: int | None,
    ):
        self._days = days
        self._vocabulary_sizes = vocabulary_sizes
        self._valences = valences
        counts = [day.num_rows for day in days]
        if num_rows is not None:
            if num_rows > counts[0]:
                raise DataError(
                    f"{days[0].path} has {counts[0]} rows, too few to hold out "
                    f"{num_rows}; lower num_evaluation_samples."
                )
            counts = [num_rows]
        self.block_bounds = block_bounds(counts, block_size)
        self._starts = np.cumsum([0, *counts[:-1]])
        self.digest = join_digests(
            array.file.sample_digest()
            for day in days
            for array in (day.dense, day.labels, day.ids[0])
        )

    def read(self, samples: np.ndarray) -> Batch:
        parts = [
            (self._days[number], runs_of(rows))
            for number, _, rows in by_part(samples, self._starts)
        ]
        return Batch(
            features={
                name: self._read_ids(parts, number, name)
                for number, name in enumerate(self._vocabulary_sizes)
            },
            dense=np.concatenate([day.dense.take(runs) for day, runs in parts]),
            labels=np.concatenate([day.labels.take(runs)[:, 0] for day, runs in parts]),
            weights=np.ones(len(samples), np.float32),
            origin=lambda sample: self._place(int(samples[sample])),
        )

    def _read_ids(
        self, parts: Sequence[tuple[_Day, list[slice]]], number: int, name: str
    ) -> np.ndarray:
        size, valence = self._vocabulary_sizes[name], self._valences[name]
        taken = [day.ids[number].take(runs)[:, :valence] for day, runs in parts]
        for ids, (day, runs) in zip(taken, parts, strict=True):
            if ids.min() < 0:
                sample, column = np.argwhere(ids < 0)[0]
                rows = np.concatenate([np.arange(r.start, r.stop) for r in runs])
                raise DataError(
                    f"{day.ids[number].name}, row {rows[sample]}, column {column}: an "
                    f"id must not be negative, got {ids[sample, column]} for the "
                    f"feature {name!r}."
                )
        ids = np.concatenate(taken)
        if ids.max() >= size:
            ids = ids % size
        ids = ids.astype(np.int32, copy=False)
        return ids if valence > 1 else ids[:, 0]

    def _place(self, sample: int) -> str:
        number = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return f"{self._days[number].path}_*, row {sample - self._starts[number]}"

    def __str__(self) -> str:
        return str(self._days[-1].path)


def _find_days(directory: pathlib.Path) -> list[pathlib.Path]:
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory. {SOURCE}")
    days = find_days(directory, r"day_(\d+)_dense\.npy")
    if not days:
        raise DataError(f"{directory} holds no day_0_dense.npy. {SOURCE}")
    return days


def _expected(
    array: MappedArray,
    kinds: str,
    shape: tuple[int | None, ...],
    why: str = "the dense inputs of Criteo's log",
) -> MappedArray:
    """Refuses an array of another kind of dtype, or another shape."""
    kind = {"f": "floating-point", "iu": "integer"}.get(kinds, "number")
    if array.dtype.kind not in kinds:
        raise DataError(f"{array.name} must have a {kind} dtype, got {array.dtype}.")
    fits = len(array.shape) == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise DataError(
            f"{array.name} must have the shape [{sizes}] ({why}), got "
            f"{list(array.shape)}."
        )
    return array
