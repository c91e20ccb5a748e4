"""Synthetic log in the form of Yambda, of users whose tastes are known.

Each listen has a known probability that the user hears half of the item or more. No
model has a higher expected AUC than these probabilities. So the share of
`SyntheticYambda.teacher_auc` that a model reaches tells how well it has learned.
"""

import pathlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from tpu_embedding.field_checks import raise_all
from tpu_embedding.tools.data.argument_checks import count_problems, seed_problems
from tpu_embedding.tools.data.pyarrow_modules import PARQUET_FILES, load_pyarrow
from tpu_embedding.tools.data.random_streams import (
    TEACHER_STREAM,
    TRAIN_STREAM,
    random_generator,
)
from tpu_embedding.tools.data.teacher import bias_of_rate, sigmoid
from tpu_embedding.tools.data.yambda.event_batches import EventBatches
from tpu_embedding.tools.data.yambda.event_log import (
    EVENT_TYPES,
    LIKED,
    LISTENED,
    MIN_LISTENED_PERCENT,
    SECONDS_PER_DAY,
    SKIPPED,
    EventColumns,
    EventLog,
    TimeSplit,
)
from tpu_embedding.tools.data.yambda.event_samples import (
    SECONDS_PER_HOUR,
    HistorySettings,
)
from tpu_embedding.tools.data.yambda.exact_auc import exact_auc
from tpu_embedding.tools.data.yambda.yambda_files import ALBUM_FILE, ARTIST_FILE
from tpu_embedding.tools.data.zipf import ZipfIds

SMALL_TABLE_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "item_id": 5_000,
        "artist_id": 1_001,
        "album_id": 2_001,
        "uid": 3_000,
        "user_x_artist": 50_000,
        "user_x_album": 20_000,
        "user_x_hour": 12_000,
        "item_x_hour": 20_000,
        "artist_x_hour": 16_000,
        "user_x_is_organic": 2_000,
        "user_x_artist_x_hour": 20_000,
    }
)
"""Rows of tables for the default log, which has fewer items, artists and albums."""

SMALL_HISTORY: Final = HistorySettings(history_length=126, min_history=30)
"""Settings of histories for the default log: up to 42 events of each action."""

TASTE_RANK: Final = 2
TASTE_SCALE: Final = 4.0
"""Standard deviation of the taste's contribution to the logit."""

TASTE_DAYS: Final = 30
"""Days that a user keeps a taste."""

ARTIST_SHARE: Final = 0.95
"""Share of the artist in the variance of an item's vector."""

EFFECT_SCALE: Final = 0.5
"""Standard deviation of the effects of a user and of an item, and size of the hour's.
"""

ORGANIC_EFFECT: Final = 0.3
LISTENED_RATE: Final = 0.61
"""Mean probability of a listen to half of the item or more; Yambda has 0.63."""

REPEAT_RATE: Final = 0.3
LIKE_RATE: Final = 0.02
OTHER_RATE: Final = 0.01
"""Share of events that are no listens and no likes."""

EVENTS_SPREAD: Final = 0.5
"""Standard deviation of the logarithm of a user's number of events."""

HOURS_SPREAD: Final = 3.0
"""Standard deviation, in hours, of the time of day of a user's events."""

TIME_STEP: Final = 5
"""Seconds to which times are rounded, as in Yambda."""


