"""Draws the rows, ids and cotangents of a case, and puts them on the devices.

All numbers are multiples of a power of two with at most 16 bits. Then float32 adds them
up without rounding, in any order, and the sums must agree bit by bit. A number rounded
to bfloat16, which has 8 bits, differs.
"""

import dataclasses
from typing import Any, Final

import jax
import numpy as np

from tpu_embedding.functional.steps import init_slots
from tpu_embedding.inputs.prepare import prepare_features, shard_batch
from tpu_embedding.tables.initial_values import init_tables
from tpu_embedding.tables.slot_values import slot_values, with_slot_values
from tpu_embedding.tables.table_values import with_table_values
from tpu_embedding.tools.doctor.dense_reference import STEPS_BEFORE, WeightedIds
from tpu_embedding.tools.doctor.row_cases import IdForm
from tpu_embedding.tools.doctor.row_programs import VALENCE, RowProgram
from tpu_embedding.types import DenseIds, RaggedIds

_WEIGHTS: Final = (0.5, 1.0, 2.0)
_ROW_STEP: Final = 2.0**-15
_COTANGENT_STEP: Final = 2.0**-12
_MAX_REPEATS: Final = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseInputs:
    """The values that the program of a case takes; all by table.

    Attributes:
      old: the table by the name `"values"`, `[vocabulary_size, dim]`, and its slot
        variables and counts of steps by theirs.
      weighted: ids of the table's feature, which has the table's name.
      cotangents: float32 `[samples, dim]`.
      arguments: the same values on the devices, as the program takes them.
    """

    old: dict[str, dict[str, np.ndarray]]
    weighted: dict[str, WeightedIds]
    cotangents: dict[str, np.ndarray]
    arguments: tuple[Any, Any, Any, Any]


def make_inputs(program: RowProgram, seed: int) -> CaseInputs:
    """Draws the rows, slot variables, ids and cotangents of a case.

    Args:
      program: program of the case.
      seed: seed of the random numbers.
    """
    generator = np.random.default_rng(seed)
    plan, case, size = program.plan, program.case, program.size
    sizes = size.table_sizes
    tables = {k: random_rows(generator, n, case.dim) for k, n in sizes.items()}
    features, weighted = {}, {}
    for name, num_rows in sizes.items():
        features[name], weighted[name] = random_ids(
            generator, case.ids, size.num_samples, num_rows
        )
    weighted["mean"] = weighted["mean"].normalised()
    shape = (size.num_samples, case.dim)
    cotangents = {name: random_cotangents(generator, shape) for name in sizes}
    arrays = with_table_values(init_tables(plan, jax.random.key(0)), tables, plan)
    state = init_slots(arrays, plan)
    slots = {
        name: {k: _random_slot(generator, v) for k, v in of_table.items()}
        for name, of_table in slot_values(state, plan, parts="all").items()
    }
    batch = prepare_features(features, plan), cotangents
    return CaseInputs(
        old={name: {"values": tables[name], **slots.get(name, {})} for name in tables},
        weighted=weighted,
        cotangents=cotangents,
        arguments=(
            arrays,
            with_slot_values(state, slots, plan),
            *shard_batch(batch, plan),
        ),
    )


def random_rows(generator: np.random.Generator, num_rows: int, dim: int) -> np.ndarray:
    """Returns rows for a table, float32 of 16 bits in [-1, 1)."""
    rows = generator.integers(-(2**15), 2**15, (num_rows, dim), np.int32)
    return rows.astype(np.float32) * np.float32(_ROW_STEP)


def _random_slot(generator: np.random.Generator, slot: np.ndarray) -> np.ndarray:
    """Returns values like a slot variable, in [0.5, 1.5), or the count of steps."""
    if slot.ndim == 0:
        return np.full_like(slot, STEPS_BEFORE)
    return generator.random(slot.shape, np.float32) + np.float32(0.5)


def random_cotangents(generator: np.random.Generator, shape: Any) -> np.ndarray:
    """Returns cotangents, float32 of 12 bits in [-0.5, 0.5)."""
    values = generator.integers(-(2**11), 2**11, shape, np.int32)
    return values.astype(np.float32) * np.float32(_COTANGENT_STEP)


def random_ids(
    generator: np.random.Generator, form: IdForm, num_samples: int, num_rows: int
) -> tuple[Any, WeightedIds]:
    """Returns the ids of a feature, as the layer takes them, and the gain of each.

    Gains are the weights, as for the combiner "sum".

    Args:
      generator: source of the random numbers.
      form: form of the ids.
      num_samples: samples of the batch.
      num_rows: rows of the table.
    """
    valence = 1 if form == "one id" else VALENCE
    num_ids = num_samples * valence
    ids = _colliding_ids(generator, num_ids, num_rows).astype(np.int32)
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
