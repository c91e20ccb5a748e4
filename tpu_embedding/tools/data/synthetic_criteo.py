"""Synthetic click log in the shape of Criteo's, one-hot or multi-hot.

The configs `dlrm` and `dlrm_dcnv2` train on it without files. Memory does not grow with
the vocabularies: a feature of 40 million rows costs no more than one of 40. Criteo's
files may not be redistributed, so `write_criteo_sample` writes one to test the reader.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tpu_embedding.field_checks import raise_all
from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.argument_checks import count_problems
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.data.criteo_format import (
    CATEGORY_NAMES,
    NUM_CATEGORIES,
    NUM_DENSE,
    category_keys,
    dense_of_integers,
    size_problems,
    splitmix64,
)
from tpu_embedding.tools.data.random_streams import TEACHER_STREAM, random_generator
from tpu_embedding.tools.data.teacher import Inputs, TeacherDataset

EFFECT_SCALE: Final = 0.3
"""Standard deviation of one feature's or dense input's contribution to the logit."""

LOG_COUNT_MEAN: Final = 1.0
LOG_COUNT_DEVIATION: Final = 1.5
"""Parameters of the log-normal numbers whose floors are the synthetic counts.

A quarter of the counts is 0.
"""

WRITE_ROWS: Final = 4096
SAMPLE_VOCABULARY_SIZE: Final = 1_000


class SyntheticCriteo(TeacherDataset):
    """Samples in the shape of Criteo's logs, with labels that a model can learn.

    The teacher's logit of a sample is

        b + 0.3 * sum over features f of sum_j e_f(id_fj) / sqrt(valence_f)
          + sum over dense inputs k of w_k x_k

    where `e_f(id)` is a hash of feature and id, uniform with mean 0 and standard
    deviation 1. The weights `w_k` are normal with standard deviation 0.3. Ids follow
    `ZipfIds`, independently of each other. Dense inputs are `log(1 + count)` of
    log-normal counts.

    Features: int32 `[batch]` for valence 1, otherwise int32 `[batch, valence]` without
    padding. Dense: float32 `[batch, 13]`.

    Args:
      batch_size: samples per batch.
      vocabulary_sizes: rows of each feature, `cat_00` and so on, or one number for all
        26; at least 2, as for `Criteo`.
      valences: ids per sample of each feature, or one number for all.
      seed: seed of the teacher and of all samples, at least 0.
      zipf_exponent: skew of the ids; 0 is uniform.
      click_rate: expected mean of the labels; the default is close to the Kaggle
        file's.
      num_evaluation_samples: number of held-out samples.

    Raises:
      ValueError: if arguments are out of range; the message names all of them.

    Example:
      >>> data = SyntheticCriteo(
      ...     batch_size=4, vocabulary_sizes=[2_000_000_000, 3], valences=[5, 1]
      ... )
      >>> batch = data.train_batch(0)
      >>> batch.dense.shape, [ids.shape for ids in batch.features.values()]
      ((4, 13), [(4, 5), (4,)])
    """

    num_dense = NUM_DENSE

    def __init__(
        self,
        *,
        batch_size: int,
        vocabulary_sizes: int | Sequence[int],
        valences: int | Sequence[int] = 1,
        seed: int = 0,
        zipf_exponent: float = 1.0,
        click_rate: float = 0.25,
        num_evaluation_samples: int = 65_536,
    ):
        if not isinstance(vocabulary_sizes, Sequence):
            vocabulary_sizes = [vocabulary_sizes] * NUM_CATEGORIES
        if not isinstance(valences, Sequence):
            valences = [valences] * len(vocabulary_sizes)
        self._num_features = (len(vocabulary_sizes), len(valences))
        self.valences = dict(zip(CATEGORY_NAMES, valences, strict=False))
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            num_evaluation_samples=num_evaluation_samples,
            vocabulary_sizes=dict(zip(CATEGORY_NAMES, vocabulary_sizes, strict=False)),
            zipf_exponent=zipf_exponent,
            click_rate=click_rate,
        )
        generator = random_generator(seed=seed, stream=TEACHER_STREAM)
        self._salt = generator.integers(2**64, dtype=np.uint64)
        self._dense_weights = generator.normal(0.0, EFFECT_SCALE, NUM_DENSE)

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        num_sizes, num_valences = self._num_features
        if num_sizes != num_valences or num_sizes > NUM_CATEGORIES:
            yield (
                "SyntheticCriteo.vocabulary_sizes and valences must be of one length, "
                f"at most {NUM_CATEGORIES}, got {num_sizes} and {num_valences}"
            )
        yield from size_problems("SyntheticCriteo", self.vocabulary_sizes.values())
        for name, valence in self.valences.items():
            yield from count_problems(
                "SyntheticCriteo", **{f"valences[{name!r}]": valence}
            )

    def _draw_inputs(self, generator: np.random.Generator, num_samples: int) -> Inputs:
        features, logits = {}, np.zeros(num_samples)
        for number, (name, ids) in enumerate(self._ids.items()):
            valence = self.valences[name]
            drawn = ids.draw(generator, (num_samples, valence))
            # Hashes need no table of effects, so vocabularies may be large.
            hashes = splitmix64(category_keys(drawn, number) ^ self._salt)
            # A uniform number in [-1, 1) has the standard deviation 1 / sqrt(3).
            effects = np.sqrt(3.0 / valence) * (hashes * 2.0**-63 - 1.0)
            logits += EFFECT_SCALE * effects.sum(axis=1)
            features[name] = drawn if valence > 1 else drawn[:, 0]
        counts = generator.lognormal(
            LOG_COUNT_MEAN, LOG_COUNT_DEVIATION, (num_samples, NUM_DENSE)
        ).astype(np.int64)
        dense = dense_of_integers(counts)
        return Inputs(
            features=features, dense=dense, logits=logits + dense @ self._dense_weights
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
    raise_all(list(count_problems("write_criteo_sample", num_rows=num_rows)))
    source = SyntheticCriteo(
        batch_size=WRITE_ROWS, vocabulary_sizes=SAMPLE_VOCABULARY_SIZE, seed=seed
    )
    with local_path(path).open("w", encoding="ascii", newline="\n") as file:
        for start in range(0, num_rows, WRITE_ROWS):
            lines = _format_lines(source.train_batch(start // WRITE_ROWS))
            file.writelines(lines[: num_rows - start])


def _format_lines(batch: Batch) -> list[str]:
    assert isinstance(batch.dense, np.ndarray)
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
