"""Finds what a program does with its tables, from its optimized HLO.

A train step must update tables and slot variables in place, and must not copy arrays of
their size. If the chip has SparseCores, they must gather and scatter the rows. Tests
check this in the HLO, without a TPU.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, Final

import jax

from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import LANE_BYTES

_DIMS: Final = re.compile(r"\b[a-z]\w*\[([^\]]*)\]")
_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION: Final = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE: Final = re.compile(r"[a-z][\w\-]*")
_NAME: Final = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
      name: unique within the program.
      dims: shape of each array in the result; tuples are flattened.
      is_on_chip: True if an array in the result is in on-chip memory instead of HBM.
    """

    name: str
    opcode: str
    dims: tuple[tuple[int, ...], ...]
    is_on_chip: bool
    operands: tuple[str, ...]
    text: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements in each result array."""
        return tuple(map(math.prod, self.dims))

    @property
    def base_opcode(self) -> str:
        # Asynchronous collectives have two instructions, a start and a done.
        return self.opcode.removesuffix("-start")

    def called(self, name: str) -> str | None:
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return match.group(1) if match else None


Computation = dict[str, Instruction]
"""Instructions by name, in program order. A computation is a function in the program:
the entry, a loop body, the inside of a fusion, and so on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A compiled program. It starts in the computation `entry`."""

    computations: dict[str, Computation]
    entry: Computation

    def unfused_instructions(self) -> Iterator[Instruction]:
        """Yields the instructions whose results are stored in memory."""
        # A fusion writes only its final result.
        fused = {
            i.called("calls")
            for computation in self.computations.values()
            for i in computation.values()
            if i.opcode == "fusion"
        }
        for name, computation in self.computations.items():
            if name not in fused:
                yield from computation.values()


def parse_module(text: str) -> Module:
    """Parses the text from `compiled.as_text()`.

    Example:
      >>> module = parse_module('''ENTRY %main (a: f32[8,128]) -> f32[8,128] {
      ...   %a = f32[8,128]{1,0:T(8,128)} parameter(0)
      ...   ROOT %b = f32[8,128]{1,0:T(8,128)} negate(%a)
      ... }''')
      >>> [(i.opcode, i.dims) for i in module.unfused_instructions()]
      [('parameter', ((8, 128),)), ('negate', ((8, 128),))]
    """
    computations: dict[str, Computation] = {}
    entry = ""
    instructions: Computation = {}
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            entry = name if start[1] else entry
            instructions = computations[name] = {}
        elif match := _INSTRUCTION.match(line):
            instruction = _parse_instruction(match[1], match[2], line.strip())
            if instruction is not None:
                instructions[instruction.name] = instruction
    if entry not in computations:
        raise ValueError(
            "text must be an HLO program, but has no ENTRY computation. Pass the "
            "result of compiled.as_text()."
        )
    return Module(computations=computations, entry=computations[entry])


def _parse_instruction(name: str, rest: str, text: str) -> Instruction | None:
    result, call = _split(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, parenthesis, _ = call.lstrip().partition("(")
    if not parenthesis or not _OPCODE.fullmatch(opcode):
        return None
    # The attributes after the operands may contain names and parentheses.
    operands, _ = _split(call.lstrip()[len(opcode) :])
    sides = (re.findall(r"\d+", dims) for dims in _DIMS.findall(result))
    return Instruction(
        name=name,
        opcode=opcode,
        dims=tuple(tuple(map(int, numbers)) for numbers in sides),
        # In a layout, S(1) means on-chip memory.
        is_on_chip="S(1)" in result,
        operands=tuple(_NAME.findall(operands)),
        text=text,
    )


def _split(text: str) -> tuple[str, str]:
    """Splits a text after its leading group in parentheses."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return text[: match.end()], text[match.end() :]
    return text, ""


