"""Line format of Criteo's click logs: fields, validation, conversion to model inputs.

A line has 40 fields separated by tabs: the label (0 or 1), 13 integers (mostly counts;
may be empty or negative) and 26 categories (32 bits as 8 hex digits; may be empty). The
Kaggle challenge and the 1TB logs share the format. `criteo_lines.py` reads the files,
and `criteo_parser.py` the fields.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from tpu_embedding.field_checks import is_int
from tpu_embedding.tools.data.zipf import MAX_VOCABULARY_SIZE

NUM_DENSE: Final = 13
CATEGORY_NAMES: Final = tuple(f"cat_{number:02d}" for number in range(26))
"""Names of the categorical features, in the order of the fields."""

NUM_CATEGORIES: Final = len(CATEGORY_NAMES)
ALL_FEATURES: Final = np.arange(NUM_CATEGORIES)
NUM_FIELDS: Final = 1 + NUM_DENSE + NUM_CATEGORIES


def dense_of_integers(integers: np.ndarray) -> np.ndarray:
    """Returns `log(1 + max(x, 0))` in float32.

    MLPerf's DLRM uses the same transform (facebookresearch/dlrm: `data_utils.py` sets
    negative integers to 0, `dlrm_data_pytorch.py` takes the logarithm). It also counts
    an empty field as 0.
    """
    return np.log1p(np.maximum(integers, 0)).astype(np.float32)


def row_ids_of_categories(
    categories: np.ndarray, feature: int, vocabulary_size: int
) -> np.ndarray:
    """Hashes categories of a feature to int32 row ids from 1 on.

    Row 0 of a feature means an empty field. Category `x` of feature `f` (counted from
    0) has the row

        1 + splitmix64((f + 1) * 2**32 + x) mod (vocabulary_size - 1)

    which is the same in every run and on every machine, so checkpoints stay valid. Two
    categories of a feature may share a row.

    Args:
      categories: numbers of 32 bits, `[num]`.
      feature: number of the feature, counted from 0.
      vocabulary_size: rows of the feature's table, at least 2.
    """
    hashes = splitmix64(category_keys(categories, feature))
    return (hashes % np.uint64(vocabulary_size - 1)).astype(np.int32) + np.int32(1)


def category_keys(
    categories: np.ndarray, features: int | np.ndarray = ALL_FEATURES
) -> np.ndarray:
    """Returns uint64 keys, distinct for each feature and category.

    Args:
      categories: numbers of 32 bits, `[rows, 26]` unless `features` says otherwise.
      features: numbers of their features, counted from 0.
    """
    return (np.uint64(features + 1) << np.uint64(32)) + categories.astype(np.uint64)


def splitmix64(keys: np.ndarray) -> np.ndarray:
    """Hashes uint64 values; distinct values have distinct hashes.

    The algorithm is from Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators" (OOPSLA 2014), with the constants of Vigna's public `splitmix64.c`.
    """
    keys = keys + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def vocabulary_sizes_by_name(sizes: int | Sequence[int]) -> dict[str, int]:
    """Returns rows by feature name, from one number per feature or one for all."""
    per_feature = sizes if isinstance(sizes, Sequence) else [sizes] * NUM_CATEGORIES
    return dict(zip(CATEGORY_NAMES, per_feature, strict=True))


def vocabulary_problems(owner: str, sizes: int | Sequence[int]) -> Iterator[str]:
    """Yields an error message for each problem of `vocabulary_sizes`."""
    per_feature = list(sizes) if isinstance(sizes, Sequence) else [sizes]
    if isinstance(sizes, Sequence) and len(sizes) != NUM_CATEGORIES:
        yield (
            f"{owner}.vocabulary_sizes must be one int or {NUM_CATEGORIES} of them, "
            f"got {len(sizes)}"
        )
    yield from size_problems(owner, per_feature)


def size_problems(owner: str, sizes: Iterable[int]) -> Iterator[str]:
    """Yields an error message for each size that is out of range."""
    for size in dict.fromkeys(sizes):
        if not is_int(size) or not 2 <= size <= MAX_VOCABULARY_SIZE:
            yield (
                f"{owner}.vocabulary_sizes must be ints from 2 to "
                f"{MAX_VOCABULARY_SIZE}, got {size!r}; row 0 stands for an empty field"
            )
