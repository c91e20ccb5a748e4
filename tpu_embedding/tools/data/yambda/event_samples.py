"""Samples of MLPerf's `dlrm_v4`: a candidate, its user's history, and crossed ids.

An anchor is a listen with enough earlier events of its user. It is the candidate of one
sample, and the events before it are the history.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from tpu_embedding.field_checks import is_int, raise_all
from tpu_embedding.tools.data.argument_checks import count_problems
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.yambda.event_log import (
    ACTIONS,
    LIKED,
    LISTENED,
    MAX_ID,
    EventLog,
)
from tpu_embedding.tools.data.yambda.xxhash64 import xxh64
from tpu_embedding.types import RaggedIds

BENCHMARK_TABLE_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "item_id": 9_390_624,
        "artist_id": 1_293_395,
        "album_id": 3_367_692,
        "uid": 1_000_001,
        "user_x_artist": 100_000_000,
        "user_x_album": 40_000_000,
        "user_x_hour": 24_000_000,
        "item_x_hour": 40_000_000,
        "artist_x_hour": 32_000_000,
        "user_x_is_organic": 2_000_000,
        "user_x_artist_x_hour": 40_000_000,
    }
)
"""Rows of the tables of the benchmark."""

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

CONTEXTUAL_FEATURES: Final = ("uid", *CROSSES)
"""Features of one id per sample, in the order of the benchmark's tokens."""

