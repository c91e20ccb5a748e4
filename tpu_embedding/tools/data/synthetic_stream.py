"""Synthetic click log whose ids come and go, for tables of 64-bit ids.

Users and items are born, are used for a life time, and never come back. A dynamic table
with a place per living id can learn them all. A static table of that size hashes ids to
rows, and mixes them.
"""

import dataclasses
from typing import Final, Literal

import numpy as np

from tpu_embedding.dynamic.vocabulary import Dynamic
from tpu_embedding.tools.data.batch import SyntheticSource
from tpu_embedding.tools.data.teacher import (
    GOLDEN_RATIO,
    WORD,
    Inputs,
    TeacherDataset,
    ZipfIds,
    mix64,
)

EFFECT_SCALE: Final = 1.0
"""Standard deviation of the effect of an id on the logit, for users and for items."""

INTERACTION_RANK: Final = 2
INTERACTION_SCALE: Final = 0.6
"""Standard deviation of the user-item interaction's contribution to the logit."""

DIRECTORY_BYTES: Final = 16
"""Bytes of keys and scores per place of a dynamic table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticStreamSource(SyntheticSource):
    """Source of `SyntheticStream`; reads no file.

    Attributes:
      num_users: number of users that live at a time.
      num_items: number of items that live at a time.
      life_steps: number of training steps that an id lives.
      evaluation_step: training step whose living ids the held-out samples use, at
        least the number of steps.
      num_evaluation_samples: number of held-out samples.
      vocabulary: the tables: `"dynamic"`, `"hashed"` of the same memory, or
        `"unlimited"`, with a row for every id.
      capacity_ratio: capacity of a dynamic table over the number of living ids.
      row_bytes: bytes of a row and its slot variables, for the size of hashed tables.
      zipf_exponent: skew of the ids; 0 is uniform.
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
        """Returns the data set."""
        return SyntheticStream(self, batch_size=batch_size, seed=seed)

    def table_size(self, living_ids: int) -> int | Dynamic:
        """Returns the rows of a feature's table, or its dynamic vocabulary."""
        if self.vocabulary == "unlimited":
            # No id that is born after the evaluation step has a row.
            last_life = (self.evaluation_step + self.life_steps - 1) // self.life_steps
            return living_ids * (last_life + 1)
        dynamic = Dynamic(capacity=round(self.capacity_ratio * living_ids))
        if self.vocabulary == "dynamic":
            return dynamic
        num_bytes = dynamic.num_places * (self.row_bytes + DIRECTORY_BYTES)
        return num_bytes // self.row_bytes


class SyntheticStream(TeacherDataset):
    """Clicks of users on items that live for `life_steps` training steps each.

    A feature has as many places as living ids. The popularity of a place follows
    `ZipfIds`. After a life time, a new id takes the place. The births of a feature are
    spread evenly over the steps. The teacher's logit of a sample is

        b + e_user + e_item + <f_user, g_item>

    Effects `e` and vectors `f` and `g` are hashes of the id, uniform around 0. So a
    batch is a function of the seed and the step alone.

    Features: "user" and "item", `[batch]`. What they hold depends on `vocabulary`; all
    else is the same, bit by bit:

    * `"dynamic"`: uint64 ids, which are hashes of a counter by a bijection.
    * `"hashed"`: int32, the id modulo the rows of a static table that takes as many
      bytes as the dynamic one, keys and scores included.
    * `"unlimited"`: int32, the number of the id, counted from 0.

    Attributes:
      vocabulary_sizes: sizes of the tables.
    """

    click_rate = 0.3

    def __init__(self, source: SyntheticStreamSource, *, batch_size: int, seed: int):
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            num_evaluation_samples=source.num_evaluation_samples,
        )
        self._source = source
        living_ids = {"user": source.num_users, "item": source.num_items}
        self._ids = {
            name: ZipfIds(vocabulary_size=number, exponent=source.zipf_exponent)
            for name, number in living_ids.items()
        }
        self.vocabulary_sizes = {
            name: source.table_size(number) for name, number in living_ids.items()
        }

    def _draw_inputs(
        self, generator: np.random.Generator, num_samples: int, step: int | None = None
    ) -> Inputs:
        source = self._source
        step = source.evaluation_step if step is None else step
        features, logits, factors = {}, np.zeros(num_samples), []
        for salt, name in enumerate(("item", "user")):
            law = self._ids[name]
            places = law.draw(generator, num_samples).astype(np.int64)
            # The age of each place at step 0 spreads the births over the steps.
            ages = (places * GOLDEN_RATIO % 1.0 * source.life_steps).astype(np.int64)
            lives = (step + ages) // source.life_steps
            numbers = places + lives * law.vocabulary_size
            start = _hash(np.array([2 * self.seed + salt], np.uint64))
            ids = _hash(start + numbers.astype(np.uint64))
            features[name] = self._held_by_feature(name, numbers, ids)
            logits += EFFECT_SCALE * _unit(ids, 1)
            factors.append([_unit(ids, 2 + k) for k in range(INTERACTION_RANK)])
        products = np.sum(np.multiply(*factors), axis=0)
        logits += INTERACTION_SCALE / np.sqrt(INTERACTION_RANK) * products
        return Inputs(features=features, logits=logits)

    def _held_by_feature(
        self, name: str, numbers: np.ndarray, ids: np.ndarray
    ) -> np.ndarray:
        """Returns what a feature holds for ids of some numbers."""
        size = self.vocabulary_sizes[name]
        if isinstance(size, Dynamic):
            return ids
        if self._source.vocabulary == "unlimited":
            return numbers.astype(np.int32)
        # The ids are hashes already.
        return (ids % np.uint64(size)).astype(np.int32)


def _hash(words: np.ndarray) -> np.ndarray:
    return mix64(words * WORD)


def _unit(ids: np.ndarray, salt: int) -> np.ndarray:
    """Returns a number of mean 0 and variance 1 per id, uniform over the ids."""
    return (_hash(ids ^ np.uint64(salt)) * 2.0**-64 - 0.5) * np.sqrt(12.0)
