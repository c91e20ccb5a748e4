"""The log of a music service, Yambda: events of users, sorted by user and time.

Yambda (`yandex/yambda` at Hugging Face, Apache-2.0) has Parquet files, which pyarrow
reads. An event is a row of `multi_event.parquet`. Two further files map an item to its
artist and its album.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

import tpu_embedding as te
from tpu_embedding.tools import train

SECONDS_PER_HOUR: Final = 3_600
SECONDS_PER_DAY: Final = 86_400
NUM_TRAIN_DAYS: Final = 300
GAP_SECONDS: Final = 1_800
"""Time between the training period and the test day, so that no session spans both."""

LISTENED: Final = 1
LIKED: Final = 2
SKIPPED: Final = 4
"""Bits of an action. A skip is a listen to less than `MIN_LISTENED_PERCENT`."""

ACTIONS: Final = (LISTENED, LIKED, SKIPPED)
MIN_LISTENED_PERCENT: Final = 50

EVENT_TYPES: Final = ("listen", "like", "dislike", "unlike", "undislike")
"""Types of events; the number of a type is its place."""

MAX_ID: Final = te.inputs.PADDING_ROW_ID - 1
"""Largest id of a user, item, artist or album, and largest time: all are int32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventLog:
    """Training events of all users, sorted by user and time, in 14 bytes per event.

    Attributes:
      users: int32 `[events]`, rising.
      times: int32 `[events]`, in seconds.
      items: int32 `[events]`.
      actions: uint8 `[events]`: `LISTENED`, `LIKED`, `SKIPPED`, or 0 for any other
        event.
      is_organic: uint8 `[events]`, 1 if the user found the item without a
        recommendation.
      item_artists: int32 `[items]`, the artist of each item; 0 is unknown.
      item_albums: int32 `[items]`, the album of each item; 0 is unknown.
      name: where the events are from, for errors.
    """

    users: np.ndarray
    times: np.ndarray
    items: np.ndarray
    actions: np.ndarray
    is_organic: np.ndarray
    item_artists: np.ndarray
    item_albums: np.ndarray
    name: str

    @classmethod
    def of_columns(
        cls,
        columns: Mapping[str, np.ndarray],
        *,
        item_artists: np.ndarray,
        item_albums: np.ndarray,
        name: str,
    ) -> "EventLog":
        """Returns the events of the training period, sorted by user and time.

        The sort is stable: events of one user at one time keep their order in the
        columns. The benchmark leaves this order open, so its prepared files can differ.

        Args:
          columns: events of all times, by the names of Yambda's columns `"uid"`,
            `"timestamp"`, `"item_id"`, `"event_type"` (numbers), `"is_organic"` and
            `"played_ratio_pct"`.
          item_artists: artist of each item; items past its end have the artist 0.
          item_albums: album of each item; items past its end have the album 0.
          name: where the events are from, for errors.

        Raises:
          DataError: if no event is in the training period.
        """
        kept = np.flatnonzero(in_training_period(columns["timestamp"]))
        if not len(kept):
            raise train.DataError(
                f"{name} must have an event in the {NUM_TRAIN_DAYS} days that end one "
                f"day and {GAP_SECONDS // 60} minutes before the last event, got none; "
                "pass events of two days or more."
            )
        kept = kept[np.lexsort((columns["timestamp"][kept], columns["uid"][kept]))]
        items = columns["item_id"][kept].astype(np.int32)
        num_items = max(len(item_artists), len(item_albums), int(items.max()) + 1)
        artists, albums = (
            np.pad(of_item.astype(np.int32), (0, num_items - len(of_item)))
            for of_item in (item_artists, item_albums)
        )
        return cls(
            users=columns["uid"][kept].astype(np.int32),
            times=columns["timestamp"][kept].astype(np.int32),
            items=items,
            actions=_actions(columns)[kept],
            is_organic=columns["is_organic"][kept].astype(np.uint8),
            item_artists=artists,
            item_albums=albums,
            name=name,
        )


def in_training_period(times: np.ndarray) -> np.ndarray:
    """Returns True for times in the benchmark's training period, given all times.

    The last day is the benchmark's test day, which its runs do not use.
    """
    stop = int(times.max(initial=0)) - SECONDS_PER_DAY - GAP_SECONDS
    return (times >= stop - NUM_TRAIN_DAYS * SECONDS_PER_DAY) & (times < stop)


def _actions(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the uint8 actions of events, from their types and played ratios."""
    types, ratios = columns["event_type"], columns["played_ratio_pct"]
    # NaN is not larger than any number, so it counts as 0.
    listens = np.where(ratios >= MIN_LISTENED_PERCENT, LISTENED, SKIPPED)
    likes = np.where(types == EVENT_TYPES.index("like"), LIKED, 0)
    is_listen = types == EVENT_TYPES.index("listen")
    return np.where(is_listen, listens, likes).astype(np.uint8)


EVENT_FILES: Final = "multi_event*.parquet"
ARTIST_FILE: Final = "artist_item_mapping.parquet"
ALBUM_FILE: Final = "album_item_mapping.parquet"

NUM_PARENTS: Final = 2
"""Folders above the events that may hold the maps: `flat/50m/` has the events."""

EVENT_COLUMNS: Final = (
    *("uid", "timestamp", "item_id"),
    *("event_type", "is_organic", "played_ratio_pct"),
)


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
        raise train.DataError(
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
        raise train.DataError(
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
        for group in train.row_groups(path, names):
            for name, array in group.read(names).items():
                parts[name].append(_convert(array, name, group))
    return {
        name: np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
        for name, arrays in parts.items()
    }


def _convert(array: Any, name: str, group: train.RowGroup) -> np.ndarray:
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


def _numbers_of_words(words: Any, group: train.RowGroup) -> Any:
    """Returns the numbers of the words of `EVENT_TYPES`."""
    import pyarrow as pa
    import pyarrow.compute as compute

    words = words.cast(pa.string())
    numbers = compute.index_in(words, value_set=pa.array(EVENT_TYPES))
    if numbers.null_count:
        row = int(np.argmax(numbers.is_null().to_numpy(zero_copy_only=False)))
        text = f"a type must be one of {', '.join(EVENT_TYPES)}, got {words[row]}"
        raise group.error("event_type", row, text)
    return numbers
