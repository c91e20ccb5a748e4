"""Modelled timeline of a program: the start, end and overlap of its operations.

XLA fixes the order of a program's instructions. It also fixes where asynchronous
operations start and where the program waits for them: operations on SparseCore,
collectives and copies. The timeline follows from that order and from the traffic of
each operation (`cost.py`):

* The TensorCore runs the instructions in order, one at a time. An asynchronous
  operation runs in parallel from its start. The TensorCore stalls where it waits for
  one.
* An operation alone takes its bytes over the bandwidth. Concurrent operations share
  each bandwidth evenly, so no step is shorter than its total traffic over the
  bandwidth.

The model ignores arithmetic, latency and data-dependent loops. If a bandwidth is
unknown, each TensorCore instruction takes one place in the schedule order instead.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, get_args

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.tools.compile_report.bandwidth import Cost, cost_of
from tpu_embedding.tools.compile_report.cost import (
    Operation,
    OperationClass,
    Part,
    ProgramCost,
    total,
)
from tpu_embedding.tools.compile_report.hlo import Instruction, Module

Axis = Literal["modelled seconds", "order of the schedule"]
Lane = Literal["TensorCore", "SparseCore", "links", "copies"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)

MAX_INTERVALS: Final = 200
"""Maximum number of intervals in a timeline; it keeps the longest."""
_MERGE_SHARE: Final = 3e-3
"""Share of the timeline, a few pixels, below which neighbours merge into one."""
_NEGLIGIBLE_SECONDS: Final = 1e-15
"""Remaining time that counts as done; rounding leaves such remainders."""

_LINK_CLASSES: Final = frozenset(
    {"all-to-all", "all-reduce", "other collective", "between slices"}
)
_Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """Time interval of one operation, or of several short ones in a row.

    Class, part and name are those of the longest operation.

    Attributes:
      lane: row of the timeline: `"TensorCore"`, `"SparseCore"`, `"links"` for
        collectives, or `"copies"` for asynchronous copies.
      begin: start of the interval, on the timeline's axis.
      end: end of the interval, on the timeline's axis.
      operation_class: see `cost.Operation`.
      part: see `cost.Operation`.
      op_name: JAX's name of the operation, or "".
      num_operations: number of operations in the interval.
    """

    lane: Lane
    begin: float
    end: float
    operation_class: OperationClass
    part: Part
    op_name: str
    num_operations: int = 1

    @property
    def length(self) -> float:
        """Length of the interval on the timeline's axis."""
        return self.end - self.begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """Modelled timeline of one step.

    Attributes:
      axis: `"modelled seconds"` after the start of the step. If a bandwidth is unknown,
        `"order of the schedule"`: places in the order of instructions.
      length: length of the step.
      sparse_core: length during which SparseCore is busy.
      overlap: length during which SparseCore and TensorCore are both busy.
      intervals: at most `MAX_INTERVALS` intervals, sorted by lane, then time.
      num_left_out: number of operations in the shorter intervals, which are not kept.
        Operations without traffic take no modelled time and are not counted.
    """

    axis: Axis
    length: float
    sparse_core: float
    overlap: float
    intervals: tuple[Interval, ...]
    num_left_out: int


def make_timeline(
    module: Module, program: ProgramCost, hardware: HardwareInfo
) -> Timeline:
    """Returns the modelled timeline of a program.

    Args:
      module: the compiled program, from `parse_module`.
      program: the traffic of the same program, from `program_cost`.
      hardware: hardware of the devices.

    Example:
      >>> from tpu_embedding.tools.compile_report.cost import program_cost
      >>> from tpu_embedding.tools.compile_report.hlo import parse_module
      >>> module = parse_module('''ENTRY %main (a: f32[8,128]) -> f32[8,128] {
      ...   %a = f32[8,128]{1,0:T(8,128)} parameter(0)
      ...   ROOT %b = f32[8,128]{1,0:T(8,128)} negate(%a)
      ... }''')
      >>> hardware = HardwareInfo(name="a", hbm_bytes_per_second=8192e6)
      >>> make_timeline(module, program_cost(module), hardware).length
      1e-06
    """
    operations = _operations_of_entry(module, program)
    costs = {n: cost_of(total(found), hardware) for n, found in operations.items()}
    seconds = {name: _seconds(cost) for name, cost in costs.items()}
    known = {name: each for name, each in seconds.items() if each is not None}
    events = [event for event in _events(module) if event.name in operations]
    if len(known) == len(seconds):
        axis: Axis = "modelled seconds"
        spans = _spans_by_time(events, known)
    else:
        axis = "order of the schedule"
        spans = _spans_by_order(events)
    asynchronous = {event.name for event in events if event.action == "start"}
    intervals = [
        _interval(span, operations[name], name in asynchronous)
        for name, span in spans.items()
        if span[0] < span[1]
    ]
    length = max((interval.end for interval in intervals), default=0.0)
    shown, num_left_out = _merge_and_keep_longest(intervals, length)
    tensor_core, sparse_core = (
        [(i.begin, i.end) for i in intervals if i.lane == lane]
        for lane in ("TensorCore", "SparseCore")
    )
    busy = _union_length(sparse_core)
    either = _union_length(tensor_core + sparse_core)
    return Timeline(
        axis=axis,
        length=length,
        sparse_core=busy,
        overlap=max(0.0, busy + _union_length(tensor_core) - either),
        intervals=tuple(shown),
        num_left_out=num_left_out,
    )


