"""Synthetic log in the form of Yambda, of users whose tastes are known.

Each listen has a known probability that the user hears half of the item or more. No
model has a higher expected AUC than these probabilities. So the share of
`SyntheticEventDataset.teacher_auc` that a model reaches tells how well it has learned.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
from histories import EventDataset, EventSource
from yambda import (
    EVENT_TYPES,
    LISTENED,
    SECONDS_PER_DAY,
    SECONDS_PER_HOUR,
    EventLog,
    in_training_period,
)

from tpu_embedding.tools import train

TEACHER_STREAM: Final = 0
LOG_STREAM: Final = 1

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

ZIPF_EXPONENT: Final = 0.7
"""Skew of the items and artists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticYambdaSource(EventSource, train.SyntheticSource):
    """Source of `SyntheticEventDataset`; reads no file. The last day is held out.

    The logit of a listen to half of the item or more is

        b + <f_user, g_item> + e_user + e_item
          + s * cos(2 pi (hour - h_user) / 24) + o * (1 if organic, otherwise -1)

    The vector `f` of a user is drawn again every 30 days, from a time of the user's own
    on. So rates of the whole log are partly out of date, and the latest events are not.
    The vector `g` of an item is mostly its artist's vector. An item has one album, and
    an album one artist. Three in ten events repeat the item of an earlier event of the
    user; all other events draw an item by `ZipfIds`. A user's events cluster around one
    hour of the day. The numbers of events differ between users, so some have no anchor.

    The default log has 375,000 training events. With the histories of `small.py`,
    12,499 samples are evaluated. The teacher's AUC is 0.905 there. Rates of users reach
    0.59, and so do rates of items. Both and the rates of pairs of user and artist,
    added up, reach 0.721.

    Attributes:
      num_users: number of users; ids count from 0.
      num_items: number of items; ids count from 0.
      num_artists: number of artists; ids count from 1, because 0 is unknown.
      num_albums: number of albums; ids count from 1.
      events_per_user: mean number of events of a user.
      num_days: days of the log, at least 2, because the benchmark leaves the last one
        out.

    It also has the fields of `EventSource`.
    """

    whole_window: Literal["first", "last"] = "last"
    num_users: int = 3_000
    num_items: int = 400
    num_artists: int = 20
    num_albums: int = 40
    events_per_user: int = 130
    num_days: int = 30

    def draw(self, *, batch_size: int, seed: int) -> "SyntheticEventDataset":
        """Returns the data set."""
        log, probabilities = draw_log(self, seed)
        data = SyntheticEventDataset(log, self, batch_size=batch_size)
        data.probabilities = probabilities
        return data


class SyntheticEventDataset(EventDataset):
    """Samples of a drawn log.

    Attributes:
      probabilities: float64 `[events]`, of a listen to half of the item or more.
    """

    probabilities: np.ndarray

    def teacher_log_loss(self) -> float:
        """Returns the log loss of the true probabilities on the held-out samples."""
        is_listened, probabilities = self._labels_and_probabilities()
        of_label = np.where(is_listened, probabilities, 1 - probabilities)
        return float(-np.mean(np.log(np.maximum(of_label, 1e-12))))

    def teacher_auc(self) -> float:
        """Returns the AUC of the true probabilities on the held-out samples."""
        return exact_auc(*self._labels_and_probabilities())

    def _labels_and_probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        anchors = self.evaluation_anchors
        return self.log.actions[anchors] == LISTENED, self.probabilities[anchors]


