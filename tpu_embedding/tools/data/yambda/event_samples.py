"""Samples of MLPerf's `dlrm_v4`: a candidate, its user's history, and crossed ids.

An anchor is a listen with enough earlier events of its user. It is the candidate of one
sample, and the events before it are the history.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.yambda.event_log import (
    ACTIONS,
    LIKED,
    LISTENED,
    SECONDS_PER_HOUR,
    EventLog,
)
from tpu_embedding.tools.data.yambda.xxhash64 import xxh64
from tpu_embedding.types import RaggedIds

CROSSES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "user_x_artist": ("user", "artist"),
        "user_x_album": ("user", "album"),
        "user_x_hour": ("user", "hour"),
        "item_x_hour": ("item", "hour"),
        "artist_x_hour": ("artist", "hour"),
        "user_x_is_organic": ("user", "is_organic"),
        "user_x_artist_x_hour": ("user", "artist", "hour"),
    }
)
"""Keys of the anchor that make each crossed id, in the order in which they are hashed.
"""


TABLES: Final = ("item_id", "artist_id", "album_id", "uid", *CROSSES)
"""Names of the tables."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistorySettings:
    """Settings of anchors and histories; the defaults are those of the benchmark.

    Attributes:
      history_length: maximum events of a history. Listens, likes and skips have a third
        each, rounded down.
      min_history: minimum number of earlier events of an anchor's user.
      scan_window: number of events before the anchor in which the history is searched.
    """

    history_length: int = 4_086
    min_history: int = 4_086
    scan_window: int = 20_000

    def __post_init__(self):
        if self.events_per_action < 1 or self.scan_window < 1:
            raise ValueError(
                f"HistorySettings.history_length must be at least {len(ACTIONS)} and "
                f"scan_window at least 1, got {self.history_length} and "
                f"{self.scan_window}."
            )

    @property
    def events_per_action(self) -> int:
        """Maximum events of each action in a history."""
        return self.history_length // len(ACTIONS)

    @property
    def width(self) -> int:
        """Width of padded histories, which is the length of the longest."""
        return len(ACTIONS) * self.events_per_action


