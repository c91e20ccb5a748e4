"""Sums the TPU compiler's estimated cycles, counting each iteration of a loop.

XLA's own cost analysis (`optimal_seconds`) counts a loop body only once. The sum is not
a running time, because operations may overlap. Use the sum to compare programs.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Final

from tpu_embedding.plan.memory import format_table
from tpu_embedding.tools.compile_report.hlo import (
    Computation,
    Instruction,
    Module,
    parse_module,
)

NOT_CHARGED: Final = "work on SparseCores and waiting for other devices"
"""What the compiler's estimate leaves out."""

# At most 9 digits, because unknown estimates are -1 or a huge number.
_CYCLES: Final = re.compile(r'"estimated_cycles":"(\d{1,9})"')
_SCOPE: Final = re.compile(r'op_name="([^"]*)"')
_BRANCHES: Final = re.compile(
    r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+)"
)
_NAME: Final = re.compile(r"[\w.\-]+")
_KERNELS: Final = frozenset(
    "add all-reduce all-to-all broadcast call-start compare concatenate convert copy "
    "copy-start custom-call dynamic-slice dynamic-update-slice fusion gather iota pad "
    "reduce reduce-window scatter select slice sort transpose".split()
)
"""Opcodes that start a kernel or a transfer, except for a few that XLA fuses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation in a program.

    Attributes:
      scope: names of the `jax.named_scope`s and the primitive, or "" if the compiler
        added the operation.
      shape: dimensions of the result, or of its first array if it is a tuple.
      runs: runs per step, counted as in `Cycles.total`.
      cycles: estimated cycles per run; 0 if the compiler charges nothing.
    """

    name: str
    scope: str
    shape: tuple[int, ...]
    runs: int
    cycles: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycles:
    """Estimated cycles for one run of a program, per TensorCore.

    Attributes:
      total: sum over all operations. It counts both branches of each conditional, and
        one iteration of each loop whose length depends on data.
      num_operations: number of kernel starts and transfers, counted as in `total`.
      data_loops: scopes of the loops whose length depends on data.
      operations: all operations, the most expensive first.

    Example:
      >>> cycles = count_cycles('''ENTRY %main (a: f32[8]) -> f32[8] {
      ...   ROOT %b = f32[8] sort(%a), {"estimated_cycles":"55"}
      ... }''')
      >>> cycles.total, cycles.num_operations, cycles.data_loops
      (55, 1, ())
    """

    total: int
    num_operations: int
    data_loops: tuple[str, ...]
    operations: tuple[Operation, ...]


def count_cycles(text: str) -> Cycles:
    """Sums the estimated cycles of a program compiled for a TPU.

    Args:
      text: the program, from `compiled.as_text()`. Programs for other platforms have no
        estimates, so their sums are 0.

    Raises:
      ValueError: if the text has no entry computation.

    Example:
      >>> cycles = count_cycles('''ENTRY %main (a: f32[8,128]) -> f32[8,128] {
      ...   %a = f32[8,128]{1,0} parameter(0)
      ...   ROOT %b = f32[8,128]{1,0} negate(%a), {"estimated_cycles":"55"}
      ... }''')
      >>> cycles.total, cycles.operations[0].name, cycles.operations[0].shape
      (55, 'b', (8, 128))
    """
    module = parse_module(text)
    operations, loops, num_operations = [], [], 0
    for instruction, runs, depends_on_data in _operations_and_runs(
        module, module.entry, 1
    ):
        scope = _SCOPE.search(instruction.text)
        if depends_on_data:
            loops.append(scope[1] if scope else instruction.name)
        found = _CYCLES.search(instruction.text)
        operation = Operation(
            name=instruction.name,
            scope=scope[1] if scope else "",
            shape=instruction.dims[0] if instruction.dims else (),
            runs=runs,
            cycles=int(found[1]) if found else 0,
        )
        operations.append(operation)
        num_operations += runs if instruction.opcode in _KERNELS else 0
    operations.sort(key=lambda x: -x.runs * x.cycles)
    return Cycles(
        total=sum(x.runs * x.cycles for x in operations),
        num_operations=num_operations,
        data_loops=tuple(loops),
        operations=tuple(operations),
    )


