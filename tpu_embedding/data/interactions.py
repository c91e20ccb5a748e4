"""Users and the items they chose, drawn without a table: a retrieval log at full scale.

A two-tower model is asked which item a user takes, out of hundreds of millions. Nothing
here takes memory of the size of a vocabulary. `training/random_source.py` opens it for
run configs.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tpu_embedding.data.batch import Batch
from tpu_embedding.data.criteo_format import splitmix64
from tpu_embedding.data.teacher import (
    EVALUATION_STREAM,
    TRAIN_STREAM,
    TeacherDataset,
    count_problems,
    is_int,
    random_generator,
)
from tpu_embedding.data.zipf import ZipfIds
from tpu_embedding.types import PADDING_ROW_ID

NUM_COUNTRIES: Final = 250
NUM_DEVICE_KINDS: Final = 20
NUM_CATEGORIES: Final = 1_000

_COUNTRY_SALT: Final = np.uint64(1 << 32)
_CATEGORY_SALT: Final = np.uint64(2 << 32)


class PopularIds(ZipfIds):
    """`ZipfIds` that come with the logarithm of the probability of each drawn id."""

    def draw_with_log_probabilities(
        self, generator: np.random.Generator, shape: int | tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns int32 ids of the given shape, and float64 of the same shape.

        Example:
          >>> law = PopularIds(vocabulary_size=3, exponent=0.0)
          >>> _, log_probabilities = law.draw_with_log_probabilities(
          ...     np.random.default_rng(0), 2
          ... )
          >>> np.exp(log_probabilities).round(6).tolist()
          [0.333333, 0.333333]
        """
        ranks = self._ranks(generator.random(shape))
        mass = self._mass(ranks + 2.0) - self._mass(ranks + 1.0)
        total = self._mass(np.asarray(self.vocabulary_size + 1.0))
        return self.ids_of_ranks(ranks), np.log(mass / total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draw:
    """Samples, with what only the teacher knows: the groups of users and items."""

    batch: Batch
    user_groups: np.ndarray
    item_groups: np.ndarray


class Interactions:
    """Users, their histories, and the item that each takes next.

    Users and items belong to `num_groups` hidden groups of equal weight. A user of
    group `g` takes items of group `g` with the probability

        p = (1 - noise) + noise / num_groups

    and those of each other group with `noise / num_groups`; within a group both users
    and items are drawn by popularity (`ZipfIds`). So the best score of a pair is
    `log(num_groups * p)` if user and item share a group and `log(noise)` if not, beside
    the logarithm of the item's probability, whoever the user is.

    Features: int32 `[batch]` for "user", "country" (of the user), "device" (any),
    "item" and "category" (of the item); int32 `[batch, history_length]` for "history",
    earlier items of the user, filled from the left and padded with `PADDING_ROW_ID`;
    their number is uniform in `0 .. history_length`. Country and category are hashes of
    user and item: they tell them apart, but not their groups.
    Dense: float32 `[batch, 1]`, the natural logarithm of the item's probability over
    all samples, which a log's counts would give, and the correction of an in-batch
    softmax needs. Labels are 1: every sample is a choice.

    Args:
      batch_size: samples per batch.
      seed: of the training and the evaluation samples; at least 0.
      num_users: rows of the users' table.
      num_items: rows of the items' table; "item" and "history" share it.
      history_length: most items of a history.
      num_groups: at most as many as users and items; more are harder to learn.
      noise: share of choices that are independent of the user, above 0 and below 1.
      zipf_exponent: skew of the ids; 0 is uniform.
      num_evaluation_samples: held-out samples. The last batch is filled up with
        samples of weight 0, which are nobody's copies.

    Raises:
      ValueError: naming every argument that is out of range.

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
        problems = list(self._problems(num_users, num_items))
        if problems:
            raise ValueError("; ".join(problems) + ".")
        # Whole groups only: with many rows per group, the few beyond are no loss.
        self._users, self._items = (
            PopularIds(vocabulary_size=size // num_groups, exponent=zipf_exponent)
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
        if not is_int(self.seed) or self.seed < 0:
            yield f"Interactions.seed must be an int of at least 0, got {self.seed!r}"
        if not 0.0 < self.noise < 1.0:
            yield f"Interactions.noise must be between 0 and 1, got {self.noise!r}"

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        return self._draw(TRAIN_STREAM, step).batch

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out samples once."""
        for draw in self._held_out():
            yield draw.batch

    def teacher_log_loss(self) -> float:
        """Returns the in-batch softmax loss of the true scores, in nats.

        The mean over the held-out samples of the loss that `in_batch_softmax` of
        `training/models/two_tower.py` has with the scores of the class docstring. It
        depends on the batch size, which is the number of candidates; up to the luck of
        the draw, no model has a lower one.
        """
        same = math.log(self.num_groups * (1 - self.noise) + self.noise)
        total = 0.0
        for draw in self._held_out():
            # Everybody's scores are two numbers: count the candidates of each.
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
        item_groups = self._choices(generator, user_groups)
        items, log_probabilities = self._items.draw_with_log_probabilities(
            generator, num_samples
        )
        items = items * self.num_groups + item_groups.astype(np.int32)
        earlier_groups = self._choices(generator, np.repeat(user_groups, length))
        history = self._items.draw(generator, (num_samples, length)) * self.num_groups
        history += earlier_groups.reshape(history.shape).astype(np.int32)
        num_earlier = generator.integers(length + 1, size=(num_samples, 1))
        history[np.arange(length) >= num_earlier] = PADDING_ROW_ID
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

    def _choices(
        self, generator: np.random.Generator, groups: np.ndarray
    ) -> np.ndarray:
        """Returns the groups of items that users of some groups choose."""
        any_group = generator.integers(self.num_groups, size=groups.shape)
        return np.where(generator.random(groups.shape) < self.noise, any_group, groups)


# A run compares its loss with the teacher's, for data that have one.
TeacherDataset.register(Interactions)


def _hashed(ids: np.ndarray, salt: np.uint64, size: int) -> np.ndarray:
    return (splitmix64(ids.astype(np.uint64) ^ salt) % np.uint64(size)).astype(np.int32)