def _operations_of_entry(
    module: Module, program: ProgramCost
) -> dict[str, list[Operation]]:
    """Returns the operations that each instruction of the entry runs, by its name.

    It relies on `program_cost`, which lists operations in instruction order.
    """
    pending = collections.deque(program.operations)
    operations: dict[str, list[Operation]] = {}
    for instruction in module.entry.instructions.values():
        names = _names_run_by(instruction, module)
        while pending and pending[0].name in names:
            operations.setdefault(instruction.name, []).append(pending.popleft())
    assert not pending, pending[0].name
    return operations


def _names_run_by(instruction: Instruction, module: Module) -> set[str]:
    """Returns the names of an instruction and of all instructions that it runs."""
    names = {instruction.name}
    if instruction.opcode != "fusion":
        attributes = ("calls", "to_apply", "body", "condition")
        called = [instruction.called(attribute) for attribute in attributes]
        for name in (*called, *instruction.branches()):
            if name is not None:
                for inside in module.computations[name].instructions.values():
                    names |= _names_run_by(inside, module)
    return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Event:
    """One scheduling event of the TensorCore.

    Attributes:
      action: `"run"` executes an operation to its end, `"start"` starts an asynchronous
        one, `"wait"` waits for its end.
      name: name of the instruction that runs or starts the operation.
    """

    action: Literal["run", "start", "wait"]
    name: str


def _events(module: Module) -> Iterator[_Event]:
    """Yields the events of the TensorCore in schedule order."""
    instructions = module.entry.instructions
    start_of: dict[str, str] = {}
    for instruction in instructions.values():
        if instruction.opcode.endswith(("-update", "-done")) and instruction.operands:
            before = instruction.operands[0]
            start_of[instruction.name] = start_of.get(before, before)
    awaited = set(start_of.values())
    for instruction in instructions.values():
        name = instruction.name
        # A start without operands only prepares: its update passes the operands.
        is_prepared = name in awaited and not instruction.operands
        if instruction.opcode.endswith("-done") and name in start_of:
            yield _Event(action="wait", name=start_of[name])
        elif instruction.opcode.endswith("-update") and name in start_of:
            if not instructions[start_of[name]].operands:
                yield _Event(action="start", name=start_of[name])
        elif not is_prepared:
            action = "start" if name in awaited else "run"
            yield _Event(action=action, name=name)


def _seconds(cost: Cost) -> tuple[float, ...] | None:
    """Returns the seconds over HBM, ICI and DCN; None if one of them is unknown."""
    pairs = (
        (cost.hbm_bytes, cost.hbm_seconds),
        (cost.ici_bytes, cost.ici_seconds),
        (cost.dcn_bytes, cost.dcn_seconds),
    )
    if any(num_bytes and seconds is None for num_bytes, seconds in pairs):
        return None
    return tuple(seconds or 0.0 for _, seconds in pairs)


def _spans_by_time(
    events: Iterable[_Event], seconds: Mapping[str, tuple[float, ...]]
) -> dict[str, _Span]:
    clock = _Clock()
    for event in events:
        if event.action != "wait":
            clock.start(event.name, seconds[event.name])
        if event.action != "start":
            clock.wait(event.name)
    clock.wait_for_all()
    return clock.spans


