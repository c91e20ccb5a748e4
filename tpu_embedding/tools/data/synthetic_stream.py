"""Synthetic click log whose ids come and go, for tables of 64-bit ids.

Users and items are born, are used for a life time, and never come back. A dynamic table
with a place per living id can learn them all. A static table of that size hashes ids to
rows, and mixes them.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import numpy as np

from tpu_embedding.dynamic import Dynamic
from tpu_embedding.tools.data.argument_checks import count_problems
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.data.random_streams import TRAIN_STREAM, random_generator
from tpu_embedding.tools.data.teacher import Inputs, TeacherDataset
from tpu_embedding.tools.data.zipf import GOLDEN_RATIO

Vocabulary = Literal["dynamic", "hashed", "unlimited"]
"""Contents of the features: 64-bit ids, rows that ids share, or rows of their own."""

DEFAULT_LIVE_IDS: Final[Mapping[str, int]] = MappingProxyType(
    {"user": 2_000, "item": 1_000}
)
"""Number of ids of each feature that live at any step."""

EFFECT_SCALE: Final = 1.0
"""Standard deviation of the effect of an id on the logit, for users and for items."""

INTERACTION_RANK: Final = 2
INTERACTION_SCALE: Final = 0.6
"""Standard deviation of the user-item interaction's contribution to the logit."""

