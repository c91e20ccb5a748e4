"""Samples of MLPerf's `dlrm_v4`, in the order of the benchmark: by windows of time.

An anchor is a listen with enough earlier events of its user. It is the candidate of one
sample, and the events before it are the history.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from yambda import (
    ACTIONS,
    LIKED,
    LISTENED,
    SECONDS_PER_DAY,
    SECONDS_PER_HOUR,
    EventLog,
    read_yambda,
)

import tpu_embedding as te
from tpu_embedding.tools import train

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistorySettings:
    """Settings of anchors and histories; the defaults are the benchmark's.

    Attributes:
      history_length: maximum events of a history. Listens, likes and skips have a third
        each, rounded down.
      min_history: minimum number of earlier events of an anchor's user.
      scan_window: number of events before the anchor in which the history is searched.
    """

    history_length: int = 4_086
    min_history: int = 4_086
    scan_window: int = 20_000

    @property
    def events_per_action(self) -> int:
        """Maximum events of each action in a history."""
        return self.history_length // len(ACTIONS)

    @property
    def width(self) -> int:
        """Width of padded histories, which is the length of the longest."""
        return len(ACTIONS) * self.events_per_action


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventSource:
    """Base of the sources of `EventDataset`.

    Attributes:
      table_sizes: number of rows of the tables `"item_id"`, `"artist_id"`,
        `"album_id"`, `"uid"`, and of each of `CROSSES`.
      history: anchors and histories; the default is the benchmark's.
      whole_window: window whose length is full. `"first"` starts the windows with the
        earliest anchor, as in the benchmark. The last one can then be short, and few
        samples are evaluated. `"last"` ends the windows with the last anchor.
    """

    table_sizes: Mapping[str, int]
    history: HistorySettings = dataclasses.field(default_factory=HistorySettings)
    whole_window: Literal["first", "last"] = "first"

    def outline(self, *, batch_size: int, seed: int) -> "EventOutline":
        """Returns a data set of the same sizes, without events."""
        del seed
        return EventOutline(self, batch_size=batch_size)


class EventDataset:
    """The samples of a log, day by day.

    Windows of a day split the anchors by time. The last window is held out for
    evaluation. Training visits all other windows in the order of time, and the anchors
    of a window by user, then by time. Anchors at the end of a window that do not fill a
    batch are left out, as in the benchmark. After the last window, training starts
    again with the first. A batch is a function of the step, so no state is saved.

    Attributes:
      batch_size: samples per batch.
      log: log of events.
      table_sizes: number of rows of each table.
      history_length: events of the longest history.
      anchors: int64 `[anchors]`, places of the anchors in the log, rising.
      num_train_samples: samples from the first window to the last but one.
      num_evaluation_samples: number of anchors in the last window.
      evaluation_anchors: places in the log of the held-out samples, in their order.
    """

    def __init__(self, log: EventLog, source: EventSource, *, batch_size: int):
        """Finds the anchors, and sorts them by window.

        Args:
          log: log of events.
          source: sizes of tables and histories.
          batch_size: samples per batch.

        Raises:
          DataError: if the log has larger ids than its tables, or no window but the
            last one fills a batch.
        """
        self.log = log
        self.table_sizes = dict(source.table_sizes)
        self.batch_size = batch_size
        self.history_length = source.history.width
        self._history = source.history
        self._check_ids()
        # Sorted places of the listens, likes and skips.
        self._places = [np.flatnonzero(log.actions == action) for action in ACTIONS]
        self.anchors = self._find_anchors()
        self._sort_by_window(source.whole_window)

    def _check_ids(self) -> None:
        log = self.log
        for name, ids in (
            ("uid", log.users),
            ("item_id", log.items),
            ("artist_id", log.item_artists),
            ("album_id", log.item_albums),
        ):
            if ids.max() >= self.table_sizes[name]:
                raise train.DataError(
                    f"{log.name}: each id must be a row of its table, got {ids.max()} "
                    f"for table {name!r} of {self.table_sizes[name]} rows. Set "
                    "table_sizes to the largest id plus 1."
                )

    def _find_anchors(self) -> np.ndarray:
        log, num_earlier = self.log, self._history.min_history
        is_listen = (log.actions != LIKED) & (log.actions != 0)
        listens = np.flatnonzero(is_listen[num_earlier:]) + num_earlier
        is_anchor = log.users[listens - num_earlier] == log.users[listens]
        if not is_anchor.any():
            raise train.DataError(
                f"{log.name} must have a listen with {num_earlier} earlier events of "
                "its user in the training period, got none; pass more events per user, "
                "or lower HistorySettings.min_history."
            )
        return listens[is_anchor]

    def _sort_by_window(self, whole_window: Literal["first", "last"]) -> None:
        times = self.log.times[self.anchors]
        windows = (times - times.min()) // SECONDS_PER_DAY
        if whole_window == "last":
            back = (times.max() - times) // SECONDS_PER_DAY
            windows = back.max() - back
        # Equal windows keep the order of the log: by user, then time.
        anchors = self.anchors[np.argsort(windows, kind="stable")]
        ends = np.cumsum(np.bincount(windows))
        *days, self.evaluation_anchors = np.split(anchors, ends[:-1])
        whole = [day[: len(day) - len(day) % self.batch_size] for day in days]
        self._train_anchors = np.concatenate([anchors[:0], *whole])
        self.num_train_samples = len(self._train_anchors)
        self.num_evaluation_samples = len(self.evaluation_anchors)
        if not self.num_train_samples:
            raise train.DataError(
                f"{self.log.name}: a day before the last must have {self.batch_size} "
                f"anchors to fill a batch, got {len(days)} such day(s) of at most "
                f"{max(map(len, days), default=0)}; lower batch_size, or pass more "
                "events."
            )

    def train_batch(self, step: int) -> train.Batch:
        """Returns the batch of training step `step`, counted from 0."""
        return self.train_part(step, range(self.batch_size))

    def train_part(self, step: int, samples: range) -> train.Batch:
        """Returns some consecutive samples of the batch of a training step."""
        first = step * self.batch_size % self.num_train_samples
        places = slice(first + samples.start, first + samples.stop)
        return self.read(self._train_anchors[places])

    def evaluation_batches(self) -> Iterator[train.Batch]:
        """Yields the last window once, by user and time.

        Copies of the last sample, with weight 0, pad the last batch.
        """
        yield from train.padded_batches(
            self.read, self.evaluation_anchors, self.batch_size
        )

    def read(self, anchors: np.ndarray) -> train.Batch:
        """Returns the samples of anchors.

        The features `"item_id"`, `"artist_id"` and `"album_id"` are dicts with a
        `RaggedIds` `"history"` and int32 `[samples]` `"candidate"`. Those of the user
        and of `CROSSES` are int32 `[samples]`. The dense inputs are a dict:

        * `"history_length"`: int32 `[samples]`, events of each history.
        * `"action_weight"`, `"action_timestamp"`: int32 `[samples, width]`, the action
          and the time of each event, from the oldest on; zeros follow.
        * `"query_time"`: int32 `[samples]`, the time of the last event of the history,
          or of the anchor without a history.

        Labels are 1 if the anchor is a listen to half of the item or more.

        Args:
          anchors: places of anchors in the log, `[samples]`.
        """
        log = self.log
        events, row_splits = self.histories(anchors)
        lengths = np.diff(row_splits)
        is_event = np.arange(self.history_length) < lengths[:, None]

        def padded(values: np.ndarray) -> np.ndarray:
            array = np.zeros(is_event.shape, np.int32)
            array[is_event] = values[events]
            return array

        history, candidates = log.items[events], log.items[anchors]
        ids = {
            "item_id": (history, candidates),
            "artist_id": (log.item_artists[history], log.item_artists[candidates]),
            "album_id": (log.item_albums[history], log.item_albums[candidates]),
        }
        features: dict[str, Any] = {
            name: {
                "history": te.RaggedIds(values=of_events, row_splits=row_splits),
                "candidate": of_candidates,
            }
            for name, (of_events, of_candidates) in ids.items()
        }
        times = padded(log.times)
        last_times = times[np.arange(len(anchors)), lengths - 1]
        return train.Batch(
            features=features | self.contextual_ids(anchors),
            dense={
                "history_length": lengths.astype(np.int32),
                "action_weight": padded(log.actions),
                "action_timestamp": times,
                "query_time": np.where(lengths > 0, last_times, log.times[anchors]),
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
        settings, users = self._history, self.log.users
        starts = np.searchsorted(users, users[anchors])
        starts = np.maximum(starts, anchors - settings.scan_window)
        number = np.arange(settings.events_per_action)
        # Offsets from the start fit int32, which sorts faster than places do. Padding
        # is larger than all offsets, so it comes last.
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
        users, items = log.users[anchors], log.items[anchors]
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


SAMPLES_PER_USER: Final = 16
"""Consecutive samples of one user in an outline, who all have one history."""

MEAN_LENGTH: Final = 0.65
"""Events of a history in an outline, as a share of the longest one."""

DIFFERENT_IDS: Final[Mapping[str, float]] = MappingProxyType(
    {"item_id": 0.024, "artist_id": 0.006, "album_id": 0.015}
)
"""Different ids of a feature in an outline, as a share of all its ids.