class EventSamples:
    """Samples of a log, made when they are asked for.

    Attributes:
      log: log of events.
      table_sizes: number of rows of each table.
      settings: settings of the histories.
      anchors: int64 `[anchors]`, places of the anchors in the log, rising.
    """

    def __init__(
        self, log: EventLog, table_sizes: Mapping[str, int], settings: HistorySettings
    ):
        """Finds the anchors.

        Args:
          log: log of events.
          table_sizes: number of rows of each of `TABLES`.
          settings: settings of the histories.

        Raises:
          ValueError: if other tables are named.
          DataError: if the log has larger ids than its tables, or no anchor.
        """
        self.log = log
        self.table_sizes = dict(table_sizes)
        self.settings = settings
        self._check_tables()
        # Sorted places of the listens, likes and skips.
        self._places = [np.flatnonzero(log.actions == action) for action in ACTIONS]
        is_anchor = (log.actions != LIKED) & (log.actions != 0)
        starts = np.repeat(log.user_bounds[:-1], np.diff(log.user_bounds))
        is_anchor &= np.arange(len(starts)) - starts >= settings.min_history
        self.anchors = np.flatnonzero(is_anchor)
        if not len(self.anchors):
            raise DataError(
                f"{log.name} must have a listen with {settings.min_history} earlier "
                "events of its user in the training period, got none; pass more events "
                "per user, or lower HistorySettings.min_history."
            )

    def _check_tables(self) -> None:
        log = self.log
        if self.table_sizes.keys() != set(TABLES):
            raise ValueError(
                f"table_sizes must name the tables {TABLES}, "
                f"got {sorted(self.table_sizes)}."
            )
        largest = {
            "uid": log.users.max(),
            "item_id": log.items.max(),
            "artist_id": log.item_artists.max(),
            "album_id": log.item_albums.max(),
        }
        for name, largest_id in largest.items():
            if largest_id >= self.table_sizes[name]:
                raise DataError(
                    f"{log.name}: each id must be a row of its table, got {largest_id} "
                    f"for table {name!r} of {self.table_sizes[name]} rows. Set "
                    "table_sizes to the largest id plus 1, or "
                    "YambdaSource.has_dense_ids=True."
                )

    def read(self, anchors: np.ndarray) -> Batch:
        """Returns the samples of anchors.

        The features `"item_id"`, `"artist_id"` and `"album_id"` are dicts with a
        `RaggedIds` `"history"` and int32 `[samples]` `"candidate"`. Those of the user
        and of `CROSSES` are int32 `[samples]`. The dense inputs are a dict:

        * `"history_length"`: int32 `[samples]`, events of each history.
        * `"action_weight"`, `"action_timestamp"`: int32 `[samples, width]`, the action
          and the time of each event, from the oldest on; zeros follow.
        * `"query_time"`: int32 `[samples]`, the time of the last event of the history,
          or that of the anchor without a history.

        Labels are 1 if the anchor is a listen to half of the item or more.

        Args:
          anchors: places of anchors in the log, `[samples]`.
        """
        log = self.log
        events, row_splits = self.histories(anchors)
        lengths = np.diff(row_splits)
        items, candidates = log.items[events], log.items[anchors]
        features: dict[str, Any] = {
            name: {
                "history": RaggedIds(values=ids_of(items), row_splits=row_splits),
                "candidate": ids_of(candidates),
            }
            for name, ids_of in (
                ("item_id", lambda items: items),
                ("artist_id", log.item_artists.__getitem__),
                ("album_id", log.item_albums.__getitem__),
            )
        }
        last_events = np.where(lengths > 0, row_splits[1:] - 1, 0)
        query_time = log.times[anchors]
        if len(events):
            times = log.times[events[last_events]]
            query_time = np.where(lengths > 0, times, query_time)

        def padded(values: np.ndarray) -> np.ndarray:
            array = np.zeros((len(lengths), self.settings.width), np.int32)
            array[np.arange(self.settings.width) < lengths[:, None]] = values
            return array

        return Batch(
            features=features | self.contextual_ids(anchors),
            dense={
                "history_length": lengths.astype(np.int32),
                "action_weight": padded(log.actions[events]),
                "action_timestamp": padded(log.times[events]),
                "query_time": query_time,
            },
            labels=(log.actions[anchors] == LISTENED).astype(np.float32),
            weights=np.ones(len(anchors), np.float32),
        )

    def histories(self, anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the histories of anchors, one after the other.

        A history has the last events of each action within the scan window, merged in
        the order of the log.

        Args:
          anchors: int64 `[samples]`, places in the log.

        Returns:
          int64 places of the events in the log, and int64 `[samples + 1]` row splits.
        """
        settings, bounds = self.settings, self.log.user_bounds
        starts = bounds[np.searchsorted(bounds, anchors, side="right") - 1]
        starts = np.maximum(starts, anchors - settings.scan_window)
        number = np.arange(settings.events_per_action)
        # Offsets from the start fit int32, which sorts faster than places do. Padding
        # is larger than all offsets, so it ends up behind them.
        shape = (len(anchors), len(ACTIONS), len(number))
        offsets = np.full(shape, settings.scan_window, np.int32)
        for action, places in enumerate(self._places):
            stop = np.searchsorted(places, anchors)
            first = np.searchsorted(places, starts)
            first = np.maximum(first, stop - len(number))
            is_event = number < (stop - first)[:, None]
            chosen = places[(first[:, None] + number)[is_event]]
            offsets[:, action][is_event] = chosen - np.repeat(starts, stop - first)
        offsets = np.sort(offsets.reshape(len(anchors), settings.width))
        is_event = offsets < settings.scan_window
        lengths = is_event.sum(axis=1)
        events = np.repeat(starts, lengths) + offsets[is_event]
        return events, np.concatenate([[0], np.cumsum(lengths)])

    def contextual_ids(self, anchors: np.ndarray) -> dict[str, np.ndarray]:
        """Returns users and crossed ids of anchors, each int32 `[samples]`.

        Crossed ids are hashes of the anchor's keys, modulo the rows of the table.

        Args:
          anchors: int64 `[samples]`, places in the log.
        """
        log = self.log
        users = log.users[np.searchsorted(log.user_bounds, anchors, side="right") - 1]
        items = log.items[anchors]
        keys = {
            "user": users,
            "item": items,
            "artist": log.item_artists[items],
            "album": log.item_albums[items],
            "hour": log.times[anchors] // SECONDS_PER_HOUR % 24,
            "is_organic": log.is_organic[anchors],
        }
        ids = {"uid": users}
        for name, names_of_keys in CROSSES.items():
            hashes = xxh64([keys[key] for key in names_of_keys])
            ids[name] = (hashes % np.uint64(self.table_sizes[name])).astype(np.int32)
        return ids
