"""What a step moves, by class of operation: a model of a compiled program's traffic.

XLA's own cost analysis charges the whole table for each gather and scatter, so its
figures grow with the vocabulary though the program's work does not. Here the optimised
HLO is walked instead. `traffic.py` says what one instruction moves; this module says
which instructions run how often:

* The body of a loop counts as often as the loop turns. Where that depends on data (as
  for the gradients of repeated ids, an eighth of the places at a time, and for the
  further rounds of a lookup, which run under skew only), the loop is listed with the
  cost of one turn, and is in no total. The floor, too, is that of ids that differ where
  they can.
* Of a conditional's branches, the one that moves most counts.
* What runs asynchronously, on SparseCore or as a copy, counts once, where it starts.

Bytes over bandwidth is a time that no program can beat, not a forecast: arithmetic,
latency and waiting come on top. Such times are *modelled*; nothing here is measured.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final, Literal, get_args

from tpu_embedding.aot.hlo import Computation, Instruction, Module
from tpu_embedding.aot.traffic import (
    COLLECTIVES,
    Traffic,
    callee,
    is_free,
    results_of,
    traffic_of,
)
from tpu_embedding.aot.trip_counts import trip_count

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
"""In the order of reports; "elementwise" is every fusion, reduction and the like that
is nothing else."""

Part = Literal["embedding", "dense", "unattributed"]
Unit = Literal["TensorCore", "SparseCore"]

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
# Which of several operations gives a fusion its class.
_RANKING: Final = ("scatter", "sort", "convolution", "dot", "gather")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An instruction of a program, and what it moves in a step.

    Attributes:
      name: of the instruction.
      operation_class: what kind of work it is.
      part: `"embedding"` for what runs inside the layer's `shard_map`, `"dense"` for
        the rest of the step, `"unattributed"` where XLA gives no origin.
      unit: where it runs.
      dims: of its (first) result.
      operand_dims: of all it reads.
      result_bytes: of its (first) result, with the padding of tiles.
      turns: how often it runs in a step.
      traffic: of all turns together.
      op_name: JAX's name of what it comes from, or "".
      source: line of Python it comes from, `"file:line"`, or "".
    """

    name: str
    operation_class: OperationClass
    part: Part
    unit: Unit
    dims: tuple[int, ...]
    operand_dims: tuple[tuple[int, ...], ...]
    result_bytes: int
    turns: int
    traffic: Traffic
    op_name: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataDependentLoop:
    """A loop whose number of turns depends on data.

    Attributes:
      name: of the instruction.
      op_name: JAX's name of what it comes from, or "".
      source: line of Python it comes from, `"file:line"`, or "".
      operations: of one turn; loops within it are listed for themselves.
    """

    name: str
    op_name: str
    source: str
    operations: tuple[Operation, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCost:
    """What a program moves, per device.

    Attributes:
      operations: that run in every step.
      loops: that run as often as data ask for, in no total.
    """

    operations: tuple[Operation, ...]
    loops: tuple[DataDependentLoop, ...]


def program_cost(module: Module) -> ProgramCost:
    """Models what a program moves.

    Args:
      module: from `parse_module`.

    Example:
      >>> from tpu_embedding.aot.hlo import parse_module
      >>> module = parse_module('''ENTRY %main (a: f32[8,128]) -> f32[8,128] {
      ...   %a = f32[8,128]{1,0:T(8,128)} parameter(0)
      ...   ROOT %b = f32[8,128]{1,0:T(8,128)} negate(%a)
      ... }''')
      >>> program_cost(module).operations[0].traffic.hbm_bytes
      8192
    """
    walk = _Walk(module)
    operations = tuple(walk.operations(module.entry, _Call()))
    return ProgramCost(operations=operations, loops=tuple(walk.loops))


def total(operations: Iterable[Operation]) -> Traffic:
    """Returns what some operations move together."""
    return sum((operation.traffic for operation in operations), Traffic())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """How a computation comes to run.

    Attributes:
      turns: how often.
      unit: where.
      op_name: origin of the instruction that runs it, or "".
      source: line of Python of that instruction, or "".
    """

    turns: int = 1
    unit: Unit = "TensorCore"
    op_name: str = ""
    source: str = ""


class _Walk:
    """Goes through the computations of a program in the order of calls.

    Attributes:
      loops: those with turns that depend on data, as far as it has gone.
    """

    def __init__(self, module: Module):
        self.loops: list[DataDependentLoop] = []
        self._module = module
        self._fused = {
            name: _opcodes_inside(computation, module)
            for name, computation in module.computations.items()
        }

    def operations(self, computation: Computation, call: _Call) -> Iterator[Operation]:
        """Yields what runs in a computation, and in those that it runs."""
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
    ) -> Iterator[Operation]:
        turns = trip_count(loop, computation, self._module)
        names = (loop.called("body"), loop.called("condition"))
        parts = [self._module.computations[name or ""] for name in names]
        if turns is not None:
            inside = dataclasses.replace(call, turns=call.turns * turns)
            for part in parts:
                yield from self.operations(part, inside)
            return
        inside = dataclasses.replace(call, turns=1)
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
    ) -> Iterator[Operation]:
        branches = [
            list(self.operations(self._module.computations[name], call))
            for name in conditional.branches()
        ]
        yield from max(branches, key=lambda branch: total(branch).num_bytes, default=[])

    def _call(self, instruction: Instruction, call: _Call) -> Iterator[Operation]:
        thread = instruction.text_attribute("async_execution_thread")
        name = instruction.called("to_apply") or instruction.called("calls")
        inside = _Call(
            turns=call.turns,
            unit="SparseCore" if thread == _SPARSE_CORE_THREAD else call.unit,
            op_name=instruction.op_name or call.op_name,
            source=self._module.source_of(instruction) or call.source,
        )
        yield from self.operations(self._module.computations[name or ""], inside)

    def _operation(
        self, instruction: Instruction, computation: Computation, call: _Call
    ) -> Operation:
        op_name = self._op_name(instruction, computation) or call.op_name
        result = next(iter(results_of(instruction, computation)), None)
        return Operation(
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
            turns=call.turns,
            traffic=traffic_of(instruction, computation, self._module).times(
                call.turns
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
        """Returns the origin of an instruction.

        Of one that XLA put in and gives none, a copy for instance, that of what it is
        for, or else of what it comes from.
        """
        if _is_origin(instruction):
            return instruction.op_name

        def read_by(name: str) -> list[str]:
            return [user.name for user, _ in computation.users.get(name, ())]

        def reads(name: str) -> list[str]:
            return list(computation.instructions[name].operands)

        for neighbours in (read_by, reads):
            seen, pending = {instruction.name}, [instruction.name]
            while pending:
                for name in neighbours(pending.pop(0)):
                    if _is_origin(computation.instructions[name]):
                        return computation.instructions[name].op_name
                    if name not in seen:
                        seen.add(name)
                        pending.append(name)
        return ""


def _is_origin(instruction: Instruction) -> bool:
    """Whether it says where in the JAX program it comes from.

    A parameter has the name of an argument, and some of XLA's own work a bare word.
    """
    return instruction.opcode != "parameter" and "/" in instruction.op_name


def _part_of(op_name: str) -> Part:
    if not op_name:
        return "unattributed"
    return "embedding" if "shard_map" in op_name else "dense"


def _opcodes_inside(computation: Computation, module: Module) -> frozenset[str]:
    """Returns what a fusion does, fusions within it included."""
    opcodes = set()
    for instruction in computation.instructions.values():
        if instruction.opcode == "fusion":
            opcodes |= _opcodes_inside(callee(instruction, module), module)
        else:
            opcodes.add(instruction.opcode)
    return frozenset(opcodes)
