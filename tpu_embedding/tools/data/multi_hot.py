"""The multi-hot click log of MLPerf's DLRM-DCNv2, as its preprocessing writes it.

Each day N has three files: `day_N_dense.npy`, `day_N_labels.npy` and
`day_N_sparse_multi_hot.npz`. The scripts of `recommendation_v2/torchrec_dlrm` in
github.com/mlcommons/training write them, and `data/multi_hot_criteo.py` there reads
them. The dense inputs are `log(x + 3)` already; see `tsv_to_npys` of
`torchrec/datasets/criteo.py`. All arrays are mapped into memory.
"""

import dataclasses
import pathlib
import re
import struct
import zipfile
from collections.abc import Sequence
from typing import Final

import numpy as np

from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.block_dataset import BlockDataset, by_part
from tpu_embedding.tools.data.source import check_counts, required_files
from tpu_embedding.tools.data.synthetic_criteo import (
    CATEGORY_NAMES,
    NUM_DENSE,
    SyntheticCriteo,
)

BLOCK_SIZE: Final = 4096
"""Consecutive rows that stay together when the order is shuffled.

The preprocessing has shuffled the samples of all training days already.
"""


class MultiHotClicks(BlockDataset):
    """Days of the multi-hot log.

    Features: int32 `[batch]` for valence 1, otherwise int32 `[batch, valence]` without
    padding. An id beyond the vocabulary is taken modulo its size, as in the reference.
    Dense: float32 `[batch, 13]`.

    Attributes:
      vocabulary_sizes: number of rows by feature name.
      num_dense: dense inputs per sample.
    """

    vocabulary_sizes: dict[str, int]
    num_dense = NUM_DENSE


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHotClicksSource:
    """Source of `MultiHotClicks` if files are given, of `SyntheticCriteo` otherwise.

    The features are named `cat_00`, `cat_01` and so on.

    Attributes:
      vocabulary_sizes: table rows of each feature; at most 26 features.
      valences: ids per sample of each feature, which are the columns of its array.
      num_evaluation_samples: number of held-out samples.
      max_vocabulary_size: upper limit for all `vocabulary_sizes`, so that a small
        machine can hold the tables. Ids of files are taken modulo the smaller size.
        None is no limit.
      max_valence: upper limit for all `valences`: the first ids of each sample are
        read. None is no limit.
    """

    vocabulary_sizes: tuple[int, ...]
    valences: tuple[int, ...]
    num_evaluation_samples: int
    max_vocabulary_size: int | None = None
    max_valence: int | None = None

    def __post_init__(self):
        check_counts(self)
        sizes = len(self.vocabulary_sizes), len(self.valences)
        if sizes[0] != sizes[1] or sizes[0] > len(CATEGORY_NAMES):
            raise ValueError(
                "MultiHotClicksSource.vocabulary_sizes and valences must be of one "
                f"length, at most {len(CATEGORY_NAMES)}, got {sizes[0]} and {sizes[1]}."
            )

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> MultiHotClicks | SyntheticCriteo:
        """Returns the data set: the rows of the files, or synthetic ones without.

        With two days or more, the last day is held out, as in the reference: its first
        `num_evaluation_samples` rows are the held-out samples, and no row of it is
        trained on. With one day, its last rows are held out.

        Args:
          data_dir: directory of MLPerf's preprocessed files, or None.
          batch_size: samples per batch, over all devices.
          seed: seed of the order of the samples, or of synthetic samples.

        Raises:
          DataError: if a file is missing, truncated or compressed, or has another
            shape or dtype.
        """
        if data_dir is None:
            return self.outline(batch_size=batch_size, seed=seed)
        directory = required_files(
            data_dir, "MLPerf's preprocessed files day_0_dense.npy and so on"
        )
        days = [_Day.open(prefix, self.valences) for prefix in _find_days(directory)]
        held_out, num_held_out = None, self.num_evaluation_samples
        if len(days) > 1:
            last = days.pop()
            held_out = _Rows([last], self._sizes, self._valences, num_held_out)
            num_held_out = None
        data = MultiHotClicks(
            _Rows(days, self._sizes, self._valences),
            batch_size=batch_size,
            num_evaluation_samples=num_held_out,
            evaluation_reader=held_out,
            seed=seed,
        )
        data.vocabulary_sizes = dict(zip(CATEGORY_NAMES, self._sizes, strict=False))
        return data

    def outline(self, *, batch_size: int, seed: int) -> SyntheticCriteo:
        """Returns synthetic rows, which have the shapes of those of the files."""
        return SyntheticCriteo(
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=self._sizes,
            valences=self._valences,
            num_evaluation_samples=self.num_evaluation_samples,
        )

    @property
    def _sizes(self) -> list[int]:
        return _limited(self.vocabulary_sizes, self.max_vocabulary_size)

    @property
    def _valences(self) -> list[int]:
        return _limited(self.valences, self.max_valence)


