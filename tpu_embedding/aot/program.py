"""What a compiled program does to the tables, read from its optimised HLO.

The contract of a train step: tables and slot variables are updated in place, nothing of
their size is copied, and rows are gathered and scattered on SparseCore where there is
one. All of that is visible in the program, so it is checked without a TPU.
"""

import dataclasses
import math
from typing import Final

import jax

from tpu_embedding.aot.hlo import Instruction, parse_module
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import RowLayout

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
_PALLAS: Final = "tpu_custom_call"
_SMALLEST_TABLE: Final = 2**14
"""Elements per device, 64 KiB, below which a table counts as none: any small array may
have its size, and XLA rightly keeps it on the chip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """Facts about a compiled train step; sizes in bytes per device.

    Attributes:
      argument_bytes: of all inputs.
      alias_bytes: of inputs that are updated in place.
      temporary_bytes: memory the program takes beside inputs and outputs.
      table_sized_copies: copies of the size of a stacked table or slot variable, or
        larger than all; those below 64 KiB per device are not looked for.
      table_sized_passes: other instructions that make something of such a size, and
        are no scatter in place; an optimizer of every row needs them.
      table_sized_all_gathers: all-gathers of such a size.
      sparse_core_gathers: gathers that run on SparseCore.
      sparse_core_scatters: scatters that run on SparseCore.
      kernels: Pallas kernels.
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
    kernels: int
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
    sizes = {math.prod(layout.lines_shape) for layout in row_layouts(plan)}
    instructions = list(parse_module(text).unfused_instructions())
    large = [i for i in instructions if _is_table_sized(i, sizes)]
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
        kernels=sum(
            i.text_attribute("custom_call_target") == _PALLAS for i in instructions
        ),
        sparse_core_relayouts=text.count("OFFLOAD_DATA_FORMATTING"),
        all_to_alls=sum(
            i.base_opcode in ("all-to-all", "ragged-all-to-all") for i in instructions
        ),
    )


def row_layouts(plan: EmbeddingPlan) -> list[RowLayout]:
    """Returns the layouts of a plan's tables and slot variables."""
    return [
        layout
        for stack in plan.stacks
        for layout in (
            stack.layout,
            *(plan.slot_layout(stack, slot) for slot in stack.slots),
        )
    ]


def _is_table_sized(instruction: Instruction, sizes: set[int]) -> bool:
    """Whether a result is as large as a table or slot variable, or larger than all."""
    return any(
        size >= _SMALLEST_TABLE and (size in sizes or size > max(sizes))
        for size in instruction.sizes
    )


def _is_in_place(instruction: Instruction) -> bool:
    """A fusion is in place if it is made of a scatter; XLA names it so.

    A kernel is if it says that its result is an operand.
    """
    if instruction.opcode == "fusion":
        return "scatter" in instruction.name
    if instruction.opcode == "custom-call":
        is_kernel = instruction.text_attribute("custom_call_target") == _PALLAS
        return not is_kernel or "output_to_operand_aliasing" in instruction.attributes
    return instruction.opcode in _MOVES_NOTHING
