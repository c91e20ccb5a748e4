"""Independent random streams of one seed, for orders and synthetic samples."""

from typing import Final

import numpy as np

TEACHER_STREAM: Final = 0
TRAIN_STREAM: Final = 1
EVALUATION_STREAM: Final = 2


def random_generator(*, seed: int, stream: int, step: int = 0) -> np.random.Generator:
    """Returns a random generator, a pure function of its arguments."""
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, stream, step]))
    )