SECONDS_PER_HOUR: Final = 3_600


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistorySettings:
    """Settings of anchors and histories; the defaults are those of the benchmark.

    Attributes:
      history_length: maximum events of a history. Listens, likes and skips have a third
        each, rounded down.
      min_history: minimum number of earlier events of an anchor's user.
      scan_window: number of events before the anchor in which the history is searched.
      max_kept: upper limit of the length, by which the oldest events are cut; None is
        no limit. It is the reference's `max_seq_len` without the other tokens, which
        its default never reaches.
    """

    history_length: int = 4_086
    min_history: int = 4_086
    scan_window: int = 20_000
    max_kept: int | None = None

    def __post_init__(self):
        raise_all(list(self._problems()))

    def _problems(self) -> Iterator[str]:
        owner = "HistorySettings"
        yield from count_problems(owner, scan_window=self.scan_window)
        if not is_int(self.history_length) or self.history_length < len(ACTIONS):
            yield (
                f"{owner}.history_length must be an int of at least {len(ACTIONS)}, "
                f"got {self.history_length!r}"
            )
        if not is_int(self.min_history) or self.min_history < 0:
            yield (
                f"{owner}.min_history must be an int of at least 0, got "
                f"{self.min_history!r}"
            )
        if is_int(self.scan_window) and self.scan_window > MAX_ID:
            yield (
                f"{owner}.scan_window must be at most {MAX_ID}, got {self.scan_window}"
            )
        if self.max_kept is not None:
            yield from count_problems(owner, max_kept=self.max_kept)

    @property
    def events_per_action(self) -> int:
        """Maximum events of each action in a history."""
        return self.history_length // len(ACTIONS)

    @property
    def width(self) -> int:
        """Width of padded histories, which is the length of the longest."""
        width = len(ACTIONS) * self.events_per_action
        return width if self.max_kept is None else min(width, self.max_kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histories:
    """Events of several histories, one history after the other.

    Attributes:
      events: int64 `[events of all histories]`, places in the log; rising within a
        history, and so in time.
      row_splits: int64 `[samples + 1]`; sample `i` owns
        `events[row_splits[i]:row_splits[i + 1]]`.
    """

    events: np.ndarray
    row_splits: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Number of events of each history."""
        return np.diff(self.row_splits)

    def padded(self, values: np.ndarray, width: int) -> np.ndarray:
        """Returns values of the events as `[samples, width]`, with zeros behind."""
        padded = np.zeros((len(self.lengths), width), values.dtype)
        padded[np.arange(width) < self.lengths[:, None]] = values
        return padded


class EventSamples:
    """Samples of a log, made when they are asked for.

    The log stays in memory. Beside it, 8 bytes per event and 8 per anchor are held,
    half of it for logs of fewer than 2**32 events.

    Attributes:
      log: log of events.
      table_sizes: number of rows of each table.
      settings: settings of the histories.
      anchors: places of the anchors in the log, rising.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        table_sizes: Mapping[str, int] = BENCHMARK_TABLE_SIZES,
        settings: HistorySettings | None = None,
    ):
        """Finds the anchors.

        Args:
          log: log of events.
          table_sizes: number of rows of each table, by the names of
            `BENCHMARK_TABLE_SIZES`.
          settings: settings of the histories; None is those of the benchmark.

        Raises:
          ValueError: if other tables are named, or a size is not positive.
          DataError: if the log has larger ids than its tables, or no anchor.
        """
        self.log = log
        self.table_sizes = dict(table_sizes)
        self.settings = settings or HistorySettings()
        self._check_tables()
        dtype = np.uint32 if len(log.times) < 2**32 else np.int64
        # Sorted places of the listens, likes and skips.
        self._places = [
            np.flatnonzero(log.actions == action).astype(dtype) for action in ACTIONS
        ]
        is_anchor = (log.actions != LIKED) & (log.actions != 0)
        for start, stop in zip(log.user_bounds[:-1], log.user_bounds[1:], strict=True):
            is_anchor[start : min(stop, start + self.settings.min_history)] = False
        self.anchors = np.flatnonzero(is_anchor).astype(dtype)
        if not len(self.anchors):
            raise DataError(
                f"{log.name} must have a listen with {self.settings.min_history} "
                "earlier events of its user in the training period, got none; pass "
                "more events per user, or lower HistorySettings.min_history."
            )

    def _check_tables(self) -> None:
        sizes, log = self.table_sizes, self.log
        if sizes.keys() != BENCHMARK_TABLE_SIZES.keys():
            raise ValueError(
                f"table_sizes must name the tables {sorted(BENCHMARK_TABLE_SIZES)}, "
                f"got {sorted(sizes)}."
            )
        problems = [
            f"table_sizes[{name!r}] must be an int from 1 to {MAX_ID}, got {size!r}"
            for name, size in sizes.items()
            if not is_int(size) or not 1 <= size <= MAX_ID
        ]
        raise_all(problems)
        largest = {
            "uid": log.users,
            "item_id": log.items,
            "artist_id": log.item_artists,
            "album_id": log.item_albums,
        }
        for name, ids in largest.items():
            if ids.max() >= sizes[name]:
                problems.append(f"table {name!r} of {sizes[name]} rows, id {ids.max()}")
        if problems:
            raise DataError(
                f"{log.name}: each id must be a row of its table, got "
                f"{'; '.join(problems)}. Set table_sizes to the largest id plus 1, or "
                "YambdaSource.has_dense_ids=True, which is log.with_dense_ids()."
            )

    def read(self, anchors: np.ndarray) -> dict[str, Any]:
        """Returns the samples of anchors, as a tree of NumPy arrays.

        * `"features"`: ids by feature. `"item_id"`, `"artist_id"` and `"album_id"` are
          dicts with a `RaggedIds` `"history"` and int32 `[samples]` `"candidate"`.
          Those of `CONTEXTUAL_FEATURES` are int32 `[samples]`.
        * `"history_length"`: int32 `[samples]`, events of each history.
        * `"action_weight"`, `"action_timestamp"`: int32 `[samples, width]`, the action
          and the time of each event, from the oldest on; zeros follow.
        * `"query_time"`: int32 `[samples]`, the time of the last event of the history,
          or that of the anchor without a history.
        * `"label"`: float32 `[samples]`, 1 if the anchor is a listen to half of the
          item or more, and 0 if it is a skip.

        A sample takes 12 bytes per event of its history and 8 per place of the width.
        While a batch is made, up to twice as much is used.

        Args:
          anchors: places of anchors in the log, `[samples]`.
        """
        log, anchors = self.log, np.asarray(anchors).astype(np.int64)
        histories = self.histories(anchors)
        events, splits = histories.events, histories.row_splits
        items, times = log.items[events], log.times[events]
        candidates = log.items[anchors]
        features: dict[str, Any] = {
            name: {
                "history": RaggedIds(values=ids_of(items), row_splits=splits),
                "candidate": ids_of(candidates),
            }
            for name, ids_of in (
                ("item_id", lambda items: items),
                ("artist_id", log.item_artists.__getitem__),
                ("album_id", log.item_albums.__getitem__),
            )
        }
        query_time = log.times[anchors]
        has_history = histories.lengths > 0
        query_time[has_history] = times[splits[1:][has_history] - 1]
        width = self.settings.width
        return {
            "features": features | self.contextual_ids(anchors),
            "history_length": histories.lengths.astype(np.int32),
            "action_weight": histories.padded(
                log.actions[events].astype(np.int32), width
            ),
            "action_timestamp": histories.padded(times, width),
            "query_time": query_time,
            "label": (log.actions[anchors] == LISTENED).astype(np.float32),
        }

    def histories(self, anchors: np.ndarray) -> Histories:
        """Returns the histories of anchors.

        A history has the last events of each action within the scan window, merged in
        the order of the log.

        Args:
          anchors: int64 `[samples]`, places in the log.
        """
        settings, bounds = self.settings, self.log.user_bounds
        starts = bounds[np.searchsorted(bounds, anchors, side="right") - 1]
        starts = np.maximum(starts, anchors - settings.scan_window)
        number = np.arange(settings.events_per_action)
        # Offsets from the start fit int32, which sorts faster than places do. Padding
        # is larger than all offsets, so it ends up behind them.
        offsets = np.full(
            (len(anchors), len(ACTIONS), len(number)), settings.scan_window, np.int32
        )
        for action, places in enumerate(self._places):
            # An array of another dtype would make a copy of all places.
            stop = np.searchsorted(places, anchors.astype(places.dtype))
            first = np.searchsorted(places, starts.astype(places.dtype))
            first = np.maximum(first, stop - len(number))
            is_event = number < (stop - first)[:, None]
            chosen = places[(first[:, None] + number)[is_event]].astype(np.int64)
            chosen -= np.repeat(starts, stop - first)
            offsets[:, action][is_event] = chosen
        offsets = np.sort(offsets.reshape(len(anchors), len(ACTIONS) * len(number)))
        is_event = offsets < settings.scan_window
        if settings.width < offsets.shape[1]:
            surplus = is_event.sum(axis=1) - settings.width
            is_event &= np.arange(offsets.shape[1]) >= surplus[:, None]
        lengths = is_event.sum(axis=1)
        return Histories(
            events=np.repeat(starts, lengths) + offsets[is_event],
            row_splits=np.concatenate([[0], np.cumsum(lengths)]),
        )

    def contextual_ids(self, anchors: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the ids of `CONTEXTUAL_FEATURES` of anchors, int32 `[samples]`.

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
