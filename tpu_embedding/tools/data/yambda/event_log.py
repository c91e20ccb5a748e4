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
        kept = np.flatnonzero(in_training_period(columns["timestamp"]))
        if not len(kept):
            raise DataError(
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
