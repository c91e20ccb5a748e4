"""Reads Yambda's flat Parquet files, by pyarrow.

Yambda is a public log of a music service (`yandex/yambda` at Hugging Face, Apache-2.0).
An event is a row of `multi_event.parquet`. Two further files map an item to its artist
and its album.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.parquet_rows import RowGroup, load_pyarrow, row_groups
from tpu_embedding.tools.data.source import required_files
from tpu_embedding.tools.data.yambda.event_dataset import EventDataset, EventSource
from tpu_embedding.tools.data.yambda.event_log import EVENT_TYPES, MAX_ID, EventLog

EVENT_FILES: Final = "multi_event*.parquet"
ARTIST_FILE: Final = "artist_item_mapping.parquet"
ALBUM_FILE: Final = "album_item_mapping.parquet"

NUM_PARENTS: Final = 2
"""Folders above the events in which the maps may lie: `flat/50m/` has the events."""

EVENT_COLUMNS: Final = (
    *("uid", "timestamp", "item_id"),
    *("event_type", "is_organic", "played_ratio_pct"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YambdaSource(EventSource):
    """Source of `EventDataset`, from Yambda's Parquet files."""

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> EventDataset:
        """Returns the data set; the seed has no effect, as nothing is shuffled.

        Raises:
          DataError: if files are missing or damaged, or an id has no row.
        """
        del seed
        log = read_yambda(required_files(data_dir, "Yambda's Parquet files"))
        return EventDataset(log, self, batch_size=batch_size)


def read_yambda(directory: pathlib.Path) -> EventLog:
    """Returns the training events of a log in files.

    All events are read into memory and sorted there, in about 70 bytes each. The result
    has 14 bytes per event. Types of events are the words of `EVENT_TYPES`, or their
    numbers. A played ratio that is null or NaN counts as 0. If a map has several rows
    of an item, the last one counts. Items without one have the artist or album 0.

    Args:
      directory: directory of the events. The maps are there, or in one of the two
        folders above, as in the published data.

    Raises:
      DataError: if a file is missing, damaged, or has a wrong column or value; the
        message names file and column. Or if pyarrow is not installed.
    """
    events = sorted(directory.glob(EVENT_FILES))
    if not events:
        raise DataError(
            f"{directory} must hold a file {EVENT_FILES!r}, got none; pass the "
            "directory of Yambda's flat files, such as flat/50m."
        )
    return EventLog.of_columns(
        _read_columns(events, EVENT_COLUMNS),
        item_artists=_read_item_map(directory, ARTIST_FILE, "artist_id"),
        item_albums=_read_item_map(directory, ALBUM_FILE, "album_id"),
        name=str(events[0]),
    )


def _read_item_map(directory: pathlib.Path, name: str, column: str) -> np.ndarray:
    """Returns a value for each item, int32 `[items]`; 0 for items without a row."""
    folders = [directory, *directory.absolute().parents[:NUM_PARENTS]]
    paths = [folder / name for folder in folders if (folder / name).is_file()]
    if not paths:
        raise DataError(
            f"{directory} must hold {name!r}, or one of the {NUM_PARENTS} folders "
            "above; fetch it from the data set."
        )
    columns = _read_columns(paths[:1], ("item_id", column))
    by_item = np.zeros(columns["item_id"].max(initial=-1) + 1, np.int32)
    by_item[columns["item_id"]] = columns[column]
    return by_item


def _read_columns(
    paths: Sequence[pathlib.Path], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Returns columns of all rows of files, in the order of the rows."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for path in paths:
        for group in row_groups(path, names):
            for name, array in group.read(names).items():
                parts[name].append(_convert(array, name, group))
    return {
        name: np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
        for name, arrays in parts.items()
    }


def _convert(array: Any, name: str, group: RowGroup) -> np.ndarray:
    """Returns int32 ids, times, types and flags, or played ratios."""
    if name == "played_ratio_pct":
        return group.numbers(array.fill_null(0), name).astype(np.float32)
    if name == "event_type" and not str(array.type).lstrip("u").startswith("int"):
        array = _numbers_of_words(array, group)
    values = group.numbers(array, name)
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > MAX_ID:
        rule = f"values must be integers in [0, {MAX_ID}]"
        row = int(np.argmax((values < 0) | (values > MAX_ID)))
        raise group.error(name, row, f"{rule}, got {values[row]} of {values.dtype}")
    return values.astype(np.int32)


def _numbers_of_words(words: Any, group: RowGroup) -> Any:
    """Returns the numbers of the words of `EVENT_TYPES`."""
    pa, compute = load_pyarrow("pyarrow"), load_pyarrow("pyarrow.compute")
    words = words.cast(pa.string())
    numbers = compute.index_in(words, value_set=pa.array(EVENT_TYPES))
    if numbers.null_count:
        row = int(np.argmax(numbers.is_null().to_numpy(zero_copy_only=False)))
        text = f"a type must be one of {', '.join(EVENT_TYPES)}, got {words[row]}"
        raise group.error("event_type", row, text)
    return numbers