# Instructions that forward an array or update it in place.
_WITHOUT_COPY: Final = frozenset(
    "parameter get-tuple-element tuple while conditional call bitcast opt-barrier "
    "scatter async-start async-update async-done call-start call-update call-done "
    "custom-call".split()
)
_COPIES: Final = frozenset({"copy", "copy-start", "copy-done", "transpose"})
_MIN_TABLE_SIZE: Final = 2**14
"""Arrays with fewer elements per device (below 64 KiB) don't count as table-sized.

Small arrays may match a small table's size by chance, and XLA rightly moves small
tables to on-chip memory.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableAccesses:
    """Table accesses in a compiled train step, with sizes in bytes per device.

    Attributes:
      argument_bytes: total size of the inputs.
      alias_bytes: size of the inputs that are updated in place.
      temporary_bytes: peak size of the temporaries, including what SparseCores write.
      table_sized_copies: copies of table-sized arrays within HBM. An array is
        table-sized if it is exactly as large as a stacked table, a slot variable or a
        map of cached rows, or if it is larger than all of them. Copies below 64 KiB per
        device are not reported. Copies between HBM and on-chip memory are not reported
        either, because XLA may keep small tables on-chip during a step.
      table_sized_passes: other instructions that write table-sized arrays, except
        in-place scatters. Only an optimizer that updates every row needs them.
      table_sized_all_gathers: all-gathers that produce table-sized arrays.
      sparse_core_gathers: number of gathers on SparseCore.
      sparse_core_scatters: number of scatters on SparseCore.
      sparse_core_operations: number of XLA embedding lookups and updates.
      sparse_core_relayouts: number of copies on SparseCore that change the layout of an
        array. Any such copy is a defect.
      all_to_alls: number of all-to-alls, including the ones in later rounds.

    Example:
      Given the `report` of your own step, from `compile_report`::

          assert report.accesses.table_sized_copies == ()
          assert report.accesses.sparse_core_gathers > 0
    """

    argument_bytes: int
    alias_bytes: int
    temporary_bytes: int
    table_sized_copies: tuple[str, ...]
    table_sized_passes: tuple[str, ...]
    table_sized_all_gathers: tuple[str, ...]
    sparse_core_gathers: int
    sparse_core_scatters: int
    sparse_core_operations: int
    sparse_core_relayouts: int
    all_to_alls: int


def inspect_program(
    compiled: jax.stages.Compiled, plan: EmbeddingPlan
) -> TableAccesses:
    """Finds what a compiled program does with its tables.

    Args:
      compiled: result of `jax.jit(...).lower(...).compile(...)`, for any platform.
      plan: embedding plan, which has the sizes of tables and slots.

    Example:
      >>> import tpu_embedding as te
      >>> from tpu_embedding.tools.compile_report import abstract_arrays
      >>> table = te.TableConfig(vocabulary_size=1_000_000, dim=8, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> key = jax.random.key(0)
      >>> tables = jax.eval_shape(te.functional.init_tables, plan, key)
      >>> double = jax.jit(lambda tables: jax.tree.map(lambda x: 2 * x, tables))
      >>> compiled = double.lower(abstract_arrays(tables, plan)).compile()
      >>> len(inspect_program(compiled, plan).table_sized_passes)
      1
    """
    # JAX gives the optimized program only as text.
    text = compiled.as_text()
    assert text is not None
    memory = compiled.memory_analysis()
    assert memory is not None
    sizes = set()
    for stack in plan.stacks:
        layouts = (stack.layout, *map(stack.layout.slot_layout, stack.slots))
        sizes |= {math.prod(layout.lines_shape) for layout in layouts}
        # Size of the map of cached rows, or 0.
        sizes.add(stack.storage.bytes_per_device // LANE_BYTES)
    instructions = list(parse_module(text).unfused_instructions())

    def is_large(size: int) -> bool:
        return size >= _MIN_TABLE_SIZE and (size in sizes or size > max(sizes))

    large = [i for i in instructions if any(map(is_large, i.sizes))]
    copies = [i for i in large if i.opcode in _COPIES]
    # If a fusion updates in place, XLA names the fusion after the scatter inside.
    passes = (
        i
        for i in large
        if i.opcode not in _COPIES | _WITHOUT_COPY
        and not (i.opcode == "fusion" and "scatter" in i.name)
    )
    on_chip = {i.name for i in instructions if i.is_on_chip}
    return TableAccesses(
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=temporary_bytes(memory),
        table_sized_copies=tuple(
            i.text for i in copies if on_chip.isdisjoint((i.name, *i.operands))
        ),
        table_sized_passes=tuple(i.text for i in passes),
        table_sized_all_gathers=tuple(
            i.text for i in large if i.base_opcode == "all-gather"
        ),
        sparse_core_gathers=text.count("OFFLOAD_GATHER"),
        sparse_core_scatters=text.count("OFFLOAD_SCATTER"),
        sparse_core_operations=sum(
            i.opcode == "call-start" and "OFFLOAD_EMBEDDING" in i.text
            for i in instructions
        ),
        sparse_core_relayouts=text.count("OFFLOAD_DATA_FORMATTING"),
        all_to_alls=sum(i.base_opcode == "all-to-all" for i in instructions),
    )


def temporary_bytes(sizes: Any) -> int:
    """Computes the peak size of temporaries, from `compiled.memory_analysis()`."""
    # `temp_size_in_bytes` leaves out what SparseCores write, but the peak memory
    # includes it. For a gather of 16.7 million rows, `temp_size_in_bytes` is 0.12 MiB,
    # and the peak memory is 8,938 MiB.
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    peak = sizes.peak_memory_in_bytes - sizes.argument_size_in_bytes - outputs
    return max(sizes.temp_size_in_bytes, peak)