@dataclasses.dataclass(frozen=True)
class _Day:
    """The mapped arrays of a day: of dense inputs, labels, and ids of each feature."""

    prefix: str
    dense: np.ndarray
    labels: np.ndarray
    ids: list[np.ndarray]

    @classmethod
    def open(cls, prefix: str, valences: Sequence[int]) -> "_Day":
        """Maps the files of a day, and checks shapes and dtypes."""
        dense, labels = (
            _map_npy(f"{prefix}_dense.npy"),
            _map_npy(f"{prefix}_labels.npy"),
        )
        by_name = map_npz(pathlib.Path(f"{prefix}_sparse_multi_hot.npz"))
        ids = [by_name[name] for name in sorted(by_name, key=int)]
        if len(ids) != len(valences):
            raise DataError(
                f"{prefix}_sparse_multi_hot.npz must have an array for each of "
                f"{len(valences)} features, got {len(ids)}."
            )
        expected = [("dense", dense, "f", NUM_DENSE), ("labels", labels, "iuf", 1)]
        expected += [
            (f"sparse_multi_hot array {number}", array, "iu", valence)
            for number, (array, valence) in enumerate(zip(ids, valences, strict=True))
        ]
        for name, array, kinds, width in expected:
            if array.shape != (len(dense), width) or array.dtype.kind not in kinds:
                raise DataError(
                    f"{prefix}_{name} must have the shape [{len(dense)}, {width}] and "
                    f"a dtype of a kind in {kinds!r}, got {list(array.shape)} of "
                    f"{array.dtype}."
                )
        return cls(prefix, dense, labels, ids)


class _Rows:
    """A `SampleReader` of the rows of some days, or of the first ones of a day."""

    def __init__(
        self,
        days: Sequence[_Day],
        sizes: Sequence[int],
        valences: Sequence[int],
        num_rows: int | None = None,
    ):
        self._days = days
        self._features = list(zip(CATEGORY_NAMES, sizes, valences, strict=False))
        counts = [len(day.dense[:num_rows]) for day in days]
        self._starts = np.cumsum([0, *counts[:-1]])
        # No block spans two days.
        blocks = [
            np.arange(start, start + count, BLOCK_SIZE)
            for start, count in zip(self._starts, counts, strict=True)
        ]
        self.block_bounds = np.append(np.concatenate(blocks), sum(counts))

    def read(self, samples: np.ndarray) -> Batch:
        parts = [(self._days[i], rows) for i, rows in by_part(samples, self._starts)]
        features = {}
        for number, (name, size, valence) in enumerate(self._features):
            ids = [day.ids[number][rows, :valence] for day, rows in parts]
            ids = (np.concatenate(ids) % size).astype(np.int32, copy=False)
            features[name] = ids if valence > 1 else ids[:, 0]
        return Batch(
            features=features,
            dense=np.concatenate([day.dense[rows] for day, rows in parts]),
            labels=np.concatenate([day.labels[rows, 0] for day, rows in parts]),
            weights=np.ones(len(samples), np.float32),
        )

    def __str__(self) -> str:
        return self._days[-1].prefix


def map_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Maps the arrays of a `.npz` file into memory, which NumPy does for `.npy` only.

    Args:
      path: path of a file that `numpy.savez` wrote.

    Returns:
      Read-only arrays by name.

    Raises:
      DataError: if the file is missing, damaged or compressed.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(
                        "its arrays are compressed; write it by numpy.savez"
                    )
                # PKWARE's APPNOTE.TXT, section 4.3.7: a local header of 30 bytes ends
                # with the lengths of a name and an extra field, which follow it.
                file.seek(member.header_offset + 26)
                file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
                np.lib.format.read_magic(file)
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
                arrays[member.filename.removesuffix(".npy")] = np.memmap(
                    path, dtype, "r", file.tell(), shape, "F" if is_fortran else "C"
                )
    except (OSError, ValueError, struct.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be mapped: {error}.") from error
    return arrays


def _map_npy(path: str) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} is missing or no whole .npy file: {error}.") from error


def _find_days(directory: pathlib.Path) -> list[str]:
    """Returns the paths of the days without their endings, in the order of numbers."""
    pattern = re.compile(r"day_(\d+)_dense\.npy")
    found = [pattern.fullmatch(path.name) for path in directory.iterdir()]
    numbers = sorted(int(match[1]) for match in found if match)
    if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise DataError(
            f"{directory} must hold day_N_dense.npy of consecutive days, got days "
            f"{numbers}. Preprocess Criteo's 1TB log as the README of "
            "recommendation_v2/torchrec_dlrm in github.com/mlcommons/training says."
        )
    return [str(directory / f"day_{number}") for number in numbers]


def _limited(values: Sequence[int], limit: int | None) -> list[int]:
    return [value if limit is None else min(value, limit) for value in values]
