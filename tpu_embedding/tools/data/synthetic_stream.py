"""Synthetic click log whose ids come and go, for tables of 64-bit ids.

Users and items are born, are used for a life time, and never come back. A table with a
row per living id can learn them all; one that hashes ids to rows mixes them.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from tpu_embedding.tools.data.argument_checks import count_problems
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.data.random_streams import TRAIN_STREAM, random_generator
from tpu_embedding.tools.data.teacher import Inputs, TeacherDataset
from tpu_embedding.tools.data.zipf import GOLDEN_RATIO

DEFAULT_LIVE_IDS: Final[Mapping[str, int]] = MappingProxyType(
    {"user": 2_000, "item": 1_000}
)
"""Number of ids of each feature that live at any step."""

EFFECT_SCALE: Final = 1.0
"""Standard deviation of the effect of an id on the logit, for users and for items."""

INTERACTION_RANK: Final = 2
INTERACTION_SCALE: Final = 0.6
"""Standard deviation of the user-item interaction's contribution to the logit."""


class SyntheticStream(TeacherDataset):
    """Clicks of users on items that live for `life_steps` training steps each.

    A feature has as many places as living ids. The popularity of a place follows
    `ZipfIds`. After a life time, a new id takes the place. The births of a feature are
    spread evenly over the steps. The teacher's logit of a sample is

        b + e_user + e_item + <f_user, g_item>

    Effects `e` and vectors `f` and `g` are hashes of the id, uniform around 0. So a
    batch is a function of the seed and the step alone.

    Features: uint64 `[batch]` for "user" and "item". The ids are hashes of a counter by
    a bijection, so they differ within a feature. With `numbered`, they are int32
    numbers from 0 to `num_ids(name, steps) - 1` in place of these hashes; all else is
    the same. The held-out samples use the ids that live at `evaluation_step`.

    Args:
      batch_size: samples per batch.
      seed: seed of the teacher and of all samples, at least 0.
      live_ids: number of living ids of "user" and of "item".
      life_steps: number of training steps that an id lives.
      evaluation_step: training step whose living ids the held-out samples use.
      numbered: whether features hold numbers of ids in place of 64-bit ids.
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

    def __init__(
        self,
        *,
        batch_size: int = 2048,
        seed: int = 0,
        live_ids: Mapping[str, int] = DEFAULT_LIVE_IDS,
        life_steps: int = 500,
        evaluation_step: int = 2_000,
        numbered: bool = False,
        zipf_exponent: float = 1.0,
        click_rate: float = 0.3,
        num_evaluation_samples: int = 102_400,
    ):
        self.life_steps = life_steps
        self.evaluation_step = evaluation_step
        self.numbered = numbered
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            num_evaluation_samples=num_evaluation_samples,
            vocabulary_sizes=live_ids,
            zipf_exponent=zipf_exponent,
            click_rate=click_rate,
        )

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from count_problems(
            "SyntheticStream",
            life_steps=self.life_steps,
            evaluation_step=self.evaluation_step,
        )
        if self.vocabulary_sizes.keys() != DEFAULT_LIVE_IDS.keys():
            yield (
                "SyntheticStream.live_ids must name the features "
                f"{sorted(DEFAULT_LIVE_IDS)}, got {sorted(self.vocabulary_sizes)}"
            )
        for name, size in self.vocabulary_sizes.items():
            yield from count_problems(
                "SyntheticStream", **{f"live_ids[{name!r}]": size}
            )

    def num_ids(self, name: str, steps: int) -> int:
        """Returns a number above all numbers of ids of the steps `0 .. steps - 1`."""
        last_life = (steps + self.life_steps - 2) // self.life_steps
        return self.vocabulary_sizes[name] * (last_life + 1)

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
            features[name] = numbers.astype(np.int32) if self.numbered else ids
            logits += EFFECT_SCALE * _unit(ids, 1)
            factors.append([_unit(ids, 2 + k) for k in range(INTERACTION_RANK)])
        products = np.sum(np.multiply(*factors), axis=0)
        logits += INTERACTION_SCALE / np.sqrt(INTERACTION_RANK) * products
        return Inputs(features=features, dense=None, logits=logits)


def _mix(words: np.ndarray) -> np.ndarray:
    """Returns a bijective hash of uint64 words, the finaliser of SplitMix64."""
    words = words * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _unit(ids: np.ndarray, salt: int) -> np.ndarray:
    """Returns a number of mean 0 and variance 1 per id, uniform over the ids."""
    return (_mix(ids ^ np.uint64(salt)) * 2.0**-64 - 0.5) * np.sqrt(12.0)
