"""Modelled traffic of a compiled program, by operation.

XLA's own cost analysis counts the whole table for each gather and scatter, so its
figures grow with the vocabulary although the program's work does not. This module walks
the optimised HLO instead. `traffic.py` models one instruction; this module decides how
often each instruction runs:

* The body of a loop counts once per iteration. A loop whose iteration count depends on
  data is listed with the cost of one iteration and excluded from all totals. Examples
  are gradients of repeated ids, an eighth of the places per iteration, and the later
  rounds of a lookup under skew. The floor in `floor.py` assumes distinct ids too.
* A conditional counts as its branch with the most traffic.
* An asynchronous operation, on SparseCore or as a copy, counts once, at its start.

Bytes over bandwidth give a lower bound of the time, not a forecast, because arithmetic,
latency and waiting come on top. Such times are called *modelled*; none is measured.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final, Literal, get_args

from tpu_embedding.plan.shard_map import DENSE_SCOPE, EMBEDDING_SCOPE
from tpu_embedding.tools.compile_report.hlo import Computation, Instruction, Module
from tpu_embedding.tools.compile_report.traffic import (
    COLLECTIVES,
    Traffic,
    callee,
    is_free,
    results_of,
    traffic_of,
)
from tpu_embedding.tools.compile_report.trip_counts import trip_count

OperationClass = Literal[
    "gather",
    "scatter",
    "sort",
    "all-to-all",
    "all-reduce",
    "other collective",
    "between slices",
    "matmul",
    "copy",
    "custom call",
    "elementwise",
]
OPERATION_CLASSES: Final[tuple[OperationClass, ...]] = get_args(OperationClass)
"""Classes in the order of the report; "elementwise" includes all other operations."""

StepPart = Literal["embedding", "dense", "unattributed"]
Core = Literal["TensorCore", "SparseCore"]

_SPARSE_CORE_THREAD: Final = "sparsecore"
_COPIES: Final = frozenset({"copy", "transpose", "slice", "reshape"})
_COPY_FUSION: Final = _COPIES | {"parameter", "bitcast", "tuple", "constant"}
_CLASS_OF_OPCODE: Final[dict[str, OperationClass]] = {
    "scatter": "scatter",
    "sort": "sort",
    "convolution": "matmul",
    "dot": "matmul",
    "gather": "gather",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "all-reduce": "all-reduce",
    "send": "between slices",
    "recv": "between slices",
    "custom-call": "custom call",
}
# A fusion gets the class of the first of these opcodes that it contains.
_RANKING: Final = ("scatter", "sort", "convolution", "dot", "gather")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HloOperation:
    """An instruction of a program, and its traffic in one step.

    Attributes:
      name: name of the instruction.
      operation_class: kind of work.
      part: `"embedding"` inside the layer's `shard_map` or its scope, `"dense"` for the
        rest of the step, such as a `shard_map` in `DENSE_SCOPE`, `"unattributed"` if
        XLA gives no origin.
      unit: the core that runs it.
      dims: shape of the first result.
      operand_dims: shapes of all operands.
      result_bytes: bytes of the first result, with tile padding.
      num_runs: number of runs in a step.
      traffic: traffic of all runs together.
      op_name: JAX's name of the operation it comes from, or "".
      source: Python source line, `"file:line"`, or "".
    """

    name: str
    operation_class: OperationClass
    part: StepPart
    unit: Core
    dims: tuple[int, ...]
    operand_dims: tuple[tuple[int, ...], ...]
    result_bytes: int
    num_runs: int
    traffic: Traffic
    op_name: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataDependentLoop:
    """A loop whose number of iterations depends on data.

    Attributes:
      name: name of the `while` instruction.
      op_name: JAX's name of the operation it comes from, or "".
      source: Python source line, `"file:line"`, or "".
      operations: operations of one iteration. Data-dependent loops inside the loop are
        listed separately.
    """

    name: str
    op_name: str
    source: str
    operations: tuple[HloOperation, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCost:
    """Modelled traffic of a program, per device.

    Attributes:
      operations: operations that run in every step.
      loops: loops whose number of iterations depends on data, in no total.
    """

    operations: tuple[HloOperation, ...]
    loops: tuple[DataDependentLoop, ...]


def program_cost(module: Module) -> ProgramCost:
    """Returns the modelled traffic of a program.

    Args:
      module: the program, from `parse_module`.

    Example:
      >>> from tpu_embedding.tools.compile_report.hlo import parse_module
      >>> module = parse_module('''ENTRY %main (a: f32[8,128]) -> f32[8,128] {
      ...   %a = f32[8,128]{1,0:T(8,128)} parameter(0)
      ...   ROOT %b = f32[8,128]{1,0:T(8,128)} negate(%a)
      ... }''')
      >>> program_cost(module).operations[0].traffic.hbm_bytes
      8192
    """
    walk = _CallWalker(module)
    operations = tuple(walk.operations(module.entry, _Call()))
    return ProgramCost(operations=operations, loops=tuple(walk.loops))


def total(operations: Iterable[HloOperation]) -> Traffic:
    """Returns the total traffic of some operations."""
    return sum((operation.traffic for operation in operations), Traffic())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """Context in which a computation runs.

    Attributes:
      num_runs: number of runs in a step.
      unit: the core that runs it.
      op_name: JAX's name of the calling instruction, or "".
      source: Python source line of the calling instruction, or "".
    """

    num_runs: int = 1
    unit: Core = "TensorCore"
    op_name: str = ""
    source: str = ""


class _CallWalker:
    """Walks the computations of a program in call order.

    Attributes:
      loops: the data-dependent loops found so far.
    """

    def __init__(self, module: Module):
        self.loops: list[DataDependentLoop] = []
        self._module = module
        self._fused = {
            name: _opcodes_inside(computation, module)
            for name, computation in module.computations.items()
        }

    def operations(
        self, computation: Computation, call: _Call
    ) -> Iterator[HloOperation]:
        """Yields the operations of a computation and of all that it calls."""
        for instruction in computation.instructions.values():
            match instruction.opcode:
                case "while":
                    yield from self._loop(instruction, computation, call)
                case "conditional":
                    yield from self._conditional(instruction, call)
                case "call" | "call-start" | "async-start":
                    yield from self._call(instruction, call)
                case _ if not is_free(instruction):
                    yield self._operation(instruction, computation, call)

    def _loop(
        self, loop: Instruction, computation: Computation, call: _Call
    ) -> Iterator[HloOperation]:
        num_iterations = trip_count(loop, computation, self._module)
        names = (loop.called("body"), loop.called("condition"))
        parts = [self._module.computations[name or ""] for name in names]
        if num_iterations is not None:
            num_runs = call.num_runs * num_iterations
            inside = dataclasses.replace(call, num_runs=num_runs)
            for part in parts:
                yield from self.operations(part, inside)
            return
        inside = dataclasses.replace(call, num_runs=1)
        self.loops.append(
            DataDependentLoop(
                name=loop.name,
                op_name=loop.op_name,
                source=self._module.source_of(loop),
                operations=tuple(
                    operation
                    for part in parts
                    for operation in self.operations(part, inside)
                ),
            )
        )

    def _conditional(
        self, conditional: Instruction, call: _Call
    ) -> Iterator[HloOperation]:
        branches = [
            list(self.operations(self._module.computations[name], call))
            for name in conditional.branches()
        ]
        yield from max(branches, key=lambda branch: total(branch).num_bytes, default=[])

    def _call(self, instruction: Instruction, call: _Call) -> Iterator[HloOperation]:
        thread = instruction.text_attribute("async_execution_thread")
        name = instruction.called("to_apply") or instruction.called("calls")
        inside = _Call(
            num_runs=call.num_runs,
            unit="SparseCore" if thread == _SPARSE_CORE_THREAD else call.unit,
            op_name=instruction.op_name or call.op_name,
            source=self._module.source_of(instruction) or call.source,
        )
        yield from self.operations(self._module.computations[name or ""], inside)

    def _operation(
        self, instruction: Instruction, computation: Computation, call: _Call
    ) -> HloOperation:
        op_name = self._op_name(instruction, computation) or call.op_name
        result = next(iter(results_of(instruction, computation)), None)
        return HloOperation(
            name=instruction.name,
            operation_class=self._class_of(instruction),
            part=_part_of(op_name),
            unit=call.unit,
            dims=result.dims if result else (),
            operand_dims=tuple(
                shape.dims
                for shapes in computation.operand_shapes(instruction)
                for shape in shapes
            ),
            result_bytes=result.num_bytes if result else 0,
            num_runs=call.num_runs,
            traffic=traffic_of(instruction, computation, self._module).times(
                call.num_runs
            ),
            op_name=op_name,
            source=self._module.source_of(instruction) or call.source,
        )

    def _class_of(self, instruction: Instruction) -> OperationClass:
        opcode = instruction.base_opcode
        if opcode == "fusion":
            inside = self._fused[callee(instruction, self._module).name]
            if inside & COLLECTIVES:
                return "other collective"
            for candidate in _RANKING:
                if candidate in inside:
                    return _CLASS_OF_OPCODE[candidate]
            return "copy" if inside <= _COPY_FUSION else "elementwise"
        if opcode in _CLASS_OF_OPCODE:
            return _CLASS_OF_OPCODE[opcode]
        if opcode in COLLECTIVES:
            return "other collective"
        return "copy" if opcode in _COPIES else "elementwise"

    def _op_name(self, instruction: Instruction, computation: Computation) -> str:
        """Returns JAX's name of the operation that an instruction comes from, or "".

        XLA inserts some instructions without an origin, such as copies. They get the
        origin of the nearest instruction that reads them, or else of their operands.
        """
        if _has_origin(instruction):
            return instruction.op_name

        def read_by(name: str) -> list[str]:
            return [user.name for user, _ in computation.users.get(name, ())]

        def reads(name: str) -> list[str]:
            return list(computation.instructions[name].operands)

        for neighbours in (read_by, reads):
            seen, pending = {instruction.name}, [instruction.name]
            while pending:
                for name in neighbours(pending.pop(0)):
                    if _has_origin(computation.instructions[name]):
                        return computation.instructions[name].op_name
                    if name not in seen:
                        seen.add(name)
                        pending.append(name)
        return ""


def _has_origin(instruction: Instruction) -> bool:
    """Returns True if an instruction names the JAX operation it comes from.

    A parameter names an argument instead. Some instructions that XLA inserts have a
    bare word.
    """
    return instruction.opcode != "parameter" and "/" in instruction.op_name


def _part_of(op_name: str) -> StepPart:
    if not op_name:
        return "unattributed"
    of_model = DENSE_SCOPE in op_name or "shard_map" not in op_name
    return "dense" if of_model and EMBEDDING_SCOPE not in op_name else "embedding"


def _opcodes_inside(computation: Computation, module: Module) -> frozenset[str]:
    """Returns the opcodes inside a computation, nested fusions included."""
    opcodes = set()
    for instruction in computation.instructions.values():
        if instruction.opcode == "fusion":
            opcodes |= _opcodes_inside(callee(instruction, module), module)
        else:
            opcodes.add(instruction.opcode)
    return frozenset(opcodes)