class SyntheticYambda:
    """Events of users, whose listens follow a teacher that is known.

    The logit of a listen to half of the item or more is

        b + <f_user, g_item> + e_user + e_item
          + s * cos(2 pi (hour - h_user) / 24) + o * (1 if organic, otherwise -1)

    The vector `f` of a user is drawn again every 30 days, from a time of the user's own
    on. So rates of the whole log are partly out of date, and the latest events are not.
    The vector `g` of an item is mostly that of its artist. An item has one album, and
    an album one artist. Three in ten events repeat the item of an earlier event of the
    user; the others draw an item by `ZipfIds`. A user's events lie around one hour of
    the day. The numbers of events differ between users, so some have no anchor.

    The default log has 375,000 training events. With `SMALL_HISTORY` and the last day
    as a whole window, 12,499 samples are evaluated. The teacher's AUC is 0.905 there,
    that of the rates of users 0.59, and that of the rates of items 0.59. Both and the
    rates of pairs of user and artist, added up, reach 0.721.

    Attributes:
      log: training events.
      probabilities: float64 `[events of the log]`, the probability that the event, if
        it is a listen, is one to half of the item or more.
      columns: all events by the names of Yambda's columns, sorted by user and time.

    Example:
      >>> data = SyntheticYambda(num_users=20, events_per_user=50, num_days=5)
      >>> len(data.log.times) == len(data.probabilities)
      True
    """

    def __init__(
        self,
        *,
        num_users: int = 3_000,
        num_items: int = 400,
        num_artists: int = 20,
        num_albums: int = 40,
        events_per_user: int = 130,
        num_days: int = 30,
        zipf_exponent: float = 0.7,
        seed: int = 0,
    ):
        """Draws all events, in about 135 bytes each.

        Args:
          num_users: number of users; ids count from 0.
          num_items: number of items; ids count from 0.
          num_artists: number of artists; ids count from 1, because 0 is unknown.
          num_albums: number of albums; ids count from 1.
          events_per_user: mean number of events of a user.
          num_days: days of the log; the last one is the test day, which is not used.
          zipf_exponent: skew of the items and artists; 0 is uniform.
          seed: seed of the teacher and of the events, at least 0.

        Raises:
          ValueError: if arguments are out of range; the message names all of them.
        """
        counts = dict(
            num_users=num_users,
            num_items=num_items,
            num_artists=num_artists,
            num_albums=num_albums,
            events_per_user=events_per_user,
        )
        raise_all(list(_problems(counts, num_days=num_days, seed=seed)))
        self._seed = seed
        self._num_days = num_days
        self._items = ZipfIds(vocabulary_size=num_items, exponent=zipf_exponent)
        teacher = random_generator(seed=seed, stream=TEACHER_STREAM)
        artists = ZipfIds(vocabulary_size=num_artists, exponent=zipf_exponent)
        album_artists = 1 + artists.draw(teacher, num_albums)
        item_albums = teacher.integers(num_albums, size=num_items)
        self._item_artists = album_artists[item_albums]
        self._item_albums = 1 + item_albums
        events = random_generator(seed=seed, stream=TRAIN_STREAM)
        users, times = self._draw_times(events, num_users, events_per_user)
        items = self._draw_items(events, users)
        is_organic = events.integers(2, size=len(users))
        logits = self._logits(teacher, users, times, items, is_organic, num_artists)
        logits += bias_of_rate(logits, LISTENED_RATE)
        probabilities = sigmoid(logits)
        is_listened = events.random(len(users)) < probabilities
        types = _draw_types(events, probabilities)
        self.columns = {
            "uid": users.astype(np.uint32),
            "timestamp": times.astype(np.uint32),
            "item_id": items.astype(np.uint32),
            "event_type": types,
            "is_organic": is_organic.astype(np.uint8),
            "played_ratio_pct": _draw_ratios(events, types, is_listened),
            "track_length_seconds": teacher.integers(60, 400, num_items)[items],
        }
        listens = np.where(is_listened, LISTENED, SKIPPED)
        likes = np.where(types == EVENT_TYPES.index("like"), LIKED, 0)
        self.log = EventLog.of_columns(
            EventColumns(
                users=users,
                times=times,
                items=items,
                actions=np.where(types == EVENT_TYPES.index("listen"), listens, likes),
                is_organic=is_organic,
            ),
            item_artists=self._item_artists,
            item_albums=self._item_albums,
            name="the synthetic log",
        )
        # The events are sorted already, so those of the log keep their order.
        period = TimeSplit.of_last_time(int(times.max())).train
        in_period = (times >= period.start) & (times < period.stop)
        self.probabilities = probabilities[in_period]

    def teacher_auc(self, batches: EventBatches) -> float:
        """Returns the AUC of the true probabilities on the samples of an evaluation.

        Args:
          batches: batches of the samples of `log`.
        """
        anchors = batches.evaluation_anchors
        labels = self.log.actions[anchors] == LISTENED
        return exact_auc(labels, self.probabilities[anchors])

    def write(self, directory: pathlib.Path) -> None:
        """Writes the log as the files that `read_yambda` reads.

        Args:
          directory: directory that exists.

        Raises:
          MissingPyarrowError: if pyarrow is not installed.
        """
        parquet = load_pyarrow("pyarrow.parquet", PARQUET_FILES)
        import pyarrow as pa

        words = pa.array(EVENT_TYPES)
        types = pa.array(self.columns["event_type"].astype(np.int8))
        ratios = self.columns["played_ratio_pct"]
        columns = self.columns | {
            "event_type": pa.DictionaryArray.from_arrays(types, words),
            "played_ratio_pct": pa.array(ratios, mask=np.isnan(ratios)),
        }
        parquet.write_table(pa.table(columns), directory / "multi_event.parquet")
        for name, column, values in (
            (ARTIST_FILE, "artist_id", self._item_artists),
            (ALBUM_FILE, "album_id", self._item_albums),
        ):
            table = pa.table({column: values, "item_id": np.arange(len(values))})
            parquet.write_table(table, directory / name)

    def _draw_times(
        self, generator: np.random.Generator, num_users: int, events_per_user: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns users and times of all events, sorted by both."""
        mean_of_log = np.log(events_per_user) - EVENTS_SPREAD**2 / 2
        counts = generator.lognormal(mean_of_log, EVENTS_SPREAD, num_users)
        users = np.repeat(np.arange(num_users), np.maximum(counts.astype(int), 1))
        hours = generator.uniform(0, 24, num_users)[users]
        hours = generator.normal(hours, HOURS_SPREAD) % 24
        days = generator.integers(self._num_days, size=len(users))
        times = days * SECONDS_PER_DAY + (hours * SECONDS_PER_HOUR).astype(int)
        times -= times % TIME_STEP
        order = np.lexsort((times, users))
        return users, times[order]

    def _draw_items(
        self, generator: np.random.Generator, users: np.ndarray
    ) -> np.ndarray:
        """Returns the items of events, which are sorted by user."""
        number = np.arange(len(users))
        first = np.searchsorted(users, users)
        repeated = first + (generator.random(len(users)) * (number - first)).astype(int)
        is_repeat = (generator.random(len(users)) < REPEAT_RATE) & (number > first)
        source = np.where(is_repeat, repeated, number)
        # A repeated event may repeat another; each turn halves the way to the first.
        while (source[source] != source).any():
            source = source[source]
        return self._items.draw(generator, len(users))[source]

    def _logits(
        self,
        generator: np.random.Generator,
        users: np.ndarray,
        times: np.ndarray,
        items: np.ndarray,
        is_organic: np.ndarray,
        num_artists: int,
    ) -> np.ndarray:
        """Returns the teacher's logits of events, without the common bias."""
        num_users, num_items = users[-1] + 1, len(self._item_artists)
        taste_seconds = TASTE_DAYS * SECONDS_PER_DAY
        num_tastes = 1 + -(-self._num_days // TASTE_DAYS)
        first_change = generator.integers(taste_seconds, size=num_users)
        turns = (times + first_change[users]) // taste_seconds
        user_vectors = generator.normal(size=(num_users, num_tastes, TASTE_RANK))
        artist_vectors = generator.normal(size=(num_artists + 1, TASTE_RANK))
        item_vectors = np.sqrt(ARTIST_SHARE) * artist_vectors[self._item_artists]
        item_vectors += np.sqrt(1 - ARTIST_SHARE) * generator.normal(
            size=(num_items, TASTE_RANK)
        )
        tastes = np.einsum("er,er->e", user_vectors[users, turns], item_vectors[items])
        user_effects = generator.normal(size=num_users)
        item_effects = generator.normal(size=num_items)
        best_hours = generator.uniform(0, 24, num_users)
        hours = times // SECONDS_PER_HOUR % 24
        effects = user_effects[users] + item_effects[items]
        effects += np.cos(2 * np.pi * (hours - best_hours[users]) / 24)
        return (
            TASTE_SCALE / np.sqrt(TASTE_RANK) * tastes
            + EFFECT_SCALE * effects
            + ORGANIC_EFFECT * (2 * is_organic - 1)
        )


def _problems(counts: dict[str, int], *, num_days: int, seed: int) -> Iterator[str]:
    yield from count_problems("SyntheticYambda", **counts, num_days=num_days)
    yield from seed_problems("SyntheticYambda", seed)
    if num_days == 1:
        yield (
            "SyntheticYambda.num_days must be at least 2, as the last day is the test "
            "day, got 1"
        )


def _draw_types(
    generator: np.random.Generator, probabilities: np.ndarray
) -> np.ndarray:
    """Returns types of events; users like what they listen to."""
    like_rates = LIKE_RATE * probabilities / LISTENED_RATE
    uniform = generator.random(len(probabilities))
    others = generator.integers(2, len(EVENT_TYPES), len(probabilities))
    types = np.where(uniform < like_rates + OTHER_RATE, others, 0)
    return np.where(uniform < like_rates, EVENT_TYPES.index("like"), types)


def _draw_ratios(
    generator: np.random.Generator, types: np.ndarray, is_listened: np.ndarray
) -> np.ndarray:
    """Returns played ratios in percent; NaN for events that are no listens."""
    shares = generator.integers(MIN_LISTENED_PERCENT, size=len(types))
    ratios = shares + np.where(is_listened, MIN_LISTENED_PERCENT, 0)
    is_listen = types == EVENT_TYPES.index("listen")
    return np.where(is_listen, ratios, np.nan).astype(np.float32)
