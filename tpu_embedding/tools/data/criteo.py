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

from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.data.block_dataset import BlockDataset, held_out_problems
from tpu_embedding.tools.data.criteo_format import (
    CATEGORY_NAMES,
    NUM_DENSE,
    category_keys,
    dense_of_integers,
    splitmix64,
    vocabulary_problems,
    vocabulary_sizes_by_name,
)
from tpu_embedding.tools.data.criteo_lines import CriteoLines
from tpu_embedding.tools.data.teacher import (
    TEACHER_STREAM,
    Inputs,
    TeacherDataset,
    count_problems,
    random_generator,
)
from tpu_embedding.tools.data.zipf import ZipfIds

EFFECT_SCALE: Final = 0.3
"""Standard deviation of one category's or dense input's contribution to the logit."""

LOG_COUNT_MEAN: Final = 1.0
LOG_COUNT_DEVIATION: Final = 1.5
"""Parameters of the log-normal numbers whose floors are the synthetic counts.

A quarter of the counts is 0.
"""

WRITE_ROWS: Final = 4096
SAMPLE_VOCABULARY_SIZE: Final = 1_000


class Criteo(BlockDataset):
    """Criteo's click logs: the Kaggle challenge, or days of the 1TB logs.

    Features: int32 `[batch]` row ids `cat_00` to `cat_25`, hashed by
    `row_ids_of_categories`. Dense: float32 `[batch, 13]`, `log(1 + max(x, 0))`; an
    empty field counts as 0.

    Each epoch visits the blocks of `block_size` consecutive lines in a new random
    order. A batch may span two epochs, so every batch is full and every line is used
    once per epoch. Lines are validated when they are read. The files may be larger than
    memory.

    Attributes:
      batch_size: samples per batch.
      vocabulary_sizes: number of rows by feature name.
      num_train_samples: number of training lines.
      num_evaluation_samples: number of held-out lines.
    """

    def __init__(
        self,
        path: str | pathlib.Path | Sequence[str | pathlib.Path],
        *,
        batch_size: int,
        vocabulary_sizes: int | Sequence[int],
        num_evaluation_samples: int | None = None,
        evaluation_path: str | pathlib.Path | None = None,
        seed: int = 0,
        block_size: int | None = None,
    ):
        """Opens the files and indexes their lines, in one pass over each.

        Args:
          path: path of the training file, or paths of several.
          batch_size: samples per batch.
          vocabulary_sizes: rows of each of the 26 features, or one number for all. At
            least 2, because row 0 means an empty field.
          num_evaluation_samples: number of lines held out at the end of the evaluation
            file. Without an evaluation file they are the last lines of the training
            files, which are in time order. None means the whole evaluation file.
          evaluation_path: path of a separate evaluation file, or None.
          seed: seed of the training order, at least 0.
          block_size: lines that stay together when the order is shuffled. None: 64, and
            more for files of over a million such blocks.

        Raises:
          ValueError: if arguments are out of range; the message names all of them.
          DataError: if a file is missing or empty, has too few lines, or is packed by
            gzip. `train_batch` and `evaluation_batches` raise it for a damaged
            line and name file, line and field.
        """
        problems = [
            *count_problems("Criteo", batch_size=batch_size),
            *vocabulary_problems("Criteo", vocabulary_sizes),
            *held_out_problems(
                "Criteo", num_evaluation_samples, evaluation_path is not None
            ),
        ]
        if block_size is not None:
            problems += count_problems("Criteo", block_size=block_size)
        if problems:
            raise ValueError("; ".join(problems) + ".")
        self.vocabulary_sizes = vocabulary_sizes_by_name(vocabulary_sizes)

        def read(paths: Sequence[str | pathlib.Path]) -> CriteoLines:
            return CriteoLines(
                [local_path(each) for each in paths],
                vocabulary_sizes=list(self.vocabulary_sizes.values()),
                block_size=block_size,
            )

        lines = read([path] if isinstance(path, str | pathlib.Path) else path)
        super().__init__(
            lines,
            batch_size=batch_size,
            num_evaluation_samples=num_evaluation_samples,
            evaluation_reader=read([evaluation_path]) if evaluation_path else None,
            seed=seed,
            num_streams=lines.num_streams(batch_size),
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
    with local_path(path).open("w", encoding="ascii", newline="\n") as file:
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
