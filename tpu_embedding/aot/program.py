"""What a compiled program does to the tables, read from its optimised HLO.

The contract of a train step: tables and slot variables are updated in place, nothing of
their size is copied, and rows are gathered and scattered on SparseCore where there is
one. All of that is visible in the program, so it is checked without a TPU.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Final

import jax

from tpu_embedding.layout.plan import EmbeddingPlan

# Instructions that hand an array on, or update it in place.
_MOVES_NOTHING: Final = frozenset(
    {
        "parameter",
        "get-tuple-element",
        "tuple",
        "while",
        "conditional",
        "call",
        "bitcast",
        "opt-barrier",
        "scatter",
        "custom-call",
        "async-start",
        "async-update",
        "async-done",
        "call-start",
        "call-update",
        "call-done",
    }
)
_COPIES: Final = frozenset({"copy", "copy-start", "copy-done", "transpose"})
_ALL_GATHERS: Final = frozenset({"all-gather", "all-gather-start"})
_COMPUTATION: Final = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_FUSED: Final = re.compile(r"\bfusion\(.*\bcalls=%?([\w.\-]+)")
_INSTRUCTION: Final = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE: Final = re.compile(r"\b[a-z]+\d*\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of an HLO program.

    Attributes:
      name: its name.
      opcode: what it does, `"copy"`, `"fusion"`, ...
      sizes: elements of each part of its result.
      text: the whole line.
    """

    name: str
    opcode: str
    sizes: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """Facts about a compiled train step; sizes in bytes per device.

    Attributes:
      argument_bytes: of all inputs.
      alias_bytes: of inputs that are updated in place.
      temporary_bytes: memory the program takes beside inputs and outputs.
      table_sized_copies: copies of the size of a stacked table or slot variable, or
        larger than all.
      table_sized_passes: other instructions that make something of such a size, and
        are no scatter in place; an optimizer of every row needs them.
      table_sized_all_gathers: all-gathers of such a size.
      sparse_core_gathers: gathers that run on SparseCore.
      sparse_core_scatters: scatters that run on SparseCore.
      sparse_core_relayouts: table copies for a layout change on SparseCore; a fault.
      all_to_alls: exchanges between devices, those of further rounds included.
    """

    argument_bytes: int
    alias_bytes: int
    temporary_bytes: int
    table_sized_copies: tuple[str, ...]
    table_sized_passes: tuple[str, ...]
    table_sized_all_gathers: tuple[str, ...]
    sparse_core_gathers: int
    sparse_core_scatters: int
    sparse_core_relayouts: int
    all_to_alls: int


def inspect_program(
    compiled: jax.stages.Compiled, plan: EmbeddingPlan
) -> ProgramReport:
    """Reads the facts off a compiled program.

    Args:
      compiled: of `jax.jit(...).lower(...).compile(...)`, for any platform.
      plan: of the layer in it; says what size tables and slot variables have.

    Returns:
      The report.
    """
    text = compiled.as_text()
    assert text is not None
    memory = compiled.memory_analysis()
    assert memory is not None
    layouts = [
        layout
        for stack in plan.stacks
        for layout in (
            stack.layout,
            *(plan.slot_layout(stack, slot) for slot in stack.slots),
        )
    ]
    sizes = {layout.num_lines * layout.lanes for layout in layouts}
    large = [i for i in instructions(text) if _is_table_sized(i, sizes)]
    return ProgramReport(
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        table_sized_copies=tuple(i.text for i in large if i.opcode in _COPIES),
        table_sized_passes=tuple(
            i.text for i in large if i.opcode not in _COPIES and not _is_in_place(i)
        ),
        table_sized_all_gathers=tuple(
            i.text for i in large if i.opcode in _ALL_GATHERS
        ),
        sparse_core_gathers=text.count("OFFLOAD_GATHER"),
        sparse_core_scatters=text.count("OFFLOAD_SCATTER"),
        sparse_core_relayouts=text.count("OFFLOAD_DATA_FORMATTING"),
        all_to_alls=sum(
            i.opcode in ("all-to-all", "all-to-all-start", "ragged-all-to-all")
            for i in instructions(text)
        ),
    )


def instructions(text: str) -> Iterator[Instruction]:
    """Yields the instructions of an HLO text, those inside fusions left out."""
    fused = set(_FUSED.findall(text))
    computation = ""
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start is not None:
            computation = start.group(1)
        if computation in fused:
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        result, rest = _split_type(match.group(2))
        opcode = rest.split("(", 1)[0].strip()
        if not re.fullmatch(r"[a-z][\w\-]*", opcode):
            continue
        sizes = [
            math.prod(int(size) for size in dims.split(",") if size)
            for dims in _SHAPE.findall(result)
        ]
        yield Instruction(
            name=match.group(1),
            opcode=opcode,
            sizes=tuple(sizes),
            text=line.strip(),
        )


def _split_type(text: str) -> tuple[str, str]:
    """Splits `type opcode(...)`; the type may be a tuple with nested parentheses."""
    if not text.startswith("("):
        result, _, rest = text.partition(" ")
        return result, rest
    depth = 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[: i + 1], text[i + 1 :].lstrip()
    return text, ""


def _is_table_sized(instruction: Instruction, sizes: set[int]) -> bool:
    """Whether a result is as large as a table or slot variable, or larger than all."""
    return any(size in sizes or size > max(sizes) for size in instruction.sizes)


def _is_in_place(instruction: Instruction) -> bool:
    """A fusion is in place if it is made of a scatter; XLA names it so."""
    if instruction.opcode == "fusion":
        return "scatter" in instruction.name
    return instruction.opcode in _MOVES_NOTHING
