"""Makes the arguments of a case's program, and keeps them on the host."""

import dataclasses
from typing import Any

import jax
import numpy as np

from tpu_embedding.functional.steps import init_slots
from tpu_embedding.inputs.prepare import prepare_features, shard_batch
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tables.initial_values import init_tables
from tpu_embedding.tables.slot_values import slot_values, with_slot_values
from tpu_embedding.tables.table_values import with_table_values
from tpu_embedding.tools.compile_report.topology import abstract_arrays, abstract_batch
from tpu_embedding.tools.doctor.dense_reference import STEPS_BEFORE, WeightedIds
from tpu_embedding.tools.doctor.row_batches import (
    OwnedRows,
    random_cotangents,
    random_ids,
    random_rows,
    random_slots,
)
from tpu_embedding.tools.doctor.row_programs import RowProgram


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseInputs:
    """The values that the program of a case takes; all by table.

    Attributes:
      tables: float32 `[vocabulary_size, dim]`.
      slots: slot variables by name.
      weighted: the ids of the table's feature, which has the table's name.
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
      program: of the case.
      seed: of the random numbers.
    """
    generator = np.random.default_rng(seed)
    plan, case, size = program.plan, program.case, program.size
    tables = {
        name: random_rows(generator, num_rows, case.dim)
        for name, num_rows in size.table_sizes.items()
    }
    features, weighted = _draw_ids(program, generator)
    shape = (size.num_samples, case.dim)
    cotangents = {name: random_cotangents(generator, shape) for name in tables}
    table_structs, slot_structs = _abstract_state(plan)
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


def abstract_arguments(program: RowProgram) -> tuple[Any, Any, Any, Any]:
    """Returns the shapes and shardings of the arguments of a case's program."""
    plan, size = program.plan, program.size
    features, _ = _draw_ids(program, np.random.default_rng(0))
    cotangent = jax.ShapeDtypeStruct((size.num_samples, program.case.dim), np.float32)
    cotangents = dict.fromkeys(size.table_sizes, cotangent)
    return (*_abstract_state(plan), *abstract_batch((features, cotangents), plan))


def _draw_ids(
    program: RowProgram, generator: np.random.Generator
) -> tuple[dict[str, Any], dict[str, WeightedIds]]:
    """Returns the batch as the program takes it, and the ids of each feature."""
    plan, case = program.plan, program.case
    features, weighted = {}, {}
    for table in plan.stacks[0].tables:
        rows = OwnedRows(
            num_rows=table.config.vocabulary_size,
            offset=table.row_offset,
            num_owners=plan.num_shards,
            owner=case.owner,
        )
        features[table.name], weighted[table.name] = random_ids(
            generator, case.ids, program.size.num_samples, rows
        )
    weighted["mean"] = weighted["mean"].normalised()
    return prepare_features(features, plan), weighted


def _abstract_state(plan: EmbeddingPlan) -> tuple[Any, Any]:
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
