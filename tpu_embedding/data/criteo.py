"""Criteo's click logs, read from Criteo's files or synthesised in the same shape.

`Criteo` reads the tab-separated files. `SyntheticCriteo` draws samples of the same
shape from a teacher model, so a model for the logs can train without the files. Both
have 13 dense inputs and the categorical features `cat_00` to `cat_25`. This package may
not redistribute the files; `write_criteo_sample` writes one to test the reader.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tpu_embedding.data.batch import Batch, DataError
from tpu_embedding.data.criteo_format import (
    CATEGORY_NAMES,
    NUM_DENSE,
    category_keys,
    dense_of_integers,
    parse_lines,
    row_ids_of_categories,
    splitmix64,
    vocabulary_problems,
    vocabulary_sizes_by_name,
)
from tpu_embedding.data.line_blocks import LineBlocks
from tpu_embedding.data.teacher import (
    TEACHER_STREAM,
    TRAIN_STREAM,
    Inputs,
    TeacherDataset,
    count_problems,
    is_int,
    random_generator,
)
from tpu_embedding.data.zipf import ZipfIds

SOURCE: Final = (
    "Criteo's logs do not come with this package: get train.txt of the Criteo Display "
    "Advertising Challenge (Kaggle), or a day_N of the Criteo 1TB Click Logs (Criteo "
    "AI Lab), and unpack it; SyntheticCriteo needs no file."
)

BLOCK_SIZE: Final = 64
"""Consecutive lines that stay together when the order is shuffled.

A block of about 15 kB costs little more to read than to seek. A batch of 2048 samples
mixes 32 places of the file.
"""

EFFECT_SCALE: Final = 0.3
"""Standard deviation of one category's or dense input's contribution to the logit."""

LOG_COUNT_MEAN: Final = 1.0
LOG_COUNT_DEVIATION: Final = 1.5
"""Parameters of the log-normal numbers whose floors are the synthetic counts.

