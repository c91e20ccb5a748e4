"""Random rows, ids and cotangents of the doctor's cases.

All numbers are multiples of a power of two with at most 16 bits. Then float32 adds them
up without rounding, in any order, and the sums must agree bit by bit. A number rounded
to bfloat16, which has 8 bits, differs.
"""

import dataclasses
from typing import Any, Final

import numpy as np

from tpu_embedding.combiners import Combiner
from tpu_embedding.tools.doctor.dense_reference import WeightedIds
from tpu_embedding.tools.doctor.row_cases import IdForm, Owner, RowCase
from tpu_embedding.types import DenseIds, RaggedIds

VALENCE: Final = 4
"""Ids of a sample of more than one id; of a ragged one, the mean."""

_WEIGHTS: Final = (0.5, 1.0, 2.0)
_ROW_STEP: Final = 2.0**-15
_COTANGENT_STEP: Final = 2.0**-12
_MAX_REPEATS: Final = 1024
_LANES: Final = 128
_ALIGNED_SAMPLES: Final = 8
"""Kernels take samples in multiples of this times the rows of a line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseSize:
    """The sizes of a case.

    Attributes:
      num_samples: samples of the batch.
      vocabulary_size: rows of the larger table.
    """

    num_samples: int
    vocabulary_size: int

    @property
    def table_sizes(self) -> dict[Combiner, int]:
        """Rows of each table; the name of a table is its combiner."""
        small = self.vocabulary_size // 8 + 3
        return {"sum": self.vocabulary_size, "mean": small}


def size_of(
    case: RowCase, *, floats: int, many_rows: int, num_devices: int
) -> CaseSize:
    """Returns the sizes of a case.

    Args:
      case: the case.
      floats: approximate elements of the rows that a feature looks up.
      many_rows: minimum rows of the larger table of a case with many rows.
      num_devices: devices of the program; each gets as many samples as kernels ask for.
    """
    ids_per_sample = 1 if case.ids == "one id" else VALENCE
    multiple = num_devices * _ALIGNED_SAMPLES * max(1, _LANES // case.dim)
    num_samples = floats // (case.dim * ids_per_sample)
    num_samples = max(1, round(num_samples / multiple)) * multiple
    num_rows = 4 * num_samples * ids_per_sample
    if case.rows == "many":
        num_rows = max(num_rows, many_rows)
    return CaseSize(num_samples=num_samples, vocabulary_size=num_rows + 5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnedRows:
    """The rows of a table, and the devices that own them.

    Attributes:
      num_rows: of the table.
      offset: first row in the stack.
      num_owners: devices that the stack is split over.
      owner: of the rows that ids name.
    """

    num_rows: int
    offset: int
    num_owners: int
    owner: Owner

    def restrict(self, ids: np.ndarray) -> np.ndarray:
        """Replaces each id by one that the owner has."""
        if self.owner == "any":
            return ids
        first = -self.offset % self.num_owners
        last = (self.num_rows - 1 - first) // self.num_owners
        return np.minimum(ids // self.num_owners, last) * self.num_owners + first


def random_rows(generator: np.random.Generator, num_rows: int, dim: int) -> np.ndarray:
    """Returns rows for a table, float32 of 16 bits in [-1, 1)."""
    rows = generator.integers(-(2**15), 2**15, (num_rows, dim), np.int32)
    return rows.astype(np.float32) * np.float32(_ROW_STEP)


def random_slots(
    generator: np.random.Generator, slots: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns values for slot variables of these shapes, in [0.5, 1.5)."""
    return {
        name: generator.random(slot.shape, np.float32) + np.float32(0.5)
        for name, slot in slots.items()
    }


def random_cotangents(generator: np.random.Generator, shape: Any) -> np.ndarray:
    """Returns cotangents, float32 of 12 bits in [-0.5, 0.5)."""
    values = generator.integers(-(2**11), 2**11, shape, np.int32)
    return values.astype(np.float32) * np.float32(_COTANGENT_STEP)


def random_ids(
    generator: np.random.Generator, form: IdForm, num_samples: int, rows: OwnedRows
) -> tuple[Any, WeightedIds]:
    """Returns the ids of a feature, as the layer takes them, and the gain of each.

    Gains are the weights, as for the combiner "sum".

    Args:
      generator: of random numbers.
      form: of the ids.
      num_samples: of the batch.
      rows: of the table.
    """
    valence = 1 if form == "one id" else VALENCE
    num_ids = num_samples * valence
    ids = rows.restrict(_colliding_ids(generator, num_ids, rows.num_rows))
    ids = ids.astype(np.int32)
    weights = np.ones(num_ids, np.float32)
    if form in ("weighted", "ragged"):
        weights = generator.choice(_WEIGHTS, num_ids).astype(np.float32)
    if form == "ragged":
        samples = np.sort(generator.integers(0, num_samples, num_ids))
        counts = np.bincount(samples, minlength=num_samples)
        row_splits = np.concatenate([[0], np.cumsum(counts)])
        feature: Any = RaggedIds(values=ids, row_splits=row_splits, weights=weights)
    else:
        samples = np.repeat(np.arange(num_samples), valence)
        feature = ids.reshape(num_samples, valence)
        if form == "weighted":
            feature = DenseIds(ids=feature, weights=weights.reshape(feature.shape))
    gains = weights.astype(np.float64)
    return feature, WeightedIds(
        ids=ids, samples=samples, gains=gains, num_samples=num_samples
    )


def _colliding_ids(
    generator: np.random.Generator, num_ids: int, num_rows: int
) -> np.ndarray:
    """Returns ids of which half lie close together, so that they share lines.

    The first and the last row are among them, and one row many times.
    """
    window = max(1, min(num_rows, num_ids // 4))
    near = num_rows - window + generator.integers(0, window, num_ids // 2)
    far = generator.integers(0, num_rows, num_ids - len(near))
    ids = np.concatenate([near, far])
    ids[: min(num_ids // 16, _MAX_REPEATS)] = num_rows // 2
    generator.shuffle(ids)
    edges = np.array([0, num_rows - 1, 0, num_rows - 1])
    ids[: len(edges)] = edges[:num_ids]
    return ids