def exact_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the probability that a positive sample has a higher score than another.

    Pairs of equal scores count one half. The metric of the training loop counts scores
    in bins instead, which takes constant memory.

    Args:
      labels: `[samples]`, 1 for positive samples and 0 for negative ones, both present.
      scores: finite numbers `[samples]`.

    Example:
      >>> exact_auc(np.array([0, 1, 1, 0]), np.array([0.1, 0.2, 0.7, 0.2]))
      0.875
    """
    is_positive = labels == 1
    _, groups, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores share the mean of their ranks, which count from 1.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[groups]
    num_positive = np.count_nonzero(is_positive)
    num_pairs = num_positive * np.count_nonzero(~is_positive)
    lowest = num_positive * (num_positive + 1) / 2
    return float((ranks[is_positive].sum() - lowest) / num_pairs)


def draw_log(source: SyntheticYambdaSource, seed: int) -> tuple[EventLog, np.ndarray]:
    """Returns a log, and the probability of a listen to half of the item or more.

    Args:
      source: sizes of the log.
      seed: seed of the teacher and of the events, at least 0.
    """
    teacher = train.random_generator(seed=seed, stream=TEACHER_STREAM)
    artists = train.ZipfIds(vocabulary_size=source.num_artists, exponent=ZIPF_EXPONENT)
    album_artists = 1 + artists.draw(teacher, source.num_albums)
    item_albums = teacher.integers(source.num_albums, size=source.num_items)
    item_artists = album_artists[item_albums]
    events = train.random_generator(seed=seed, stream=LOG_STREAM)
    users, times = _draw_times(events, source)
    columns = {
        "uid": users,
        "timestamp": times,
        "item_id": _draw_items(events, users, source.num_items),
        "is_organic": events.integers(2, size=len(users)),
    }
    logits = _draw_logits(teacher, source, columns, item_artists)
    logits += train.bias_of_rate(logits, LISTENED_RATE)
    probabilities = 0.5 * (1.0 + np.tanh(0.5 * logits))
    is_listened = events.random(len(users)) < probabilities
    columns["event_type"] = _draw_types(events, probabilities)
    columns["played_ratio_pct"] = np.where(is_listened, 100, 0)
    log = EventLog.of_columns(
        columns,
        item_artists=item_artists,
        item_albums=1 + item_albums,
        name="the synthetic log",
    )
    # The events are sorted already, so the log keeps their order.
    return log, probabilities[in_training_period(times)]


def _draw_times(
    generator: np.random.Generator, source: SyntheticYambdaSource
) -> tuple[np.ndarray, np.ndarray]:
    """Returns users and times of all events, sorted by both."""
    num_users = source.num_users
    mean_of_log = np.log(source.events_per_user) - EVENTS_SPREAD**2 / 2
    counts = generator.lognormal(mean_of_log, EVENTS_SPREAD, num_users)
    users = np.repeat(np.arange(num_users), np.maximum(counts.astype(int), 1))
    hours = generator.uniform(0, 24, num_users)[users]
    hours = generator.normal(hours, HOURS_SPREAD) % 24
    days = generator.integers(source.num_days, size=len(users))
    times = days * SECONDS_PER_DAY + (hours * SECONDS_PER_HOUR).astype(int)
    times -= times % TIME_STEP
    return users, times[np.lexsort((times, users))]


def _draw_items(
    generator: np.random.Generator, users: np.ndarray, num_items: int
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
    law = train.ZipfIds(vocabulary_size=num_items, exponent=ZIPF_EXPONENT)
    return law.draw(generator, len(users))[source]


def _draw_logits(
    generator: np.random.Generator,
    source: SyntheticYambdaSource,
    columns: Mapping[str, np.ndarray],
    item_artists: np.ndarray,
) -> np.ndarray:
    """Returns the teacher's logits of events, without the common bias."""
    users, items, times = (columns[c] for c in ("uid", "item_id", "timestamp"))
    num_users, num_items = source.num_users, source.num_items
    taste_seconds = TASTE_DAYS * SECONDS_PER_DAY
    num_tastes = 1 + -(-source.num_days // TASTE_DAYS)
    first_change = generator.integers(taste_seconds, size=num_users)
    turns = (times + first_change[users]) // taste_seconds
    user_vectors = generator.normal(size=(num_users, num_tastes, TASTE_RANK))
    artist_vectors = generator.normal(size=(source.num_artists + 1, TASTE_RANK))
    item_vectors = np.sqrt(ARTIST_SHARE) * artist_vectors[item_artists]
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
        + ORGANIC_EFFECT * (2 * columns["is_organic"] - 1)
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
