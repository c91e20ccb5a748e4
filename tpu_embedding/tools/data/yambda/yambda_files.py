"""Reads Yambda's flat Parquet files, by pyarrow.

Yambda is a public log of a music service (`yandex/yambda` at Hugging Face, Apache-2.0).
An event is a row of `multi_event.parquet`. Two further files map an item to its artist
and its album.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.digests import join_digests
from tpu_embedding.tools.data.parquet_columns import RowGroupPlace, read_numbers
from tpu_embedding.tools.data.parquet_rows import (
    digest_of_footer,
    read_footer,
    read_row_group,
    row_groups,
)
from tpu_embedding.tools.data.yambda.event_log import (
    EVENT_TYPES,
    LIKED,
    LISTENED,
    MAX_ID,
    MAX_ITEM,
    MIN_LISTENED_PERCENT,
    SKIPPED,
    EventColumns,
    EventLog,
)

EVENT_FILES: Final = "multi_event*.parquet"
ARTIST_FILE: Final = "artist_item_mapping.parquet"
ALBUM_FILE: Final = "album_item_mapping.parquet"

NUM_PARENTS: Final = 2
"""Folders above the events in which the maps may lie: `flat/50m/` has the events."""

_INTEGERS: Final = "integers"
_INTEGERS_OR_TEXT: Final = "integers or text"
_INTEGERS_OR_BOOLEANS: Final = "integers or booleans"
_NUMBERS: Final = "integers or floating-point numbers"

_EVENT_COLUMNS: Final = {
    "uid": _INTEGERS,
    "timestamp": _INTEGERS,
    "item_id": _INTEGERS,
    "event_type": _INTEGERS_OR_TEXT,
    "is_organic": _INTEGERS_OR_BOOLEANS,
    "played_ratio_pct": _NUMBERS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class YambdaFiles:
    """Paths of the files of a log.

    Attributes:
      events: files of events, one or more. Their order is that of equal times.
      artists: file with the columns `item_id` and `artist_id`.
      albums: file with the columns `item_id` and `album_id`.
    """

    events: Sequence[pathlib.Path]
    artists: pathlib.Path
    albums: pathlib.Path

    @classmethod
    def find(cls, directory: str | pathlib.Path) -> "YambdaFiles":
        """Finds the files of a directory, those of events in the order of their names.

        Args:
          directory: directory of the events. The maps are there, or in one of the two
            folders above, as in the published data.

        Raises:
          DataError: if a file is missing.
        """
        directory = local_path(directory)
        events = sorted(directory.glob(EVENT_FILES))
        if not events:
            raise DataError(
                f"{directory} must hold a file {EVENT_FILES!r}, got none; pass the "
                "directory of Yambda's flat files, such as flat/50m."
            )
        return cls(
            events=events,
            artists=_find_map(directory, ARTIST_FILE),
            albums=_find_map(directory, ALBUM_FILE),
        )


def read_yambda(files: YambdaFiles) -> EventLog:
    """Returns the training events of a log in files.

    All events are read into memory, one row group at a time. With the sort, up to 46
    bytes per event are used at a time: 2.2 GB for the log of 50 million events, and 220
    GB for that of 5 billion. The result has 10 bytes per event.

    Types of events are the words of `EVENT_TYPES`, or their numbers. A played ratio
    that is null or NaN counts as 0. The column `track_length_seconds` is not read, and
    neither is any further one. If a map has several rows of an item, the last one
    counts. Items without one have the artist or album 0.

    Args:
      files: paths of the files.

    Raises:
      DataError: if a file is missing, damaged, or has a wrong column or value; the
        message names file and column.
      MissingPyarrowError: if pyarrow is not installed.
    """
    paths = [*files.events, files.artists, files.albums]
    return EventLog.of_columns(
        read_events(files.events),
        item_artists=read_item_map(files.artists, "artist_id"),
        item_albums=read_item_map(files.albums, "album_id"),
        name=str(files.events[0]),
        digest=join_digests(digest_of_footer(path) for path in paths),
    )


def read_events(paths: Sequence[pathlib.Path]) -> EventColumns:
    """Returns the events of files, in the order of their rows.

    Raises:
      DataError: see `read_yambda`.
    """
    footers = [_checked_footer(path, _EVENT_COLUMNS) for path in paths]
    num_events = sum(footer.num_rows for footer in footers)
    columns = EventColumns(
        users=np.empty(num_events, np.int32),
        times=np.empty(num_events, np.int32),
        items=np.empty(num_events, np.int32),
        actions=np.empty(num_events, np.uint8),
        is_organic=np.empty(num_events, np.uint8),
    )
    start = 0
    for path, footer in zip(paths, footers, strict=True):
        for place, arrays in _row_groups(path, footer, _EVENT_COLUMNS):
            stop = start + len(arrays["uid"])
            for array, name, largest in (
                (columns.users, "uid", MAX_ID),
                (columns.times, "timestamp", MAX_ID),
                (columns.items, "item_id", MAX_ITEM),
            ):
                array[start:stop] = _read_integers(
                    arrays[name], name, place, largest=largest
                )
            columns.actions[start:stop] = _read_actions(arrays, place)
            columns.is_organic[start:stop] = _read_integers(
                arrays["is_organic"], "is_organic", place, largest=1
            )
            start = stop
    return columns


def read_item_map(path: pathlib.Path, column: str) -> np.ndarray:
    """Returns a value for each item, int32 `[items]`; 0 for items without a row.

    Args:
      path: file with the column `item_id`.
      column: name of the column of values.

    Raises:
      DataError: see `read_yambda`.
    """
    kinds = {"item_id": _INTEGERS, column: _INTEGERS}
    items, values = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    for place, arrays in _row_groups(path, _checked_footer(path, kinds), kinds):
        items.append(
            _read_integers(arrays["item_id"], "item_id", place, largest=MAX_ITEM)
        )
        values.append(_read_integers(arrays[column], column, place))
    all_items = np.concatenate(items)
    by_item = np.zeros(all_items.max(initial=-1) + 1, np.int32)
    by_item[all_items] = np.concatenate(values)
    return by_item


def _find_map(directory: pathlib.Path, name: str) -> pathlib.Path:
    folders = [directory, *directory.absolute().parents[:NUM_PARENTS]]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"{directory} must hold {name!r}, or one of the {NUM_PARENTS} folders above; "
        "fetch it from the data set."
    )


def _checked_footer(path: pathlib.Path, kinds: dict[str, str]) -> Any:
    """Returns the metadata of a file; refuses missing columns and other types."""
    footer = read_footer(path)
    import pyarrow.types as types

    def is_text(found: Any) -> bool:
        if types.is_dictionary(found):
            found = found.value_type
        return types.is_string(found) or types.is_large_string(found)

    fits: dict[str, Callable[[Any], bool]] = {
        _INTEGERS: types.is_integer,
        _INTEGERS_OR_TEXT: lambda found: types.is_integer(found) or is_text(found),
        _INTEGERS_OR_BOOLEANS: lambda found: (
            types.is_integer(found) or types.is_boolean(found)
        ),
        _NUMBERS: lambda found: types.is_integer(found) or types.is_floating(found),
    }
    schema = footer.schema.to_arrow_schema()
    for name, kind in kinds.items():
        if name not in schema.names:
            raise DataError(
                f"{path} has no column {name!r}; it has {', '.join(schema.names)}. "
                "Pass Yambda's flat files."
            )
        found = schema.field(name).type
        if not fits[kind](found):
            raise DataError(
                f"{path}, column {name!r}: it must hold {kind}, got {found}; pass "
                "Yambda's flat files."
            )
    return footer


def _row_groups(
    path: pathlib.Path, footer: Any, kinds: dict[str, str]
) -> Iterator[tuple[RowGroupPlace, dict[str, Any]]]:
    for place, _ in row_groups(path, footer):
        yield place, read_row_group(place, footer, list(kinds))


def _read_integers(
    array: Any, column: str, place: RowGroupPlace, *, largest: int = MAX_ID
) -> np.ndarray:
    """Returns a column of integers from 0 to `largest`; refuses others."""
    values = read_numbers(array, column, place)
    if values.dtype == bool:
        values = values.astype(np.uint8)
    if values.min() < 0 or values.max() > largest:
        row = int(np.argmax((values < 0) | (values > largest)))
        raise place.error(
            column,
            row,
            f"a value must lie in [0, {largest}], got {values[row]}; correct the data",
        )
    return values


def _read_actions(arrays: dict[str, Any], place: RowGroupPlace) -> np.ndarray:
    """Returns the actions of a row group, from the types and the played ratios."""
    types = _read_event_types(arrays["event_type"], place)
    ratios = arrays["played_ratio_pct"].fill_null(0).to_numpy(zero_copy_only=False)
    is_listen = types == EVENT_TYPES.index("listen")
    # NaN is not larger than any number, so it counts as 0.
    listens = np.where(ratios >= MIN_LISTENED_PERCENT, LISTENED, SKIPPED)
    likes = np.where(types == EVENT_TYPES.index("like"), LIKED, 0)
    return np.where(is_listen, listens, likes).astype(np.uint8)


def _read_event_types(array: Any, place: RowGroupPlace) -> np.ndarray:
    """Returns the numbers of the types in `EVENT_TYPES`."""
    import pyarrow.types

    column = "event_type"
    if pyarrow.types.is_integer(array.type):
        return _read_integers(array, column, place, largest=len(EVENT_TYPES) - 1)
    if not pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    indices = read_numbers(array.indices, column, place)
    words = array.dictionary.to_pylist()
    numbers = [EVENT_TYPES.index(w) if w in EVENT_TYPES else -1 for w in words]
    types = np.array(numbers, np.int8)[indices]
    if (types < 0).any():
        row = int(np.argmin(types))
        raise place.error(
            column,
            row,
            f"a type must be one of {', '.join(EVENT_TYPES)}, got "
            f"{words[indices[row]]!r}; correct the data",
        )
    return types
