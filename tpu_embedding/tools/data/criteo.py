"""Criteo's click logs: 13 dense inputs and 26 categories per sample.

`scripts/criteo_to_parquet.py` converts the logs from text to Parquet. Without files,
`SyntheticCriteo` draws similar samples.
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
    """Criteo's log from Parquet files. Without files, `SyntheticCriteo` draws samples.

    The features are named `cat_00`, `cat_01` and so on. Ids from files are taken modulo
    the number of table rows.

    Attributes:
      vocabulary_size: number of table rows for each feature.
      num_evaluation_samples: number of held-out samples. They are the last samples in
        the files.
      vocabulary_sizes: number of table rows for each feature, if the numbers differ.
        `vocabulary_size` then limits each number, so that a small machine can hold the
        tables.
      valences: ids per sample for each feature. In the files, the feature's column has
        integers for valence 1, and lists of this fixed size for larger valences.
      max_valence: upper limit for synthetic valences. Defaults to unlimited.

    Example:
      >>> source = CriteoSource(vocabulary_size=1000, num_evaluation_samples=10)
      >>> batch = source.open(None, batch_size=4, seed=0).train_batch(0)
      >>> len(batch.features), batch.dense.shape
      (26, (4, 13))
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
        """Opens a log, or draws synthetic rows if `data_dir` is None.

        To open a log, pass a file that `scripts/criteo_to_parquet.py` wrote, or a
        directory with several of these files. The file names must sort by time. See
        also `DataSource.open`.

        Raises:
          DataError: if a file is missing or damaged.
        """
        if data_dir is None:
            return self.outline(batch_size=batch_size, seed=seed)
        path = required_files(data_dir, "Criteo's logs in Parquet")
        # `ParquetSource` would also reject Criteo's text, but couldn't name the
        # converter.
        if not path.match("*.parquet") and not any(path.glob("*.parquet")):
            raise DataError(
                f"{path} must be a Parquet file, or a directory of them. Convert "
                "Criteo's text once, in a clone of the repository: python "
                "scripts/criteo_to_parquet.py TEXT PARQUET"
            )
        # Not strict, because a config may have fewer than 26 features.
        columns = zip(CATEGORY_NAMES, self.sizes, self.valences, strict=False)
        features = tuple(
            ParquetFeature(
                name=name,
                vocabulary_size=size,
                expected_valence=valence if valence > 1 else None,
                # The converter writes a category's 32 bits plus 1. Most tables have too
                # few rows for such ids.
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
        """Makes synthetic rows with the same shapes as the log's rows."""
        return SyntheticCriteo(self, batch_size=batch_size, seed=seed)

    @property
    def sizes(self) -> list[int]:
        """Table rows for each feature."""
        limit = self.vocabulary_size
        sizes = self.vocabulary_sizes or [limit] * len(self.valences)
        return [min(size, limit) for size in sizes]