DIRECTORY_BYTES: Final = 16
"""Bytes of keys and scores per place of a dynamic table."""


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
    * `"unlimited"`: int32, the number of the id, from 0 to `num_ids(name, steps) - 1`.

    `vocabulary_sizes` has the sizes of the tables. The held-out samples use the ids
    that live at `evaluation_step`.

    Args:
      batch_size: samples per batch.
      seed: seed of the teacher and of all samples, at least 0.
      live_ids: number of living ids of "user" and of "item".
      life_steps: number of training steps that an id lives.
      evaluation_step: training step whose living ids the held-out samples use. An
        unlimited table has no rows for ids that are born after it.
      vocabulary: what the features hold.
      capacity_ratio: capacity of a dynamic table over the number of living ids.
      row_bytes: bytes of a row and its slot variables, for the size of hashed tables.
      zipf_exponent: skew of the ids; 0 is uniform.
      click_rate: expected mean of the labels at `evaluation_step`.
      num_evaluation_samples: number of held-out samples.

    Raises:
      ValueError: if arguments are out of range; the message names all of them.

    Example:
      >>> data = SyntheticStream(batch_size=4, num_evaluation_samples=10)
      >>> data.train_batch(0).features["user"].dtype
      dtype('uint64')
    """

    vocabulary_sizes: dict[str, Any]

    def __init__(
        self,
        *,
        batch_size: int = 2048,
        seed: int = 0,
        live_ids: Mapping[str, int] = DEFAULT_LIVE_IDS,
        life_steps: int = 500,
        evaluation_step: int = 2_000,
        vocabulary: Vocabulary = "dynamic",
        capacity_ratio: float = 1.3,
        row_bytes: int = 128,
        zipf_exponent: float = 1.0,
        click_rate: float = 0.3,
        num_evaluation_samples: int = 102_400,
    ):
        self.life_steps = life_steps
        self.evaluation_step = evaluation_step
        self.live_ids = dict(live_ids)
        self.vocabulary: Vocabulary = vocabulary
        self.capacity_ratio = capacity_ratio
        self.row_bytes = row_bytes
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            num_evaluation_samples=num_evaluation_samples,
            vocabulary_sizes=live_ids,
            zipf_exponent=zipf_exponent,
            click_rate=click_rate,
        )
        self.vocabulary_sizes = {name: self._size_of(name) for name in self.live_ids}

    def _size_of(self, name: str) -> int | Dynamic:
        """Returns the rows of a feature's table, or its dynamic vocabulary."""
        if self.vocabulary == "unlimited":
            return self.num_ids(name, self.evaluation_step + 1)
        capacity = round(self.capacity_ratio * self.live_ids[name])
        dynamic = Dynamic(capacity=capacity)
        if self.vocabulary == "dynamic":
            return dynamic
        num_bytes = dynamic.num_places * (self.row_bytes + DIRECTORY_BYTES)
        return num_bytes // self.row_bytes

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from count_problems(
            "SyntheticStream",
            life_steps=self.life_steps,
            evaluation_step=self.evaluation_step,
            row_bytes=self.row_bytes,
        )
        if self.vocabulary not in get_args(Vocabulary):
            yield (
                f"SyntheticStream.vocabulary must be one of {get_args(Vocabulary)}, "
                f"got {self.vocabulary!r}"
            )
        if not (np.isfinite(self.capacity_ratio) and self.capacity_ratio >= 1):
            yield (
                "SyntheticStream.capacity_ratio must be a finite number of at least 1, "
                f"got {self.capacity_ratio!r}; 1.33 leaves room for chance"
            )
        if self.live_ids.keys() != DEFAULT_LIVE_IDS.keys():
            yield (
                "SyntheticStream.live_ids must name the features "
                f"{sorted(DEFAULT_LIVE_IDS)}, got {sorted(self.live_ids)}"
            )
        for name, size in self.live_ids.items():
            yield from count_problems(
                "SyntheticStream", **{f"live_ids[{name!r}]": size}
            )

    def num_ids(self, name: str, steps: int) -> int:
        """Returns a number above all numbers of ids of the steps `0 .. steps - 1`."""
        last_life = (steps + self.life_steps - 2) // self.life_steps
        return self.live_ids[name] * (last_life + 1)

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        generator = random_generator(seed=self.seed, stream=TRAIN_STREAM, step=step)
        inputs = self._inputs_at(step, generator, self.batch_size)
        batch, _ = self._label(generator, inputs)
        return batch

    def _draw_inputs(self, generator: np.random.Generator, num_samples: int) -> Inputs:
        return self._inputs_at(self.evaluation_step, generator, num_samples)

    def _inputs_at(
        self, step: int, generator: np.random.Generator, num_samples: int
    ) -> Inputs:
        """Draws samples of the ids that live at `step`."""
        features, logits, factors = {}, np.zeros(num_samples), []
        for salt, (name, law) in enumerate(sorted(self._ids.items())):
            places = law.draw(generator, num_samples).astype(np.int64)
            # The age of each place at step 0 spreads the births over the steps.
            ages = (places * GOLDEN_RATIO % 1.0 * self.life_steps).astype(np.int64)
            lives = (step + ages) // self.life_steps
            numbers = places + lives * law.vocabulary_size
            start = _mix(np.array([2 * self.seed + salt], np.uint64))
            ids = _mix(start + numbers.astype(np.uint64))
            features[name] = self._held_by_feature(name, numbers, ids)
            logits += EFFECT_SCALE * _unit(ids, 1)
            factors.append([_unit(ids, 2 + k) for k in range(INTERACTION_RANK)])
        products = np.sum(np.multiply(*factors), axis=0)
        logits += INTERACTION_SCALE / np.sqrt(INTERACTION_RANK) * products
        return Inputs(features=features, dense=None, logits=logits)

    def _held_by_feature(
        self, name: str, numbers: np.ndarray, ids: np.ndarray
    ) -> np.ndarray:
        """Returns what a feature holds for ids of some numbers."""
        if self.vocabulary == "dynamic":
            return ids
        if self.vocabulary == "unlimited":
            return numbers.astype(np.int32)
        # The ids are hashes already.
        return (ids % np.uint64(self.vocabulary_sizes[name])).astype(np.int32)


def _mix(words: np.ndarray) -> np.ndarray:
    """Returns a bijective hash of uint64 words, the finaliser of SplitMix64."""
    words = words * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _unit(ids: np.ndarray, salt: int) -> np.ndarray:
    """Returns a number of mean 0 and variance 1 per id, uniform over the ids."""
    return (_mix(ids ^ np.uint64(salt)) * 2.0**-64 - 0.5) * np.sqrt(12.0)