class _Clock:
    """Simulated clock of operations that share bandwidths.

    Attributes:
      spans: start and end, in seconds, of each operation that has ended.
    """

    def __init__(self):
        self.spans: dict[str, _Span] = {}
        self._now = 0.0
        self._begun: dict[str, float] = {}
        self._left: dict[str, tuple[float, ...]] = {}

    def start(self, name: str, seconds: tuple[float, ...]) -> None:
        """Starts an operation, given its seconds over each bandwidth when alone."""
        if any(seconds):
            self._begun[name] = self._now
            self._left[name] = seconds

    def wait(self, name: str) -> None:
        """Advances the clock until an operation has ended."""
        while name in self._left:
            self._advance()

    def wait_for_all(self) -> None:
        """Advances the clock until no operation runs."""
        while self._left:
            self._advance()

    def _advance(self) -> None:
        """Advances the clock until one operation finishes with one bandwidth."""
        sharers = [
            sum(map(bool, each)) for each in zip(*self._left.values(), strict=True)
        ]
        step = min(
            seconds * count
            for left in self._left.values()
            for seconds, count in zip(left, sharers, strict=True)
            if seconds
        )
        self._now += step
        for name, left in list(self._left.items()):
            rest = tuple(
                seconds - step / count if seconds else 0.0
                for seconds, count in zip(left, sharers, strict=True)
            )
            rest = tuple(s if s > _NEGLIGIBLE_SECONDS else 0.0 for s in rest)
            self._left[name] = rest
            if not any(rest):
                del self._left[name]
                self.spans[name] = (self._begun[name], self._now)


def _spans_by_order(events: Iterable[_Event]) -> dict[str, _Span]:
    """Returns spans in places of the schedule, one per TensorCore instruction.

    An asynchronous operation spans the places from its start to its wait.
    """
    spans: dict[str, _Span] = {}
    begun: dict[str, float] = {}
    now = 0.0
    for event in events:
        match event.action:
            case "run":
                spans[event.name] = (now, now + 1)
                now += 1
            case "start":
                begun[event.name] = now
            case "wait":
                spans[event.name] = (begun[event.name], now)
    return spans


def _interval(
    span: _Span, operations: Sequence[Operation], is_asynchronous: bool
) -> Interval:
    largest = max(operations, key=lambda operation: operation.traffic.num_bytes)
    lane: Lane = "TensorCore"
    if all(operation.unit == "SparseCore" for operation in operations):
        lane = "SparseCore"
    elif largest.operation_class in _LINK_CLASSES:
        lane = "links"
    elif is_asynchronous and largest.operation_class == "copy":
        lane = "copies"
    return Interval(
        lane=lane,
        begin=span[0],
        end=span[1],
        operation_class=largest.operation_class,
        part=largest.part,
        op_name=largest.op_name,
    )


def _merge_and_keep_longest(
    intervals: Iterable[Interval], length: float
) -> tuple[list[Interval], int]:
    """Merges short neighbours; returns the longest and the number left out."""
    merged: list[Interval] = []
    for interval in sorted(intervals, key=lambda i: (LANES.index(i.lane), i.begin)):
        if merged and _can_merge(merged[-1], interval, _MERGE_SHARE * length):
            merged[-1] = _merge(merged[-1], interval)
        else:
            merged.append(interval)
    kept = sorted(merged, key=lambda i: i.length, reverse=True)[:MAX_INTERVALS]
    kept.sort(key=lambda i: (LANES.index(i.lane), i.begin))
    counts = [sum(i.num_operations for i in each) for each in (merged, kept)]
    return kept, counts[0] - counts[1]


def _can_merge(a: Interval, b: Interval, resolution: float) -> bool:
    """Returns True if `b` merges into `a`, which starts no later than `b`."""
    if a.lane != b.lane or b.begin - a.end > resolution:
        return False
    if (a.operation_class, a.part) == (b.operation_class, b.part):
        return b.begin < a.end or min(a.length, b.length) < resolution
    return max(a.length, b.length) < resolution


def _merge(a: Interval, b: Interval) -> Interval:
    longer = a if a.length >= b.length else b
    return dataclasses.replace(
        longer,
        begin=a.begin,
        end=max(a.end, b.end),
        num_operations=a.num_operations + b.num_operations,
    )


def _union_length(spans: Iterable[_Span]) -> float:
    """Returns the length of the union of some spans."""
    covered, reached = 0.0, 0.0
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
