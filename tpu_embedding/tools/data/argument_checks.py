"""Checks of the arguments of data sets."""

from collections.abc import Iterator

from tpu_embedding.field_checks import is_int


def count_problems(owner: str, **counts: int) -> Iterator[str]:
    """Yields an error message for each count that is not an int of at least 1."""
    for name, count in counts.items():
        if not is_int(count) or count < 1:
            yield f"{owner}.{name} must be an int of at least 1, got {count!r}"


def seed_problems(owner: str, seed: int) -> Iterator[str]:
    """Yields an error message for a seed that is not an int of at least 0."""
    if not is_int(seed) or seed < 0:
        yield f"{owner}.seed must be an int of at least 0, got {seed!r}"
