"""Synthetic click log whose ids come and go, for tables with 64-bit ids.

A dynamic table with one place per living id can learn all ids. In a static table with
the same size, ids collide.
"""

import dataclasses
from typing import Final, Literal

import numpy as np

from tpu_embedding.dynamic.vocabulary import Dynamic
from tpu_embedding.tools.data.batch import SyntheticSource
from tpu_embedding.tools.data.teacher import (
    GOLDEN_RATIO,
    INTERACTION_RANK,
    INTERACTION_SCALE,
    WORD,
    Inputs,
    TeacherDataset,
    ZipfIds,
    mix64,
)

EFFECT_SCALE: Final = 1.0
"""Standard deviation of an id's effect on the logit, for users and for items."""

DIRECTORY_BYTES: Final = 16
"""Bytes that a dynamic table needs per place, for key and score."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticStreamSource(SyntheticSource):
    """A synthetic click log whose ids come and go. It reads no files.

    Attributes:
      num_users: number of users alive at the same time.
      num_items: number of items alive at the same time.
      life_steps: number of training steps that an id is alive.
      evaluation_step: training step, at least the run's last step. The held-out samples
        use the ids that are alive at this step.
      num_evaluation_samples: number of held-out samples.
      vocabulary: table kind. `"hashed"` tables use the same memory as `"dynamic"`
        tables, and `"unlimited"` tables have a row for every id.
      capacity_ratio: dynamic table capacity, divided by the number of living ids.
      row_bytes: bytes for a row and its slot variables. The size of hashed tables
        depends on this number.
      zipf_exponent: skew in the ids; 0 is uniform.

    Example:
      >>> source = SyntheticStreamSource(
      ...     num_users=100,
      ...     num_items=50,
      ...     life_steps=10,
      ...     evaluation_step=20,
      ...     num_evaluation_samples=10,
      ... )
      >>> batch = source.open(None, batch_size=4, seed=0).train_batch(0)
      >>> batch.features["user"].dtype
      dtype('uint64')
    """

    num_users: int
    num_items: int
    life_steps: int
    evaluation_step: int
    num_evaluation_samples: int
    vocabulary: Literal["dynamic", "hashed", "unlimited"] = "dynamic"
    capacity_ratio: float = 1.3
    row_bytes: int = 128
    zipf_exponent: float = 1.0

    def draw(self, *, batch_size: int, seed: int) -> "SyntheticStream":
        """Builds the data set."""
        return SyntheticStream(self, batch_size=batch_size, seed=seed)

    def table_size(self, living_ids: int) -> int | Dynamic:
        """Computes a table's number of rows, or its dynamic vocabulary."""
        if self.vocabulary == "unlimited":
            # Ids born after the evaluation step don't need rows.
            last_life = (self.evaluation_step + self.life_steps - 1) // self.life_steps
            return living_ids * (last_life + 1)
        dynamic = Dynamic(capacity=round(self.capacity_ratio * living_ids))
        if self.vocabulary == "dynamic":
            return dynamic
        num_bytes = dynamic.num_places * (self.row_bytes + DIRECTORY_BYTES)
        return num_bytes // self.row_bytes


class SyntheticStream(TeacherDataset):
    """Clicks by users on items, whose ids live for `life_steps` training steps each.

    A feature has one place per living id, and popularity of places follows `ZipfIds`.
    Each place has an id for one lifetime, and then a new id. The teacher's logit for a
    sample is

        b + e_user + e_item + <f_user, g_item>

    Effects `e` and vectors `f` and `g` are hashes of the id, uniform around 0. Features
    are `[batch]`: uint64 ids for dynamic tables, otherwise int32 rows. Labels are
    the same for every `vocabulary`.
    """

    click_rate = 0.3

    def __init__(self, source: SyntheticStreamSource, *, batch_size: int, seed: int):
        super().__init__(source, batch_size=batch_size, seed=seed)
        self.evaluation_step = source.evaluation_step
        living = {"user": source.num_users, "item": source.num_items}
        self._popularity = {
            name: ZipfIds(vocabulary_size=size, exponent=source.zipf_exponent)
            for name, size in living.items()
        }
        self.vocabulary_sizes = {k: source.table_size(n) for k, n in living.items()}

    def _draw_inputs(
        self, generator: np.random.Generator, num_samples: int, step: int
    ) -> Inputs:
        life_steps = self._source.life_steps
        numbers, ids = {}, {}
        for salt, name in enumerate(("item", "user")):
            popularity = self._popularity[name]
            places = popularity.draw(generator, num_samples).astype(np.int64)
            # Ids have different ages at step 0, so that births are spread over the
            # steps.
            ages = (places * GOLDEN_RATIO % 1.0 * life_steps).astype(np.int64)
            num_predecessors = (step + ages) // life_steps
            numbers[name] = places + num_predecessors * popularity.vocabulary_size
            # Each pair of seed and feature has its own first number. uint64 sums wrap.
            first = _hash(np.array([2 * self.seed + salt], np.uint64))
            # `_hash` is a bijection, so different numbers have different ids.
            ids[name] = _hash(first + numbers[name].astype(np.uint64))

        users, items = ids["user"], ids["item"]
        # Salt 1 is for an id's effect. Salts from 2 on are for its vector's elements.
        products = np.zeros(num_samples)
        for salt in range(2, 2 + INTERACTION_RANK):
            products += _uniform(items, salt) * _uniform(users, salt)
        logits = EFFECT_SCALE * _uniform(items, 1) + EFFECT_SCALE * _uniform(users, 1)
        logits += INTERACTION_SCALE / np.sqrt(INTERACTION_RANK) * products

        features = {}
        for name, size in self.vocabulary_sizes.items():
            if isinstance(size, Dynamic):
                features[name] = ids[name]
            elif self._source.vocabulary == "unlimited":
                features[name] = numbers[name].astype(np.int32)
            else:  # Ids are already hashes, so the remainders are random rows.
                features[name] = (ids[name] % np.uint64(size)).astype(np.int32)
        return features, None, logits


def _hash(words: np.ndarray) -> np.ndarray:
    # `WORD` is odd, so multiplying by it is a bijection, like `mix64`.
    return mix64(words * WORD)


def _uniform(ids: np.ndarray, salt: int) -> np.ndarray:
    """Maps ids to uniform numbers with mean 0 and variance 1."""
    return (_hash(ids ^ np.uint64(salt)) * 2.0**-64 - 0.5) * np.sqrt(12.0)
