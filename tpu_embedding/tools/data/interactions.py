"""Synthetic retrieval log: users, their histories and the items they choose.

A two-tower model learns to find a user's next item among hundreds of millions. Memory
does not grow with the vocabularies.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tpu_embedding.field_checks import raise_all
from tpu_embedding.tools.data.argument_checks import count_problems, seed_problems
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.data.criteo_format import splitmix64
from tpu_embedding.tools.data.random_streams import (
    EVALUATION_STREAM,
    TRAIN_STREAM,
    random_generator,
)
from tpu_embedding.tools.data.teacher import TeacherDataset
from tpu_embedding.tools.data.zipf import ZipfIds
from tpu_embedding.types import PADDING_ROW_ID

NUM_COUNTRIES: Final = 250
NUM_DEVICE_KINDS: Final = 20
NUM_CATEGORIES: Final = 1_000

_COUNTRY_SALT: Final = np.uint64(1 << 32)
_CATEGORY_SALT: Final = np.uint64(2 << 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draw:
    """A batch and the hidden groups of its users and items, int `[batch]` each."""

    batch: Batch
    user_groups: np.ndarray
    item_groups: np.ndarray


class Interactions:
    """Users, their histories and the next item that each user chooses.

    Users and items belong to `num_groups` hidden groups of equal weight. A user of
    group `g` chooses an item of group `g` with probability

        p = (1 - noise) + noise / num_groups

    and an item of each other group with probability `noise / num_groups`. Within a
    group, users and items are drawn by popularity (`ZipfIds`). The best score of a pair
    is therefore `log(num_groups * p)` if user and item share a group, and `log(noise)`
    otherwise, relative to the item's log probability over all users.

    Features:

    * "user", "item": int32 `[batch]`.
    * "country", "category": int32 `[batch]`, hashes of the user and of the item. They
      carry no information about the groups.
    * "device": int32 `[batch]`, random.
    * "history": int32 `[batch, history_length]`, earlier items of the user, filled from
      the left and padded with `PADDING_ROW_ID`. Their number is uniform in
      `0 .. history_length`.

    Dense: float32 `[batch, 1]`, the natural log probability of the item over all
    samples. An in-batch softmax needs it to correct for popularity; a real log would
    estimate it from counts. Labels are 1: every sample is a choice.

    Args:
      batch_size: samples per batch.
      seed: seed of the training and evaluation samples, at least 0.
      num_users: rows of the user table.
      num_items: rows of the item table, which "item" and "history" share.
      history_length: maximum number of items in a history.
      num_groups: number of hidden groups, at most `num_users` and `num_items`. More
        groups are harder to learn.
      noise: fraction of choices that are independent of the user, above 0 and below 1.
      zipf_exponent: skew of the ids; 0 is uniform.
      num_evaluation_samples: number of held-out samples. New samples of weight 0 pad
        the last batch.

    Raises:
      ValueError: if arguments are out of range; the message names all of them.

    Example:
      >>> data = Interactions(
      ...     batch_size=4,
      ...     num_users=1_000_000_000,
      ...     num_items=100_000_000,
      ...     history_length=3,
      ...     num_evaluation_samples=10,
      ... )
      >>> batch = data.train_batch(0)
      >>> batch.features["user"].shape, batch.features["history"].shape
      ((4,), (4, 3))
      >>> [int(batch.weights.sum()) for batch in data.evaluation_batches()]
      [4, 4, 2]
    """

    def __init__(
        self,
        *,
        batch_size: int,
        num_users: int,
        num_items: int,
        history_length: int,
        num_evaluation_samples: int,
        seed: int = 0,
        num_groups: int = 32,
        noise: float = 0.2,
        zipf_exponent: float = 1.0,
    ):
        self.batch_size = batch_size
        self.seed = seed
        self.num_evaluation_samples = num_evaluation_samples
        self.history_length = history_length
        self.num_groups = num_groups
        self.noise = noise
        self.vocabulary_sizes = {
            "user": num_users,
            "item": num_items,
            "country": NUM_COUNTRIES,
            "device": NUM_DEVICE_KINDS,
            "category": NUM_CATEGORIES,
        }
        raise_all(list(self._problems(num_users, num_items)))
        # Rows beyond the last whole group are never drawn.
        self._users, self._items = (
            ZipfIds(vocabulary_size=size // num_groups, exponent=zipf_exponent)
            for size in (num_users, num_items)
        )

    def _problems(self, num_users: int, num_items: int) -> Iterator[str]:
        counts = {
            "batch_size": self.batch_size,
            "history_length": self.history_length,
            "num_evaluation_samples": self.num_evaluation_samples,
            "num_groups": self.num_groups,
            "num_users": num_users,
            "num_items": num_items,
        }
        problems = list(count_problems("Interactions", **counts))
        yield from problems
        if not problems and self.num_groups > min(num_users, num_items):
            yield (
                "Interactions.num_groups must be at most num_users and num_items, "
                f"{num_users} and {num_items}, got {self.num_groups}"
            )
        yield from seed_problems("Interactions", self.seed)
        if not 0.0 < self.noise < 1.0:
            yield f"Interactions.noise must be between 0 and 1, got {self.noise!r}"

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        return self._draw(TRAIN_STREAM, step).batch

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out samples once; samples of weight 0 pad the last batch."""
        for draw in self._held_out():
            yield draw.batch

    def teacher_log_loss(self) -> float:
        """Returns the in-batch softmax loss of the true scores, in nats.

        It is the mean over the held-out samples of the `in_batch_softmax` loss of
        `tools/train/models/two_tower.py`, with the best scores of the class docstring.
        No model has a lower expected loss. The loss depends on the batch size, which is
        the number of candidates.
        """
        same = math.log(self.num_groups * (1 - self.noise) + self.noise)
        total = 0.0
        for draw in self._held_out():
            # A user has only two distinct scores, so counts of candidates suffice.
            counts = np.bincount(draw.item_groups, minlength=self.num_groups)
            num_same = counts[draw.user_groups]
            weight = num_same * math.exp(same) + (self.batch_size - num_same) * (
                self.noise
            )
            is_same = draw.user_groups == draw.item_groups
            own = np.where(is_same, same, math.log(self.noise))
            total += float(np.sum(draw.batch.weights * (np.log(weight) - own)))
        return total / self.num_evaluation_samples

    def _held_out(self) -> Iterator[_Draw]:
        num_batches = -(-self.num_evaluation_samples // self.batch_size)
        for number in range(num_batches):
            draw = self._draw(EVALUATION_STREAM, number)
            places = number * self.batch_size + np.arange(self.batch_size)
            weights = (places < self.num_evaluation_samples).astype(np.float32)
            batch = dataclasses.replace(draw.batch, weights=weights)
            yield dataclasses.replace(draw, batch=batch)

    def _draw(self, stream: int, step: int) -> _Draw:
        generator = random_generator(seed=self.seed, stream=stream, step=step)
        num_samples, length = self.batch_size, self.history_length
        user_groups = generator.integers(self.num_groups, size=num_samples)
        users = self._users.draw(generator, num_samples)
        users = users * self.num_groups + user_groups.astype(np.int32)
        item_groups = self._draw_item_groups(generator, user_groups)
        ranks = self._items.draw_ranks(generator, num_samples)
        items = self._items.ids_of_ranks(ranks)
        items = items * self.num_groups + item_groups.astype(np.int32)
        earlier_groups = self._draw_item_groups(
            generator, np.repeat(user_groups, length)
        )
        history = self._items.draw(generator, (num_samples, length)) * self.num_groups
        history += earlier_groups.reshape(history.shape).astype(np.int32)
        num_earlier = generator.integers(length + 1, size=(num_samples, 1))
        history[np.arange(length) >= num_earlier] = PADDING_ROW_ID
        log_probabilities = np.log(self._items.probabilities(ranks))
        log_probabilities -= math.log(self.num_groups)
        batch = Batch(
            features={
                "user": users,
                "history": history,
                "country": _hashed(users, _COUNTRY_SALT, NUM_COUNTRIES),
                "device": generator.integers(
                    NUM_DEVICE_KINDS, size=num_samples, dtype=np.int32
                ),
                "item": items,
                "category": _hashed(items, _CATEGORY_SALT, NUM_CATEGORIES),
            },
            dense=log_probabilities.astype(np.float32)[:, None],
            labels=np.ones(num_samples, np.float32),
            weights=np.ones(num_samples, np.float32),
        )
        return _Draw(batch=batch, user_groups=user_groups, item_groups=item_groups)

    def _draw_item_groups(
        self, generator: np.random.Generator, groups: np.ndarray
    ) -> np.ndarray:
        """Draws the item group that each user chooses, given the user groups."""
        any_group = generator.integers(self.num_groups, size=groups.shape)
        return np.where(generator.random(groups.shape) < self.noise, any_group, groups)


# A run compares its loss with the teacher's loss if its data is a TeacherDataset.
TeacherDataset.register(Interactions)


def _hashed(ids: np.ndarray, salt: np.uint64, size: int) -> np.ndarray:
    return (splitmix64(ids.astype(np.uint64) ^ salt) % np.uint64(size)).astype(np.int32)
