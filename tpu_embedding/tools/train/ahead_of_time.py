"""The programs of a run, to compile ahead of time: the train step, and the others.

`tpu-embedding compile` reports their memory. Their arguments are shapes, so nothing is
allocated.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, get_args

import jax
from flax import nnx

from tpu_embedding.functional.steps import init_slots, lookup
from tpu_embedding.nn.embedding import EmbeddingTables
from tpu_embedding.nn.training import SlotVariables
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.initial_values import init_tables
from tpu_embedding.tables.row_stream import read_turn
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report.other_programs import (
    ResidentPart,
    UncompiledProgram,
)
from tpu_embedding.tools.compile_report.topology import abstract_batch
from tpu_embedding.tools.data.batch import Batch, Dataset
from tpu_embedding.tools.train.config import RunConfig
from tpu_embedding.tools.train.feeding import prepare_batch
from tpu_embedding.tools.train.steps import (
    abstract_train_state,
    init_train_state,
    make_evaluation_step,
)

ProgramName = Literal["init", "evaluation", "serving", "checkpoint"]
PROGRAM_NAMES: Final[tuple[ProgramName, ...]] = get_args(ProgramName)

SAVE_NOTE: Final = "one block of rows per device and stack; a run reads one at a time"
RESTORE_NOTE: Final = "not compiled: the exchange of save, reversed, writes in place"
DENSE_NOTE: Final = "compiled as one program; a run makes one array after the other"


def other_programs(
    config: RunConfig,
    data: Dataset,
    plan: EmbeddingPlan,
    names: Sequence[ProgramName] = PROGRAM_NAMES,
) -> Iterator[UncompiledProgram]:
    """Yields programs of a run, for `compile_report.compile_report`.

    Args:
      config: config of the run.
      data: opened data set, or its outline. Its first batch determines the shapes.
      plan: plan from `make_run_plan`.
      names: the programs. `"init"`: initial values of tables, dense parameters and slot
        variables. `"evaluation"`: an evaluation step. `"serving"`: a lookup without
        gradients, on devices with only the tables. `"checkpoint"`: saving and
        restoring.
    """
    graphdef, state = abstract_train_state(config, data, plan)
    resident = _parts_of(state)
    batch = abstract_batch(prepare_batch(data.train_batch(0), plan), plan)
    makers: dict[ProgramName, Callable[[], Iterator[UncompiledProgram]]] = {
        "init": lambda: _init_programs(config, data, plan, resident),
        "evaluation": lambda: _evaluation(config, graphdef, resident, batch),
        "serving": lambda: _serving(plan, batch),
        "checkpoint": lambda: _checkpoint(plan, resident),
    }
    for name, make in makers.items():
        if name in names:
            yield from make()


def _parts_of(state: nnx.State) -> dict[ResidentPart, nnx.State]:
    """Returns tables, slot variables and all else of a train state."""
    tables, slots, dense = nnx.split_state(state, EmbeddingTables, SlotVariables, ...)
    return {"tables": tables, "slots": slots, "dense": dense}


def _init_programs(
    config: RunConfig,
    data: Dataset,
    plan: EmbeddingPlan,
    resident: dict[ResidentPart, nnx.State],
) -> Iterator[UncompiledProgram]:
    """Yields the programs before the first step, with what earlier ones have made."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=plan.replicated)
    yield UncompiledProgram(
        name="initial tables",
        resident={},
        inputs=(key,),
        function=lambda _, key: init_tables(plan, key),
    )

    def init_dense(_):
        dense = _parts_of(init_train_state(config, data, plan)[1])["dense"]
        return jax.lax.with_sharding_constraint(dense, plan.replicated)

    yield UncompiledProgram(
        name="initial dense parameters",
        resident={"tables": resident["tables"]},
        function=init_dense,
        note=DENSE_NOTE,
    )
    tables = jax.eval_shape(functools.partial(init_tables, plan), key)
    yield UncompiledProgram(
        name="initial slot variables",
        resident={
            "tables": compile_report.abstract_arrays(tables, plan),
            "dense": resident["dense"],
        },
        function=lambda resident: init_slots(resident["tables"], plan),
    )


def _evaluation(
    config: RunConfig,
    graphdef: nnx.GraphDef,
    resident: dict[ResidentPart, nnx.State],
    batch: Batch,
) -> Iterator[UncompiledProgram]:
    step = make_evaluation_step(graphdef, config.loss)
    yield UncompiledProgram(
        name="evaluation step",
        resident=resident,
        inputs=(batch,),
        function=lambda parts, batch: step(nnx.merge_state(*parts.values()), batch)[0],
    )


def _serving(plan: EmbeddingPlan, batch: Batch) -> Iterator[UncompiledProgram]:
    tables = jax.eval_shape(lambda: init_tables(plan, jax.random.key(0)))
    yield UncompiledProgram(
        name="serving lookup",
        resident={"tables": compile_report.abstract_arrays(tables, plan)},
        inputs=(batch.features,),
        function=lambda resident, features: (
            lookup(resident["tables"], features, plan).activations
        ),
    )


def _checkpoint(
    plan: EmbeddingPlan, resident: dict[ResidentPart, nnx.State]
) -> Iterator[UncompiledProgram]:
    stacks = {stack.layout.contents: stack for stack in plan.stacks}

    def read_blocks(resident):
        tables = jax.tree.leaves(resident["tables"], is_leaf=_is_rows)
        return [
            read_turn(packed, stacks[packed.layout.contents], plan)
            for packed in tables
            if _is_rows(packed)
        ]

    yield UncompiledProgram(
        name="save", resident=resident, function=read_blocks, note=SAVE_NOTE
    )
    yield UncompiledProgram(name="restore", resident=resident, note=RESTORE_NOTE)


def _is_rows(leaf: object) -> bool:
    return isinstance(leaf, PackedRows)
