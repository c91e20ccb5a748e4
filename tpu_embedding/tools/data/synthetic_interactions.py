"""Synthetic retrieval log: users, their histories and the items they choose.

Ids are computed, so memory does not grow with the vocabularies.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tpu_embedding.tools.data.batch import Batch, SyntheticSource
from tpu_embedding.tools.data.teacher import (
    EVALUATION_STREAM,
    TRAIN_STREAM,
    ZipfIds,
    random_generator,
    splitmix64,
)
from tpu_embedding.types import PADDING_ROW_ID

NUM_COUNTRIES: Final = 250
NUM_DEVICE_KINDS: Final = 20
NUM_CATEGORIES: Final = 1_000

_COUNTRY_SALT: Final = np.uint64(1 << 32)
_CATEGORY_SALT: Final = np.uint64(2 << 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InteractionsSource(SyntheticSource):
    """A synthetic retrieval log, in which users choose items. It reads no files.

    Attributes:
      num_users: rows in the user table.
      num_items: rows in the item table, which the features "item" and "history" share.
      history_length: maximum number of items in a history.
      num_evaluation_samples: number of held-out samples. Newly drawn samples with
        weight 0 pad the last batch.
      num_groups: number of hidden groups that users and items belong to. It can't
        exceed `num_users` or `num_items`. More groups are harder to learn.
      noise: share of choices that don't depend on the user, in (0, 1).
      zipf_exponent: skew in the ids; 0 is uniform.

    Example:
      >>> source = InteractionsSource(
      ...     num_users=1000, num_items=100, history_length=3, num_evaluation_samples=10
      ... )
      >>> batch = source.open(None, batch_size=4, seed=0).train_batch(0)
      >>> batch.features["history"].shape
      (4, 3)
    """

    num_users: int
    num_items: int
    history_length: int
    num_evaluation_samples: int
    num_groups: int = 32
    noise: float = 0.2
    zipf_exponent: float = 1.0

    def draw(self, *, batch_size: int, seed: int) -> "Interactions":
        """Builds the data set."""
        return Interactions(self, batch_size=batch_size, seed=seed)


class Interactions:
    """Users, their histories and the next item that each user chooses.

    Users and items belong to `num_groups` hidden groups, which are equally likely. A
    user in group `g` chooses an item in group `g` with probability

        p = (1 - noise) + noise / num_groups

    and an item in each other group with probability `noise / num_groups`.
    Within a group, popularity follows `ZipfIds`.

    Features are int32 `[batch]`, except "history", which is `[batch, history_length]`,
    padded on the right. `Batch.dense` is float32 `[batch, 1]`. It has the natural
    logarithm of the probability that a sample contains the item. Labels are 1.

    Example:
      >>> source = InteractionsSource(
      ...     num_users=1_000_000_000,
      ...     num_items=100_000_000,
      ...     history_length=3,
      ...     num_evaluation_samples=10,
      ... )
      >>> data = source.open(None, batch_size=4, seed=0)
      >>> batch = data.train_batch(0)
      >>> batch.features["user"].shape, batch.features["history"].shape
      ((4,), (4, 3))
      >>> [int(batch.weights.sum()) for batch in data.evaluation_batches()]
      [4, 4, 2]
    """

    def __init__(self, source: InteractionsSource, *, batch_size: int, seed: int):
        self.batch_size, self.seed, self._source = batch_size, seed, source
        self.num_evaluation_samples = source.num_evaluation_samples
        self.vocabulary_sizes = {
            "user": source.num_users,
            "item": source.num_items,
            "country": NUM_COUNTRIES,
            "device": NUM_DEVICE_KINDS,
            "category": NUM_CATEGORIES,
        }
        # Groups have equal sizes, so the last rows of a table may never be drawn.
        self._users, self._items = (
            ZipfIds(
                vocabulary_size=size // source.num_groups, exponent=source.zipf_exponent
            )
            for size in (source.num_users, source.num_items)
        )

    def train_batch(self, step: int) -> Batch:
        return self._draw(TRAIN_STREAM, step)[0]

    def evaluation_batches(self) -> Iterator[Batch]:
        yield from (batch for batch, _, _ in self._held_out())

    def teacher_log_loss(self) -> float:
        """Computes the lowest expected in-batch softmax loss, in nats.

        The loss depends on the batch size, which is the number of candidates.
        """
        num_groups, noise = self._source.num_groups, self._source.noise
        # Relative to the item's log probability over all users, the best score is
        # `log(num_groups * p)` if user and item share a group, and `log(noise)`
        # otherwise.
        same = math.log(num_groups * (1 - noise) + noise)
        total = 0.0
        for batch, user_groups, item_groups in self._held_out():
            # A user has only two distinct scores, so it's enough to count the
            # candidates with each score.
            counts = np.bincount(item_groups, minlength=num_groups)
            num_same = counts[user_groups]
            num_others = self.batch_size - num_same
            weight = num_same * math.exp(same) + num_others * noise
            own = np.where(user_groups == item_groups, same, math.log(noise))
            total += float(np.sum(batch.weights * (np.log(weight) - own)))
        return total / self.num_evaluation_samples

    def _held_out(self) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
        for start in range(0, self.num_evaluation_samples, self.batch_size):
            draw = self._draw(EVALUATION_STREAM, start // self.batch_size)
            places = start + np.arange(self.batch_size)
            # Padding samples are drawn, not copied. Their items are candidates in the
            # softmax, so copies of one item would distort the loss.
            weights = (places < self.num_evaluation_samples).astype(np.float32)
            yield dataclasses.replace(draw[0], weights=weights), *draw[1:]

    def _draw(self, stream: int, step: int) -> tuple[Batch, np.ndarray, np.ndarray]:
        """Draws a batch, its user groups and its item groups."""
        generator = random_generator(seed=self.seed, stream=stream, step=step)
        size, length = self.batch_size, self._source.history_length
        num_groups = self._source.num_groups

        def rows(places: np.ndarray, groups: np.ndarray) -> np.ndarray:
            # A row modulo `num_groups` is the row's group, so groups need no table.
            # With int64 groups, ids would also be int64.
            return places * num_groups + groups.astype(np.int32)

        user_groups = generator.integers(num_groups, size=size)
        users = rows(self._users.draw(generator, size), user_groups)
        item_groups = self._draw_item_groups(generator, user_groups)
        ranks = self._items.draw_ranks(generator, size)
        items = rows(self._items.ids_of_ranks(ranks), item_groups)
        earlier = user_groups[:, None].repeat(length, axis=1)
        earlier = self._draw_item_groups(generator, earlier)
        history = rows(self._items.draw(generator, earlier.shape), earlier)
        num_earlier = generator.integers(length + 1, size=(size, 1))
        history[np.arange(length) >= num_earlier] = PADDING_ROW_ID
        # `in_batch_softmax` corrects for popularity with these probabilities. For a
        # real log, estimate them from counts.
        log_probabilities = np.log(self._items.probabilities(ranks))
        log_probabilities -= math.log(num_groups)
        devices = generator.integers(NUM_DEVICE_KINDS, size=size, dtype=np.int32)
        batch = Batch(
            features={
                "user": users,
                "history": history,
                # Hashes don't reveal the hidden groups.
                "country": _hashed(users, _COUNTRY_SALT, NUM_COUNTRIES),
                "device": devices,
                "item": items,
                "category": _hashed(items, _CATEGORY_SALT, NUM_CATEGORIES),
            },
            dense=log_probabilities.astype(np.float32)[:, None],
            labels=np.ones(size, np.float32),
            weights=np.ones(size, np.float32),
        )
        return batch, user_groups, item_groups

    def _draw_item_groups(
        self, generator: np.random.Generator, groups: np.ndarray
    ) -> np.ndarray:
        any_group = generator.integers(self._source.num_groups, size=groups.shape)
        is_noise = generator.random(groups.shape) < self._source.noise
        # Noise may also choose the user's own group; see `p` in `Interactions`.
        return np.where(is_noise, any_group, groups)


def _hashed(ids: np.ndarray, salt: np.uint64, size: int) -> np.ndarray:
    return (splitmix64(ids.astype(np.uint64) ^ salt) % np.uint64(size)).astype(np.int32)
