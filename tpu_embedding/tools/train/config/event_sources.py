"""Data sources of histories of events, for MLPerf's `dlrm_v4` and smaller configs."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Literal

from tpu_embedding.tools.data.batch import DataError, Dataset
from tpu_embedding.tools.data.yambda.event_batches import EventBatches
from tpu_embedding.tools.data.yambda.event_dataset import (
    EventDataset,
    EventOutline,
    SyntheticEventDataset,
)
from tpu_embedding.tools.data.yambda.event_samples import (
    EventSamples,
    HistorySettings,
)
from tpu_embedding.tools.data.yambda.synthetic_yambda import SyntheticYambda
from tpu_embedding.tools.data.yambda.yambda_files import YambdaFiles, read_yambda
from tpu_embedding.tools.train.config.data_source import local_data_dir, refuse_data_dir


@dataclasses.dataclass(frozen=True, kw_only=True)
class YambdaSource:
    """Source of `EventDataset`, from Yambda's Parquet files.

    Attributes:
      table_sizes: number of rows of each table, by the names of
        `BENCHMARK_TABLE_SIZES`.
      has_dense_ids: True gives users, items, artists and albums new ids that leave no
        number out. The extracts of Yambda keep the ids of the whole log.
      history: anchors and histories; the default is that of the benchmark.
      whole_window: day that is full, as in `EventBatches`: `"first"`, as in the
        benchmark, or `"last"`, so that a whole day is held out.
    """

    table_sizes: Mapping[str, int]
    has_dense_ids: bool = False
    history: HistorySettings = dataclasses.field(default_factory=HistorySettings)
    whole_window: Literal["first", "last"] = "first"

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> EventDataset:
        """Returns the data set; the seed has no effect, as nothing is shuffled.

        Raises:
          DataError: if files are missing or damaged, or an id has no row.
        """
        del seed
        if data_dir is None:
            raise DataError(
                "This config reads Yambda's Parquet files; pass their directory: "
                "--data-dir DIRECTORY"
            )
        log = read_yambda(YambdaFiles.find(local_data_dir(data_dir)))
        if self.has_dense_ids:
            log = log.with_dense_ids()
        samples = EventSamples(log, table_sizes=self.table_sizes, settings=self.history)
        batches = EventBatches(
            samples, batch_size=batch_size, whole_window=self.whole_window
        )
        return EventDataset(samples, batches)

    def outline(self, *, batch_size: int, seed: int) -> EventOutline:
        """Returns a data set of the same sizes without reading any file."""
        del seed
        return EventOutline(
            batch_size=batch_size, table_sizes=self.table_sizes, settings=self.history
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticYambdaSource:
    """Source of `SyntheticYambda`; reads no file. The last day is held out.

    Attributes:
      table_sizes: number of rows of each table, by the names of
        `BENCHMARK_TABLE_SIZES`.
      history: anchors and histories.
      num_users: number of users.
      num_items: number of items.
      num_artists: number of artists.
      num_albums: number of albums.
      events_per_user: mean number of events of a user.
      num_days: days of the log.
    """

    table_sizes: Mapping[str, int]
    history: HistorySettings
    num_users: int = 3_000
    num_items: int = 400
    num_artists: int = 20
    num_albums: int = 40
    events_per_user: int = 130
    num_days: int = 30

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Dataset:
        """Returns the data set.

        Raises:
          DataError: if a directory is given, because the source reads no file.
        """
        refuse_data_dir(data_dir)
        log = SyntheticYambda(
            num_users=self.num_users,
            num_items=self.num_items,
            num_artists=self.num_artists,
            num_albums=self.num_albums,
            events_per_user=self.events_per_user,
            num_days=self.num_days,
            seed=seed,
        )
        samples = EventSamples(
            log.log, table_sizes=self.table_sizes, settings=self.history
        )
        batches = EventBatches(samples, batch_size=batch_size, whole_window="last")
        return SyntheticEventDataset(log, samples, batches)

    def outline(self, *, batch_size: int, seed: int) -> EventOutline:
        """Returns a data set of the same sizes, without drawing the log."""
        del seed
        return EventOutline(
            batch_size=batch_size, table_sizes=self.table_sizes, settings=self.history
        )