They were counted in the benchmark's batches of 1,024 samples per device."""


class EventOutline:
    """Batches with the shapes of a log's batches, and as many different ids.

    They serve to compile a step for the benchmark without its 227 GB of files. Their
    values mean nothing.

    Example:
      >>> source = EventSource(table_sizes={"item_id": 10_000})
      >>> outline = EventOutline(source, batch_size=32)
      >>> ids = outline.train_batch(0).features["item_id"]
      >>> ids["history"].row_splits.shape, ids["candidate"].shape
      ((33,), (32,))
    """

    def __init__(self, source: EventSource, *, batch_size: int):
        self.batch_size = batch_size
        self.table_sizes = dict(source.table_sizes)
        self.history_length = source.history.width

    def train_batch(self, step: int) -> train.Batch:
        """Returns the same batch for each step."""
        del step
        num_samples, width = self.batch_size, self.history_length
        num_events = max(1, int(MEAN_LENGTH * width))
        row_splits = np.arange(num_samples + 1) * num_events
        # Items of a user follow each other, and repeat.
        item_share = DIFFERENT_IDS["item_id"]
        num_items = max(1, int(SAMPLES_PER_USER * num_events * item_share))
        users = np.arange(num_samples) // SAMPLES_PER_USER
        items = (users * num_items)[:, None] + np.arange(num_events) % num_items
        features: dict[str, Any] = {}
        for name, size in self.table_sizes.items():
            if name not in DIFFERENT_IDS:
                features[name] = (np.arange(num_samples) % size).astype(np.int32)
                continue
            # Rising with the items, so that an item has one artist and one album.
            ids = (items * (DIFFERENT_IDS[name] / item_share)).astype(np.int64) % size
            ids = ids.astype(np.int32)
            history = te.RaggedIds(values=ids.ravel(), row_splits=row_splits)
            features[name] = {"history": history, "candidate": ids[:, 0]}
        events = np.zeros((num_samples, width), np.int32)
        return train.Batch(
            features=features,
            dense={
                "history_length": np.full(num_samples, num_events, np.int32),
                "action_weight": events,
                "action_timestamp": events,
                "query_time": np.zeros(num_samples, np.int32),
            },
            labels=np.zeros(num_samples, np.float32),
            weights=np.ones(num_samples, np.float32),
        )

    def evaluation_batches(self) -> Iterator[train.Batch]:
        """Yields one batch."""
        yield self.train_batch(0)


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
        log = read_yambda(train.required_files(data_dir, "Yambda's Parquet files"))
        return EventDataset(log, self, batch_size=batch_size)


