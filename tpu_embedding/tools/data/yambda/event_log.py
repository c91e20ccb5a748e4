"""Events of users with items, sorted by user and time, as histories need them."""

import dataclasses
from collections.abc import Mapping
from typing import Final

import numpy as np

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.types import PADDING_ROW_ID

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

MAX_ID: Final = PADDING_ROW_ID - 1
"""Largest id of a user, item, artist or album, and largest time: all are int32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventLog:
    """Training events of all users, sorted by user and time, in 10 bytes per event.

    Attributes:
      users: int32 `[users]`, the ids of users who have events, rising.
      user_bounds: int64 `[users + 1]`; user `i` owns the events from `user_bounds[i]`
        to `user_bounds[i + 1] - 1`.
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
    user_bounds: np.ndarray
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
        columns. The benchmark leaves this order open, so its prepared files can have
        another one.

        Args:
          columns: events of all times, by the names of Yambda's columns `"uid"`,
            `"timestamp"`, `"item_id"`, `"event_type"` (numbers), `"is_organic"` and
            `"played_ratio_pct"`.
          item_artists: artist of each item; items behind its end have the artist 0.
          item_albums: album of each item; items behind its end have the album 0.
          name: where the events are from, for errors.

        Raises:
          DataError: if no event is in the training period.
        """
        is_kept = in_training_period(columns["timestamp"])
        if not is_kept.any():
            raise DataError(
                f"{name} must have an event in the {NUM_TRAIN_DAYS} days that end one "
                f"day and {GAP_SECONDS // 60} minutes before the last event, got none; "
                "pass events of two days or more."
            )
        kept = np.flatnonzero(is_kept)
        keys = (columns["timestamp"][kept], columns["uid"][kept])
        kept = kept[np.lexsort(keys)]
        users = columns["uid"][kept]
        starts = np.append(0, np.flatnonzero(users[1:] != users[:-1]) + 1)
        items = columns["item_id"][kept].astype(np.int32)
        num_items = max(len(item_artists), len(item_albums), int(items.max()) + 1)
        return cls(
            users=users[starts].astype(np.int32),
            user_bounds=np.append(starts, len(kept)),
            times=columns["timestamp"][kept].astype(np.int32),
            items=items,
            actions=_actions(columns)[kept],
            is_organic=columns["is_organic"][kept].astype(np.uint8),
            item_artists=_padded(item_artists, num_items),
            item_albums=_padded(item_albums, num_items),
            name=name,
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


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values.astype(np.int32), (0, length - len(values)))


def _dense_behind_zero(values: np.ndarray) -> np.ndarray:
    """Returns the ranks of the values among the different ones; 0 stays 0."""
    different, ranks = np.unique(values, return_inverse=True)
    return (ranks + (different[0] != 0)).astype(np.int32)