A quarter of the counts is 0.
"""

WRITE_ROWS: Final = 4096
SAMPLE_VOCABULARY_SIZE: Final = 1_000


class Criteo:
    """One file of Criteo's click logs: the Kaggle challenge, or a day of the 1TB logs.

    Features: int32 `[batch]` row ids `cat_00` to `cat_25`, hashed by
    `row_ids_of_categories`. Dense: float32 `[batch, 13]`, `log(1 + max(x, 0))`; an
    empty field counts as 0.

    Each epoch visits the blocks of `block_size` consecutive lines in a new random
    order. A batch may span two epochs, so every batch is full and every line is used
    once per epoch. Lines are validated when they are read.

    Attributes:
      batch_size: samples per batch.
      vocabulary_sizes: number of rows by feature name.
      num_train_samples: number of training lines.
      num_evaluation_samples: number of held-out lines.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        *,
        batch_size: int,
        vocabulary_sizes: int | Sequence[int],
        num_evaluation_samples: int | None = None,
        evaluation_path: str | pathlib.Path | None = None,
        seed: int = 0,
        block_size: int = BLOCK_SIZE,
    ):
        """Maps the files and indexes their lines, in one pass over each.

        Args:
          path: path of the training file.
          batch_size: samples per batch.
          vocabulary_sizes: rows of each of the 26 features, or one number for all. At
            least 2, because row 0 means an empty field.
          num_evaluation_samples: number of lines held out at the end of the evaluation
            file. Without an evaluation file they are the last lines of the training
            file, which is in time order. None means the whole evaluation file.
          evaluation_path: path of a separate evaluation file, or None.
          seed: seed of the training order, at least 0.
          block_size: lines that stay together when the order is shuffled.

        Raises:
          ValueError: if arguments are out of range; the message names all of them.
          DataError: if a file is missing, empty or compressed, or has too few lines.
            `train_batch` and `evaluation_batches` raise it for a damaged line and name
            file, line and field.
        """
        problems = [
            *count_problems("Criteo", batch_size=batch_size, block_size=block_size),
            *vocabulary_problems("Criteo", vocabulary_sizes),
        ]
        if num_evaluation_samples is not None:
            problems += count_problems(
                "Criteo", num_evaluation_samples=num_evaluation_samples
            )
        elif evaluation_path is None:
            problems.append(
                "Criteo.num_evaluation_samples must be an int of at least 1 without "
                "an evaluation_path, got None; give the number of lines to hold out at "
                "the end of the training file"
            )
        if not is_int(seed) or seed < 0:
            problems.append(f"Criteo.seed must be an int of at least 0, got {seed!r}")
        if problems:
            raise ValueError("; ".join(problems) + ".")

        self.batch_size = batch_size
        self.vocabulary_sizes = vocabulary_sizes_by_name(vocabulary_sizes)
        self.seed = seed
        self._train = LineBlocks(
            pathlib.Path(path), block_size=block_size, source=SOURCE
        )
        self._evaluation = self._train
        if evaluation_path is not None:
            self._evaluation = LineBlocks(
                pathlib.Path(evaluation_path), block_size=block_size, source=SOURCE
            )
        self._split(num_evaluation_samples)
        self._last_order = (0, self._draw_order(0))

    def _split(self, num_evaluation_samples: int | None) -> None:
        available = self._evaluation.num_lines
        if num_evaluation_samples is None:
            num_evaluation_samples = available
        self.num_evaluation_samples = num_evaluation_samples
        self.num_train_samples = self._train.num_lines
        if self._evaluation is self._train:
            self.num_train_samples -= num_evaluation_samples
        if num_evaluation_samples > available or self.num_train_samples < 1:
            raise DataError(
                f"{self._evaluation.path} has {available} lines, too few to hold out "
                f"{num_evaluation_samples}; lower num_evaluation_samples."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of training steps that use every sample at least once."""
        return -(-self.num_train_samples // self.batch_size)

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        positions = step * self.batch_size + np.arange(self.batch_size)
        epochs, offsets = np.divmod(positions, self.num_train_samples)
        lines = np.empty(self.batch_size, np.int64)
        for epoch in range(epochs[0], epochs[-1] + 1):
            of_epoch = epochs == epoch
            lines[of_epoch] = self._lines(epoch, offsets[of_epoch])
        return self._batch(self._train, lines, np.ones(self.batch_size, np.float32))

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out lines in file order.

        Copies of the last sample, with weight 0, pad the last batch.
        """
        num_lines = self._evaluation.num_lines
        first = num_lines - self.num_evaluation_samples
        for start in range(first, num_lines, self.batch_size):
            places = start + np.arange(self.batch_size)
            weights = (places < num_lines).astype(np.float32)
            lines = np.minimum(places, num_lines - 1)
            yield self._batch(self._evaluation, lines, weights)

    def _lines(self, epoch: int, offsets: np.ndarray) -> np.ndarray:
        """Returns the line numbers, from 0, at the given offsets of an epoch."""
        last_epoch, (blocks, block_ends) = self._last_order
        if epoch != last_epoch:
            blocks, block_ends = self._draw_order(epoch)
            self._last_order = (epoch, (blocks, block_ends))
        places = np.searchsorted(block_ends, offsets, side="right")
        block_starts = np.append(0, block_ends)[places]
        return blocks[places] * self._train.block_size + offsets - block_starts

    def _draw_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the block order of an epoch and the end offset of each block."""
        block_size = self._train.block_size
        num_blocks = -(-self.num_train_samples // block_size)
        generator = random_generator(seed=self.seed, stream=TRAIN_STREAM, step=epoch)
        blocks = generator.permutation(num_blocks)
        lengths = np.minimum(self.num_train_samples - blocks * block_size, block_size)
        return blocks, np.cumsum(lengths)

    def _batch(self, file: LineBlocks, lines: np.ndarray, weights: np.ndarray) -> Batch:
        breaks = np.flatnonzero(np.diff(lines) != 1) + 1
        runs = np.split(lines, breaks)
        data = np.concatenate([file.read(run[0], run[-1] + 1) for run in runs])
        rows = parse_lines(data, lines + 1, file.path)
        sizes = np.array(list(self.vocabulary_sizes.values()))
        row_ids = np.ascontiguousarray(row_ids_of_categories(rows, sizes).T)
        return Batch(
            features=dict(zip(CATEGORY_NAMES, row_ids, strict=True)),
            dense=dense_of_integers(rows.integers),
            labels=rows.labels,
            weights=weights,
            origin=lambda sample: f"{file.path}, line {lines[sample] + 1}",
        )


class SyntheticCriteo(TeacherDataset):
    """Samples in the shape of Criteo's logs, with labels that a model can learn.

    The teacher's logit is a sum of effects of the ids and weighted dense inputs. The
    effect of each id of each feature is uniform and independent of the others. Ids
    follow `ZipfIds`; dense inputs are `log(1 + count)` of log-normal counts.

    Args:
      batch_size: samples per batch.
      vocabulary_sizes: rows of each of the 26 features, or one number for all; at
        least 2, as for `Criteo`.
      seed: seed of the teacher and of all samples, at least 0.
      zipf_exponent: skew of the ids; 0 is uniform.
      click_rate: expected mean of the labels; the default is close to the Kaggle
        file's.
      num_evaluation_samples: number of held-out samples.

    Raises:
      ValueError: if arguments are out of range; the message names all of them.

    Example:
      >>> data = SyntheticCriteo(batch_size=4, vocabulary_sizes=100)
      >>> batch = data.train_batch(0)
      >>> batch.dense.shape, batch.features["cat_25"].shape
      ((4, 13), (4,))
    """

    def __init__(
        self,
        *,
        batch_size: int,
        vocabulary_sizes: int | Sequence[int],
        seed: int = 0,
        zipf_exponent: float = 1.0,
        click_rate: float = 0.25,
        num_evaluation_samples: int = 65_536,
    ):
        self._sizes = vocabulary_sizes
        self.zipf_exponent = zipf_exponent
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            num_evaluation_samples=num_evaluation_samples,
            click_rate=click_rate,
        )
        self.vocabulary_sizes = vocabulary_sizes_by_name(vocabulary_sizes)
        self._ids = [
            ZipfIds(vocabulary_size=size, exponent=zipf_exponent)
            for size in self.vocabulary_sizes.values()
        ]
        generator = random_generator(seed=seed, stream=TEACHER_STREAM)
        self._salt = generator.integers(2**64, dtype=np.uint64)
        self._dense_weights = generator.normal(0.0, EFFECT_SCALE, NUM_DENSE)

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from vocabulary_problems("SyntheticCriteo", self._sizes)

    def _draw_inputs(self, generator: np.random.Generator, num_samples: int) -> Inputs:
        row_ids = np.stack([ids.draw(generator, num_samples) for ids in self._ids])
        counts = generator.lognormal(
            LOG_COUNT_MEAN, LOG_COUNT_DEVIATION, (num_samples, NUM_DENSE)
        ).astype(np.int64)
        dense = dense_of_integers(counts)
        # Hashes need no table of effects, so vocabularies may be large.
        hashes = splitmix64(category_keys(row_ids.T) ^ self._salt)
        effects = np.sqrt(3.0) * (hashes * 2.0**-63 - 1.0)
        return Inputs(
            features=dict(zip(CATEGORY_NAMES, row_ids, strict=True)),
            dense=dense,
            logits=EFFECT_SCALE * effects.sum(axis=1) + dense @ self._dense_weights,
        )


def write_criteo_sample(path: str | pathlib.Path, num_rows: int, seed: int = 0) -> None:
    """Writes samples of `SyntheticCriteo` in the format of Criteo's files.

    `Criteo` reads them back with the same labels and dense inputs. Id 0 of each feature
    becomes an empty field, and any other id a fixed 32-bit number. A count of 0 becomes
    "0", an empty field or "-1".

    Args:
      path: path of the file; an existing file is replaced.
      num_rows: number of lines to write, at least 1.
      seed: seed of `SyntheticCriteo`.
    """
    problems = list(count_problems("write_criteo_sample", num_rows=num_rows))
    if problems:
        raise ValueError("; ".join(problems) + ".")
    source = SyntheticCriteo(
        batch_size=WRITE_ROWS, vocabulary_sizes=SAMPLE_VOCABULARY_SIZE, seed=seed
    )
    with open(path, "w", encoding="ascii", newline="\n") as file:
        for start in range(0, num_rows, WRITE_ROWS):
            lines = _format_lines(source.train_batch(start // WRITE_ROWS))
            file.writelines(lines[: num_rows - start])


def _format_lines(batch: Batch) -> list[str]:
    assert batch.dense is not None
    labels = batch.labels.astype(np.int64).astype(str)
    counts = np.rint(np.expm1(batch.dense.astype(np.float64))).astype(np.int64)
    row_ids = np.stack([batch.features[name] for name in CATEGORY_NAMES], axis=1)
    hashes = splitmix64(category_keys(row_ids)) & np.uint64(0xFFFFFFFF)
    # The hashes choose among the spellings of 0: random, but the same in every run.
    zeros = np.array(["0", "", "-1"])[hashes[:, :NUM_DENSE] % np.uint64(3)]
    integers = np.where(counts == 0, zeros, counts.astype(str))
    digits = np.array([f"{value:08x}" for value in hashes.flat]).reshape(hashes.shape)
    categories = np.where(row_ids == 0, "", digits)
    fields = np.concatenate([labels[:, None], integers, categories], axis=1)
    return ["\t".join(line) + "\n" for line in fields]