# Constants of the algorithm: xxHash's doc/xxhash_spec.md, section "XXH64".
_PRIME_1: Final = np.uint64(0x9E3779B185EBCA87)
_PRIME_2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3: Final = np.uint64(0x165667B19E3779F9)
_PRIME_4: Final = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5: Final = np.uint64(0x27D4EB2F165667C5)


def xxh64(keys: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the xxHash of each tuple of keys, uint64 in the shape of the keys.

    The benchmark turns pairs and triples of ids into rows by this hash. The library
    `xxhash` takes one call per key, which is slower than NumPy on a whole batch. The
    hashed bytes are the keys, one after the other, as little-endian int64, and the seed
    is 0.

    Args:
      keys: one to three integer arrays of one shape, because xxHash works in stripes
        from 32 bytes on. Element `i` of each makes tuple `i`.

    Example:
      >>> [hex(h) for h in xxh64([np.array([1, 2]), np.array([3, 3])])]
      ['0x9c2b5aef47d495cc', '0x1a69d6aaa3f20b98']
    """
    # Arithmetic is modulo 2**64, as for all unsigned arrays of NumPy.
    start = int(_PRIME_5) + 8 * len(keys)
    state = np.full(np.shape(keys[0]), start, np.uint64)
    for key in keys:
        lane = np.asarray(key).astype(np.int64).view(np.uint64)
        lane = _rotate_left(lane * _PRIME_2, 31) * _PRIME_1
        state = _rotate_left(state ^ lane, 27) * _PRIME_1 + _PRIME_4
    state = (state ^ state >> np.uint64(33)) * _PRIME_2
    state = (state ^ state >> np.uint64(29)) * _PRIME_3
    return state ^ state >> np.uint64(32)


def _rotate_left(values: np.ndarray, num_bits: int) -> np.ndarray:
    return values << np.uint64(num_bits) | values >> np.uint64(64 - num_bits)
