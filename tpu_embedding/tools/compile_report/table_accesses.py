"""Facts about a compiled program's treatment of tables, read from its optimised HLO.

A train step promises three things. Tables and slot variables are updated in place. No
array of their size is copied. Rows are gathered and scattered on SparseCore if the chip
has one. The HLO shows all three, so tests check them without a TPU.
"""

import dataclasses
import math
import re
from typing import Final

import jax

from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.compile_report.hlo import Instruction, parse_module
from tpu_embedding.tools.compile_report.memory import temporary_bytes

# Instructions that forward an array or update it in place.
_WITHOUT_COPY: Final = frozenset(
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
        "custom-call",
    }
)
_COPIES: Final = frozenset({"copy", "copy-start", "copy-done", "transpose"})
_ALL_GATHERS: Final = frozenset({"all-gather", "all-gather-start"})
_OPERATION_SCOPE: Final = re.compile("/sparse_core_(lookup|update)/")
"""Scopes of the functions in `sparse_core/operations.py`."""
_MIN_TABLE_SIZE: Final = 2**14
"""Minimum elements per device (64 KiB) of the table-sized arrays in a report.

Smaller arrays may have the size of a small table by chance, and XLA rightly moves small
tables to on-chip memory.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableAccesses:
    """Facts about a compiled train step; sizes in bytes per device.

    Attributes:
      argument_bytes: size of all inputs.
      alias_bytes: size of the inputs that are updated in place.
      temporary_bytes: temporaries at a time, with those of SparseCores; see
        `memory.temporary_bytes`.
      table_sized_copies: copies within HBM of an array as large as a stacked table or
        slot variable, or larger than all of them. XLA may keep small tables on the chip
        during a step; copies there and back are not reported, nor are those below 64
        KiB per device.
      table_sized_passes: other instructions that write an array of that size, except
        scatters in place. Only an optimizer that updates every row needs them.
      table_sized_all_gathers: all-gathers whose result has that size.
      sparse_core_gathers: number of gathers on SparseCore.
      sparse_core_scatters: number of scatters on SparseCore.
      sparse_core_operations: number of XLA's embedding operations, lookups and updates.
      sparse_core_relayouts: number of copies on SparseCore that change an array's
        layout. Any is a defect.
      all_to_alls: number of all-to-alls, including those of later rounds.
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
    """Returns facts about a compiled program.

    Args:
      compiled: result of `jax.jit(...).lower(...).compile(...)`, for any platform.
      plan: plan of the layer in the program; it gives the sizes of tables and slots.
    """
    text = compiled.as_text()
    assert text is not None
    memory = compiled.memory_analysis()
    assert memory is not None
    sizes = {math.prod(shape) for shape in table_shapes(plan)}
    instructions = list(parse_module(text).unfused_instructions())
    large = [i for i in instructions if _is_table_sized(i, sizes)]
    on_chip = {i.name for i in instructions if i.is_on_chip}
    return TableAccesses(
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=temporary_bytes(memory),
        table_sized_copies=tuple(
            i.text
            for i in large
            if i.opcode in _COPIES and on_chip.isdisjoint((i.name, *i.operands))
        ),
        table_sized_passes=tuple(
            i.text for i in large if i.opcode not in _COPIES and not _is_in_place(i)
        ),
        table_sized_all_gathers=tuple(
            i.text for i in large if i.opcode in _ALL_GATHERS
        ),
        sparse_core_gathers=text.count("OFFLOAD_GATHER"),
        sparse_core_scatters=text.count("OFFLOAD_SCATTER"),
        sparse_core_operations=sum(
            i.opcode == "call-start"
            and i.name.startswith("sparse-core-call")
            and _OPERATION_SCOPE.search(i.text) is not None
            for i in instructions
        ),
        sparse_core_relayouts=text.count("OFFLOAD_DATA_FORMATTING"),
        all_to_alls=sum(i.base_opcode == "all-to-all" for i in instructions),
    )


def table_shapes(plan: EmbeddingPlan) -> set[tuple[int, ...]]:
    """Returns the shapes per device of a plan's stacked tables and slot variables."""
    return {
        layout.lines_shape
        for stack in plan.stacks
        for layout in (
            stack.layout,
            *(stack.layout.slot_layout(slot) for slot in stack.slots),
        )
    }


def _is_table_sized(instruction: Instruction, sizes: set[int]) -> bool:
    """Returns True if an instruction makes an array as large as a table or slot.

    An array larger than all tables and slots counts, too. Arrays of fewer elements than
    `_MIN_TABLE_SIZE` do not count.

    Args:
      instruction: instruction whose results are looked at.
      sizes: number of elements per device of each stacked table and slot variable.
    """
    return any(
        size >= _MIN_TABLE_SIZE and (size in sizes or size > max(sizes))
        for size in instruction.sizes
    )


def _is_in_place(instruction: Instruction) -> bool:
    """Returns True if an instruction updates in place or only forwards an operand.

    A fusion updates in place if XLA names it after a scatter.
    """
    if instruction.opcode == "fusion":
        return "scatter" in instruction.name
    return instruction.opcode in _WITHOUT_COPY
