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
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tables.initial_values import init_tables
from tpu_embedding.tables.slot_values import slot_values, with_slot_values
from tpu_embedding.tables.table_values import with_table_values
from tpu_embedding.tools.compile_report.topology import abstract_arrays
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
      tables: float32 `[vocabulary_size, dim]`.
      slots: slot variables by name.
      weighted: ids of the table's feature, which has the table's name.
      cotangents: float32 `[samples, dim]`.
      arguments: the same values on the devices, as the program takes them.
    """

    tables: dict[str, np.ndarray]
    slots: dict[str, dict[str, np.ndarray]]
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
    tables = {
        name: random_rows(generator, num_rows, case.dim)
        for name, num_rows in size.table_sizes.items()
    }
    features, weighted = draw_ids(program, generator)
    shape = (size.num_samples, case.dim)
    cotangents = {name: random_cotangents(generator, shape) for name in tables}
    table_structs, slot_structs = abstract_state(plan)
    stacked = with_table_values(_zeros(table_structs), tables, plan)
    state = _zeros(slot_structs)
    slots = {
        name: random_slots(generator, of_table)
        for name, of_table in slot_values(state, plan).items()
    }
    given = {
        name: of_table | dict.fromkeys(counts_of(state, plan), STEPS_BEFORE)
        for name, of_table in slots.items()
    }
    return CaseInputs(
        tables=tables,
        slots=slots,
        weighted=weighted,
        cotangents=cotangents,
        arguments=(
            stacked,
            with_slot_values(state, given, plan),
            *shard_batch((features, cotangents), plan),
        ),
    )


def draw_ids(
    program: RowProgram, generator: np.random.Generator
) -> tuple[dict[str, Any], dict[str, WeightedIds]]:
    """Returns the batch as the program takes it, and the ids of each feature."""
    features, weighted = {}, {}
    for name, num_rows in program.size.table_sizes.items():
        features[name], weighted[name] = random_ids(
            generator, program.case.ids, program.size.num_samples, num_rows
        )
    weighted["mean"] = weighted["mean"].normalised()
    return prepare_features(features, program.plan), weighted


def abstract_state(plan: EmbeddingPlan) -> tuple[Any, Any]:
    """Returns the shapes and shardings of the tables and slot variables of a plan."""
    tables = jax.eval_shape(lambda: init_tables(plan, jax.random.key(0)))
    slots: Any = {}
    if plan.trained_stacks:
        slots = jax.eval_shape(lambda tables: init_slots(tables, plan), tables)
    return abstract_arrays(tables, plan), abstract_arrays(slots, plan)


def counts_of(slots: Any, plan: EmbeddingPlan) -> dict[str, int]:
    """Returns the counts of steps in the state of a plan's optimizer, by name."""
    return {
        name: int(value)
        for of_table in slot_values(slots, plan, parts="all").values()
        for name, value in of_table.items()
        if value.shape == () and np.issubdtype(value.dtype, np.integer)
    }


def _zeros(structs: Any) -> Any:
    return jax.tree.map(
        lambda struct: jax.device_put(
            np.zeros(struct.shape, struct.dtype), struct.sharding
        ),
        structs,
    )


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
