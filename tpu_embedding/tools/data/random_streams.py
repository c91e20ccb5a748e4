"""Independent random streams of one seed, and the hash of the synthetic data sets."""

from typing import Final

import numpy as np

TEACHER_STREAM: Final = 0
TRAIN_STREAM: Final = 1
EVALUATION_STREAM: Final = 2

WORD: Final = np.uint64(0x9E3779B97F4A7C15)
"""Increment of SplitMix64: 2**64 over the golden ratio, rounded to an odd number."""


def random_generator(*, seed: int, stream: int, step: int = 0) -> np.random.Generator:
    """Returns a random generator, a pure function of its arguments.

    Args:
      seed: seed of the data set, at least 0.
      stream: number of a stream, independent of other streams of the seed, at least 0.
      step: step of the stream, at least 0, so that any step can be drawn by itself.

    Example:
      >>> round(random_generator(seed=0, stream=1, step=5).random(), 3)
      0.601
    """
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, stream, step]))
    )


def mix64(words: np.ndarray) -> np.ndarray:
    """Hashes uint64 words; distinct words have distinct hashes.

    It is the finaliser of SplitMix64: Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators" (OOPSLA 2014), constants of Vigna's `splitmix64.c`.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def splitmix64(keys: np.ndarray) -> np.ndarray:
    """Returns the first output of SplitMix64 for each uint64 seed."""
    return mix64(keys + WORD)
