"""The compile report: does a run fit, and what does its train step move, without a TPU.

`compile_report` combines the compiler's memory figures, the traffic model of `cost.py`
and the minimum traffic of `floor.py`. `other_programs.py` gives the memory of the run's
other programs. `text.py` prints the report, and `memory_plot.py` draws its memory.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import jax

from tpu_embedding.functional.steps import lookup
from tpu_embedding.hardware import HardwareInfo, num_slices_of
from tpu_embedding.plan.memory import format_table
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tables.initial_values import init_tables
from tpu_embedding.tools.compile_report.bandwidth import Cost, cost_of
from tpu_embedding.tools.compile_report.cost import (
    OPERATION_CLASSES,
    HloOperation,
    ProgramCost,
    StepPart,
    program_cost,
    total,
)
from tpu_embedding.tools.compile_report.device_memory import (
    KnownBytes,
    Memory,
    compile_program,
    dense_bytes,
    device_bytes,
    memory_of,
)
from tpu_embedding.tools.compile_report.floor import embedding_floor
from tpu_embedding.tools.compile_report.hlo import parse_module
from tpu_embedding.tools.compile_report.other_programs import (
    ProgramMemory,
    UncompiledProgram,
    program_memory,
)
from tpu_embedding.tools.compile_report.table_accesses import table_shapes
from tpu_embedding.tools.compile_report.traffic import Traffic

PARTS: Final[tuple[StepPart, ...]] = ("embedding", "dense", "unattributed")

TRAIN_STEP: Final = "train step"

Runs = Literal["every step", "data-dependent loop"]

_SOURCE_ROOT: Final = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationGroup:
    """Traffic of one class of operations, or of one part of the step.

    Attributes:
      name: name of the class or part; see `cost.HloOperation`.
      num_operations: number of such operations in the program.
      cost: their total traffic in one step.
    """

    name: str
    num_operations: int
    cost: Cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedOperation:
    """An operation that the report lists by name: on SparseCore, or a table copy.

    Attributes:
      name: name of the instruction.
      operation_class: see `cost.HloOperation`.
      dims: shape of its result.
      hbm_bytes: HBM traffic of one run.
      runs: `"every step"` or `"data-dependent loop"`.
      op_name: JAX's name of the operation it comes from, or "".
      source: Python source line, or "".
    """

    name: str
    operation_class: str
    dims: tuple[int, ...]
    hbm_bytes: float
    runs: Runs
    op_name: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopCost:
    """A loop whose number of iterations depends on data; in no total.

    Attributes:
      op_name: JAX's name of the operation it comes from, or "".
      source: Python source line, or "".
      per_iteration: traffic of one iteration.
    """

    op_name: str
    source: str
    per_iteration: Cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTraffic:
    """Modelled traffic of a compiled step; see `cost.py`.

    Attributes:
      total: traffic of one step.
      classes: the total by class of operation, for classes that occur.
      parts: the total by part of the step.
      loops: data-dependent loops, whose traffic is not in the total.
      sparse_core: operations on SparseCore.
      table_copies: operations that copy a whole table or slot variable within HBM. Any
        is a defect.
      table_moves: operations that move a table or slot variable between HBM and VMEM,
        as XLA does with small ones.
    """

    total: Cost
    classes: tuple[OperationGroup, ...]
    parts: tuple[OperationGroup, ...]
    loops: tuple[LoopCost, ...]
    sparse_core: tuple[NamedOperation, ...]
    table_copies: tuple[NamedOperation, ...]
    table_moves: tuple[NamedOperation, ...]

    @property
    def embedding(self) -> Cost:
        """Traffic of the embedding part."""
        (cost,) = (part.cost for part in self.parts if part.name == "embedding")
        return cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """Memory and traffic of a train step, compiled for a TPU topology.

    It also has the memory of the other programs of a run. All sizes and times are per
    device.

    Attributes:
      name: name of the step.
      topology: name of the topology, as the caller gives it.
      num_slices: number of slices, connected by the data-centre network.
      num_devices: number of devices of all slices.
      hardware: hardware of the devices, with the compiler options of the step.
      versions: package versions of jax, jaxlib and libtpu.
      plan: printed plan of the layer, with the backends for the batch.
      memory: memory of the step, and its fit.
      floor: minimum traffic of the embedding part; see `floor.py`.
      traffic: modelled traffic of the program; None if the step does not fit.
      trace_seconds: time to trace and lower the step, in Python.
      compile_seconds: time of the compiler.
      refusal: the compiler's error if the step does not fit, or "".
      others: memory of the run's other programs, in the order of a run.
    """

    name: str
    topology: str
    num_slices: int
    num_devices: int
    hardware: HardwareInfo
    versions: tuple[tuple[str, str], ...]
    plan: str
    memory: Memory
    floor: Cost
    traffic: ProgramTraffic | None
    trace_seconds: float
    compile_seconds: float
    refusal: str
    others: tuple[ProgramMemory, ...] = ()

    @property
    def title(self) -> str:
        """The step's name, the topology and the number of devices."""
        slices = f"{self.num_slices} slices of " if self.num_slices > 1 else ""
        devices = "device" if self.num_devices == 1 else "devices"
        return f"{self.name} on {slices}{self.topology}: {self.num_devices} {devices}"

    @property
    def programs(self) -> tuple[ProgramMemory, ...]:
        """The memory of all programs, the train step first."""
        step = ProgramMemory(
            name=TRAIN_STEP,
            memory=self.memory,
            trace_seconds=self.trace_seconds,
            compile_seconds=self.compile_seconds,
            refusal=self.refusal,
            note="",
        )
        return (step, *self.others)

    @property
    def fits(self) -> bool:
        """True if all programs fit."""
        return all(program.memory.fits for program in self.programs)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict of JSON values.

        `fits` is that of all programs; `memory.fits` that of the train step.
        """
        values = dataclasses.asdict(self)
        values["fits"] = self.fits
        values["versions"] = dict(self.versions)
        values["hardware"]["compiler_options"] = dict(self.hardware.compiler_options)
        return json.loads(json.dumps(values))


def describe_plan_for(plan: EmbeddingPlan, features: Any) -> str:
    """Returns the printed plan, and the backends that a batch of this shape gets.

    Args:
      plan: plan of the layer.
      features: what the layer looks up, as `jax.ShapeDtypeStruct`s.
    """
    if all(stack.backends.pool.backend == "xla" for stack in plan.stacks):
        return str(plan)
    rows: list[tuple[str, ...]] = [("stack", "direction", "backend", "for this batch")]

    def look_up(tables: Any, features: Any) -> Any:
        result = lookup(tables, features, plan)
        for name, routing in result.routing.stacks.items():
            for direction in ("pool", "spread"):
                choice = getattr(routing.backends, direction)
                rows.append((name, direction, choice.name, choice.explanation))
        return result.activations

    tables = jax.eval_shape(lambda: init_tables(plan, jax.random.key(0)))
    jax.eval_shape(look_up, tables, features)
    return f"{plan}\n\n{format_table(rows, num_left_aligned=4)}"


def compile_report(
    step: Any,
    state: Any,
    batch: Any,
    plan: EmbeddingPlan,
    *,
    features: Any = None,
    name: str = TRAIN_STEP,
    topology: str = "",
    others: Iterable[UncompiledProgram] = (),
) -> CompileReport:
    """Compiles a train step ahead of time and reports its memory and traffic.

    Args:
      step: jitted function `(state, batch) -> ...` that donates the state and uses the
        plan's `compiler_options`.
      state: tables, dense parameters and optimizer state, as `jax.ShapeDtypeStruct`s
        with shardings; see `abstract_arrays`.
      batch: batch, as `jax.ShapeDtypeStruct`s with shardings; see `abstract_batch`.
      plan: plan of the layer, on a mesh from `topology_mesh`.
      features: part of the batch that the layer looks up; None means all of it.
      name: name of the step, for the report.
      topology: name of the topology, for the report.
      others: further programs of the run, of which the report has the memory. They are
        compiled one after the other, each before the next is taken.

    Returns:
      The report, also if a program does not fit.

    Raises:
      jax.errors.JaxRuntimeError: if the compiler rejects the program for any reason
        other than memory, such as an unknown option.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> from tpu_embedding.tools import compile_report
      >>> table = te.TableConfig(vocabulary_size=1000, dim=8, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> def step(tables, ids):
      ...     return tables, te.functional.lookup(tables, ids, plan).activations
      >>> step = jax.jit(step, donate_argnums=0)
      >>> tables = jax.eval_shape(te.functional.init_tables, plan, jax.random.key(0))
      >>> ids = {"watched": jax.ShapeDtypeStruct((16,), jnp.int32)}
      >>> state = compile_report.abstract_arrays(tables, plan)
      >>> batch = compile_report.abstract_batch(ids, plan)
      >>> report = compile_report.compile_report(step, state, batch, plan)
      >>> report.memory.fits, report.traffic.table_copies
      (True, ())
    """
    floor = embedding_floor(plan, batch if features is None else features)
    minimum = Traffic(
        hbm_bytes=floor.hbm_bytes, ici_bytes=floor.ici_bytes, dcn_bytes=floor.dcn_bytes
    )
    compilation = compile_program(step, state, batch)
    known = KnownBytes(
        tables=plan.table_bytes_per_device,
        slots=plan.slot_bytes_per_device,
        dense=dense_bytes(state),
        inputs=device_bytes(batch),
    )
    traffic = None
    if compilation.compiled is not None:
        text = compilation.compiled.as_text()
        assert text is not None
        traffic = _traffic(program_cost(parse_module(text)), plan)
    return CompileReport(
        name=name,
        topology=topology,
        num_slices=num_slices_of(plan.mesh),
        num_devices=plan.num_shards,
        hardware=plan.hardware,
        versions=_versions(),
        plan=describe_plan_for(plan, batch if features is None else features),
        memory=memory_of(compilation, known, plan.hardware),
        floor=cost_of(minimum, plan.hardware),
        traffic=traffic,
        trace_seconds=compilation.trace_seconds,
        compile_seconds=compilation.compile_seconds,
        refusal=compilation.refusal,
        others=tuple(program_memory(other, plan.hardware) for other in others),
    )


def _traffic(program: ProgramCost, plan: EmbeddingPlan) -> ProgramTraffic:
    tables = _dims_of_tables(plan)

    def summary(name: str, operations: Iterable[HloOperation]) -> OperationGroup:
        operations = list(operations)
        return OperationGroup(
            name=name,
            num_operations=len(operations),
            cost=cost_of(total(operations), plan.hardware),
        )

    by_class = (
        summary(name, (o for o in program.operations if o.operation_class == name))
        for name in OPERATION_CLASSES
    )
    return ProgramTraffic(
        total=cost_of(total(program.operations), plan.hardware),
        classes=tuple(row for row in by_class if row.num_operations),
        parts=tuple(
            summary(part, (o for o in program.operations if o.part == part))
            for part in PARTS
        ),
        loops=tuple(
            LoopCost(
                op_name=loop.op_name,
                source=_relative_source(loop.source),
                per_iteration=cost_of(total(loop.operations), plan.hardware),
            )
            for loop in program.loops
        ),
        sparse_core=_select_operations(program, lambda o: o.unit == "SparseCore"),
        table_copies=_select_operations(program, lambda o: _copies_table(o, tables)),
        table_moves=_select_operations(program, lambda o: _moves_table(o, tables)),
    )


def _dims_of_tables(plan: EmbeddingPlan) -> set[tuple[int, ...]]:
    """Returns the shapes of tables and slot variables, and their transposes."""
    shapes = table_shapes(plan)
    return shapes | {shape[::-1] for shape in shapes}


def _copies_table(operation: HloOperation, tables: set[tuple[int, ...]]) -> bool:
    """Returns True if an operation copies a whole table within HBM."""
    is_copy = operation.operation_class == "copy" and operation.part != "dense"
    return is_copy and operation.dims in tables and _stays_in_hbm(operation)


def _moves_table(operation: HloOperation, tables: set[tuple[int, ...]]) -> bool:
    """Returns True if an operation moves a table or a piece between HBM and VMEM."""
    is_copy = operation.operation_class == "copy" and operation.part != "dense"
    is_table = not tables.isdisjoint((operation.dims, *operation.operand_dims))
    is_move = operation.traffic.hbm_bytes > 0 and not _stays_in_hbm(operation)
    return is_copy and is_table and is_move


def _stays_in_hbm(copy: HloOperation) -> bool:
    """Returns True for a copy within HBM, False for one from or to VMEM."""
    return copy.traffic.hbm_bytes >= 2 * copy.result_bytes * copy.num_runs


def _select_operations(
    program: ProgramCost, keep: Callable[[HloOperation], bool]
) -> tuple[NamedOperation, ...]:
    """Returns the operations that `keep` selects; data-dependent loops come last."""

    def named(operations: Iterable[HloOperation], runs: Runs) -> list[NamedOperation]:
        return [
            NamedOperation(
                name=operation.name,
                operation_class=operation.operation_class,
                dims=operation.dims,
                hbm_bytes=operation.traffic.hbm_bytes / operation.num_runs,
                runs=runs,
                op_name=operation.op_name,
                source=_relative_source(operation.source),
            )
            for operation in operations
            if operation.num_runs and keep(operation)
        ]

    found = named(program.operations, "every step")
    for loop in program.loops:
        found += named(loop.operations, "data-dependent loop")
    return tuple(found)


def _relative_source(source: str) -> str:
    """Returns a source line with its path relative to the package's parent."""
    return source.removeprefix(f"{_SOURCE_ROOT}{os.sep}")


def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for package in ("jax", "jaxlib", "libtpu"):
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)
