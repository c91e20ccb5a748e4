"""Criteo's click logs: 13 dense inputs and 26 categories per sample.

`scripts/criteo_to_parquet.py` converts the text of the logs to Parquet files.
`SyntheticCriteo` draws samples of the same shape without files.
"""

import dataclasses
import pathlib
from typing import Final

from tpu_embedding.tools.data.batch import DataError, check_counts, required_files
from tpu_embedding.tools.data.parquet import (
    ParquetClicks,
    ParquetFeature,
    ParquetSource,
)
from tpu_embedding.tools.data.synthetic_clicks import (
    CATEGORY_NAMES,
    NUM_DENSE,
    SyntheticCriteo,
)

DENSE_NAMES: Final = tuple(f"dense_{number:02d}" for number in range(NUM_DENSE))
LABEL: Final = "label"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoSource:
    """Source of a log in Parquet files, or of `SyntheticCriteo` without files.

    The features are named `cat_00`, `cat_01` and so on. Ids from files are taken modulo
    their table's number of rows.

    Attributes:
      vocabulary_size: number of table rows of each feature.
      num_evaluation_samples: number of held-out samples, the last ones of the files.
      vocabulary_sizes: number of table rows of each feature, if they differ.
        `vocabulary_size` is then an upper limit, so that a small machine can hold the
        tables.
      valences: number of ids per sample for each feature. In files, a column contains
        integers for a valence of 1, and lists of a fixed size for larger valences.
      max_valence: upper limit of synthetic samples' valences, or None.
    """

    vocabulary_size: int
    num_evaluation_samples: int
    vocabulary_sizes: tuple[int, ...] = ()
    valences: tuple[int, ...] = (1,) * len(CATEGORY_NAMES)
    max_valence: int | None = None

    def __post_init__(self):
        check_counts(self)

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> ParquetClicks | SyntheticCriteo:
        """Returns the data set: rows of a log, or synthetic rows if `data_dir` is None.

        `data_dir` is a file that `scripts/criteo_to_parquet.py` wrote, a directory of
        such files whose names sort by time, or None. See also `DataSource.open`.

        Raises:
          DataError: if a file is missing or damaged.
        """
        if data_dir is None:
            return self.outline(batch_size=batch_size, seed=seed)
        path = required_files(data_dir, "Criteo's logs in Parquet")
        if not path.match("*.parquet") and not any(path.glob("*.parquet")):
            raise DataError(
                f"{path} must be a Parquet file, or a directory of them. Convert "
                "Criteo's text once, in a clone of the repository: python "
                "scripts/criteo_to_parquet.py TEXT PARQUET"
            )
        columns = zip(CATEGORY_NAMES, self.sizes, self.valences, strict=False)
        features = tuple(
            ParquetFeature(
                name=name,
                vocabulary_size=size,
                expected_valence=valence if valence > 1 else None,
                out_of_range="modulo",
            )
            for name, size, valence in columns
        )
        source = ParquetSource(
            features=features,
            dense=DENSE_NAMES,
            label=LABEL,
            num_evaluation_samples=self.num_evaluation_samples,
        )
        return source.open(path, batch_size=batch_size, seed=seed)

    def outline(self, *, batch_size: int, seed: int) -> SyntheticCriteo:
        """Returns synthetic rows with the shapes of a log's rows."""
        return SyntheticCriteo(self, batch_size=batch_size, seed=seed)

    @property
    def sizes(self) -> list[int]:
        """Number of table rows of each feature."""
        limit = self.vocabulary_size
        sizes = self.vocabulary_sizes or [limit] * len(self.valences)
        return [min(size, limit) for size in sizes]
