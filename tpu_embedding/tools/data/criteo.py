"""Criteo's click logs: 13 dense inputs and 26 categories of a sample.

`criteo_to_parquet` converts the text of the logs, once. `synthetic_criteo` draws
samples of the same shape without files.
"""

import dataclasses
import pathlib
from typing import Final

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.parquet import ParquetClicks, ParquetSource
from tpu_embedding.tools.data.parquet_rows import ParquetFeature
from tpu_embedding.tools.data.source import required_files
from tpu_embedding.tools.data.synthetic_criteo import (
    CATEGORY_NAMES,
    NUM_DENSE,
    SyntheticCriteo,
)

DENSE_NAMES: Final = tuple(f"dense_{number:02d}" for number in range(NUM_DENSE))
LABEL: Final = "label"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoSource:
    """Source of a converted log if files are given, of `SyntheticCriteo` otherwise.

    The ids of the files are taken modulo `vocabulary_size`.

    Attributes:
      vocabulary_size: table rows of each of the 26 features.
      num_evaluation_samples: number of held-out samples; the last ones of the files.
    """

    vocabulary_size: int
    num_evaluation_samples: int

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> ParquetClicks | SyntheticCriteo:
        """Returns the data set: the rows of a log, or synthetic ones without a file.

        Args:
          data_dir: a file that `criteo_to_parquet` wrote, a directory of such files in
            the order of time by name, or None.
          batch_size: samples per batch, over all devices.
          seed: seed of the order of a log's samples, or of synthetic samples.

        Raises:
          DataError: if a file is missing or damaged.
        """
        if data_dir is None:
            return self.outline(batch_size=batch_size, seed=seed)
        path = required_files(data_dir, "Criteo's logs in Parquet")
        if not path.match("*.parquet") and not any(path.glob("*.parquet")):
            raise DataError(
                f"{path} must be a Parquet file, or hold some. Convert Criteo's text "
                "once: python -m tpu_embedding.tools.data.criteo_to_parquet TEXT "
                "PARQUET"
            )
        columns = ParquetSource(
            features=tuple(
                ParquetFeature(
                    name=name,
                    vocabulary_size=self.vocabulary_size,
                    out_of_range="modulo",
                )
                for name in CATEGORY_NAMES
            ),
            dense=DENSE_NAMES,
            label=LABEL,
            num_evaluation_samples=self.num_evaluation_samples,
        )
        return columns.open(path, batch_size=batch_size, seed=seed)

    def outline(self, *, batch_size: int, seed: int) -> SyntheticCriteo:
        """Returns synthetic rows, which have the shapes of those of a log."""
        return SyntheticCriteo(
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=[self.vocabulary_size] * len(CATEGORY_NAMES),
            valences=[1] * len(CATEGORY_NAMES),
            num_evaluation_samples=self.num_evaluation_samples,
        )
