"""Events of users with items, sorted by user and time, as histories need them.

`yambda_files` reads the events of Yambda, a public log of music, and `synthetic_yambda`
draws some. `event_samples` makes training samples of them.
"""

import dataclasses
from typing import Final

import numpy as np

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.types import PADDING_ROW_ID

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

MAX_ID: Final = PADDING_ROW_ID - 1
"""Largest id of a user, item, artist or album, and largest time: all are int32."""

MAX_ITEM: Final = 2**28 - 1
"""Largest id of an item; arrays with a place per item take 1 GiB each then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Times of training and test events, in seconds.

    Attributes:
      train: times of training events.
      test: times of test events, the last day; the benchmark's runs do not use them.
    """

    train: range
    test: range

    @classmethod
    def of_last_time(cls, last_time: int) -> "TimeSplit":
        """Returns the benchmark's split, given the time of the last event.

        The events of this very time are in neither part.

        Example:
          >>> split = TimeSplit.of_last_time(30_000_000)
          >>> split.train, split.test
          (range(3991800, 29911800), range(29913600, 30000000))
        """
        test = range(last_time - SECONDS_PER_DAY, last_time)
        stop = test.start - GAP_SECONDS
        return cls(
            train=range(stop - NUM_TRAIN_DAYS * SECONDS_PER_DAY, stop), test=test
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventColumns:
    """Events in any order, in arrays of one length.

    Attributes:
      users: ids of users, from 0 to `MAX_ID`.
      times: seconds, from 0 to `MAX_ID`.
      items: ids of items, from 0 to `MAX_ITEM`.
      actions: `LISTENED`, `LIKED`, `SKIPPED`, or 0 for any other event.
      is_organic: 1 if the user found the item without a recommendation, 0 otherwise.
    """

    users: np.ndarray
    times: np.ndarray
    items: np.ndarray
    actions: np.ndarray
    is_organic: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventLog:
    """Training events of all users, sorted by user and time, in 10 bytes per event.

    Attributes:
      users: int32 `[users]`, the ids of users who have events, rising.
      user_bounds: int64 `[users + 1]`; user `i` owns the events from `user_bounds[i]`
        to `user_bounds[i + 1] - 1`.
      times: int32 `[events]`, in seconds.
      items: int32 `[events]`.
      actions: uint8 `[events]`; see `EventColumns`.
      is_organic: uint8 `[events]`; see `EventColumns`.
      item_artists: int32 `[items]`, the artist of each item; 0 is unknown.
      item_albums: int32 `[items]`, the album of each item; 0 is unknown.
      name: where the events are from, for errors.
      digest: digest of the files; None if there are none.
    """

    users: np.ndarray
    user_bounds: np.ndarray
    times: np.ndarray
    items: np.ndarray
    actions: np.ndarray
    is_organic: np.ndarray
    item_artists: np.ndarray
    item_albums: np.ndarray
    name: str
    digest: str | None = None

    @classmethod
    def of_columns(
        cls,
        columns: EventColumns,
        *,
        item_artists: np.ndarray,
        item_albums: np.ndarray,
        name: str,
        digest: str | None = None,
    ) -> "EventLog":
        """Returns the events of the training period, sorted by user and time.

        The sort is stable: events of one user at one time keep their order in the
        columns. The benchmark leaves this order open, so its prepared files can have
        another one. Sorting needs up to 32 bytes per event beside the columns, and 28
        if the columns are sorted already.

        Args:
          columns: events of all times.
          item_artists: artist of each item; items behind its end have the artist 0.
          item_albums: album of each item; items behind its end have the album 0.
          name: where the events are from, for errors.
          digest: digest of the files, or None.

        Raises:
          DataError: if no event is in the training period, or an item is above
            `MAX_ITEM`.
        """
        times = columns.times
        period = range(0)
        if len(times):
            period = TimeSplit.of_last_time(int(times.max())).train
        kept = np.flatnonzero((times >= period.start) & (times < period.stop))
        if not len(kept):
            raise DataError(
                f"{name} must have an event in the {NUM_TRAIN_DAYS} days that end one "
                f"day and {GAP_SECONDS // 60} minutes before the last event, got none "
                f"of {len(times):,} events; pass events of two days or more."
            )
        keys = columns.users[kept].astype(np.uint64) << np.uint64(32)
        keys |= times[kept].astype(np.uint64)
        if (keys[1:] < keys[:-1]).any():
            kept = kept[np.argsort(keys, kind="stable")]
        del keys
        users = columns.users[kept]
        starts = np.append(0, np.flatnonzero(users[1:] != users[:-1]) + 1)
        items = columns.items[kept].astype(np.int32)
        if items.max() > MAX_ITEM:
            raise DataError(
                f"{name}: ids of items must be at most {MAX_ITEM}, got {items.max()}; "
                "give the items new ids."
            )
        num_items = max(len(item_artists), len(item_albums), int(items.max()) + 1)
        return cls(
            users=users[starts].astype(np.int32),
            user_bounds=np.append(starts, len(kept)),
            times=times[kept].astype(np.int32),
            items=items,
            actions=columns.actions[kept].astype(np.uint8),
            is_organic=columns.is_organic[kept].astype(np.uint8),
            item_artists=_padded(item_artists, num_items),
            item_albums=_padded(item_albums, num_items),
            name=name,
            digest=digest,
        )

    def with_dense_ids(self) -> "EventLog":
        """Returns the log with new ids, which leave no number out.

        Small extracts of Yambda keep the ids of the whole log, so their tables would
        have mostly unused rows. New ids rise with the old ones. Users and items count
        from 0, artists and albums from 1, because 0 is unknown.
        """
        is_used = np.zeros(len(self.item_artists), bool)
        is_used[self.items] = True
        new_items = np.cumsum(is_used, dtype=np.int32) - np.int32(1)
        return dataclasses.replace(
            self,
            users=np.arange(len(self.users), dtype=np.int32),
            items=new_items[self.items],
            item_artists=_dense_behind_zero(self.item_artists[is_used]),
            item_albums=_dense_behind_zero(self.item_albums[is_used]),
        )


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values.astype(np.int32), (0, length - len(values)))


def _dense_behind_zero(values: np.ndarray) -> np.ndarray:
    """Returns the ranks of the values among the different ones; 0 stays 0."""
    different, ranks = np.unique(values, return_inverse=True)
    return (ranks + (different[0] != 0)).astype(np.int32)