def _operations_and_runs(
    module: Module, computation: Computation, runs: int
) -> Iterator[tuple[Instruction, int, bool]]:
    """Yields each operation, its runs, and whether it is a data-dependent loop."""
    # Instructions in a fusion are skipped, because the fusion itself has their cycles.
    for x in computation.values():
        inside, depends_on_data = [], False
        if x.opcode == "while":
            count = _trip_count(module, computation, x)
            depends_on_data = count is None
            iterations = runs * (1 if count is None else count)
            inside.append((x.called("body"), iterations))
            # A loop tests its condition one more time than it runs its body.
            inside.append((x.called("condition"), iterations + runs))
        elif x.opcode == "conditional":
            names = " ".join("".join(pair) for pair in _BRANCHES.findall(x.text))
            inside += [(name, runs) for name in _NAME.findall(names)]
        elif x.opcode == "call":
            inside.append((x.called("to_apply"), runs))
        if x.opcode not in ("conditional", "call"):
            yield x, runs, depends_on_data
        for name, times in inside:
            yield from _operations_and_runs(module, module.computations[name], times)


def _trip_count(module: Module, outside: Computation, loop: Instruction) -> int | None:
    """Counts a loop's iterations, or returns None if they depend on data.

    The counter's start, step and upper limit must be constants.
    """
    condition = module.computations[loop.called("condition") or ""]
    body = module.computations[loop.called("body") or ""]
    test, start = list(condition.values())[-1], outside.get(loop.operands[0])
    bound = _constant(condition, test.operands[-1])
    # `fori_loop` and `scan` test if a counter is less than a constant.
    if test.opcode != "compare" or "direction=LT" not in test.text or bound is None:
        return None
    counter = condition[test.operands[0]]
    index = re.search(r"index=(\d+)", counter.text)
    if counter.opcode != "get-tuple-element" or start is None or index is None:
        return None
    new = body[list(body.values())[-1].operands[int(index[1])]]
    step = _constant(body, new.operands[-1]) if new.opcode == "add" else None
    first = _constant(outside, start.operands[int(index[1])])
    if first is None or not step:
        return None
    # The double negation rounds up, because a last partial step also runs.
    return max(0, -((first - bound) // step))


def _constant(computation: Computation, name: str) -> int | None:
    """Reads an instruction's value if it is an integer constant or a copy of one."""
    instruction = computation.get(name)
    # XLA may copy a loop's start value.
    while instruction is not None and instruction.opcode == "copy":
        instruction = computation.get(instruction.operands[0])
    found = instruction and re.search(
        r" [su]\d+\[\].*constant\((\d+)\)", instruction.text
    )
    return int(found[1]) if found else None


def format_cycles(cycles: Cycles, num_operations: int = 10) -> str:
    """Formats the sums and the most expensive operations as text.

    Example:
      >>> print(format_cycles(cycles))  # doctest: +SKIP
      estimated cycles: 716,112 in 266 operations; not charged: work on SparseCores ...
    """
    lines = [
        f"estimated cycles: {cycles.total:,} in {cycles.num_operations:,} operations; "
        f"not charged: {NOT_CHARGED}"
    ]
    if cycles.data_loops:
        lines.append("loops whose length depends on data, counted once:")
        # Long names lose their start, because the end has the innermost scopes.
        lines += [f"  {scope[-80:]}" for scope in cycles.data_loops]
    rows = [
        (f"{x.runs * x.cycles:,}", f"{x.runs} x", x.name, str(x.shape), x.scope[-60:])
        for x in cycles.operations[:num_operations]
        if x.cycles
    ]
    if rows:
        head = ("cycles", "runs", "operation", "shape", "scope")
        lines.append(format_table([head, *rows], num_left_aligned=0))
    return "\n".join(lines)
