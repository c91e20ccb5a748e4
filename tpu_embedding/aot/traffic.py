"""Bytes that one instruction of a program moves, per device. Modelled, not measured.

The model, for `cost.py` to sum up:

* An array counts as it lies in memory, with the padding of its tiles. Only arrays in
  HBM count as HBM traffic: not those in VMEM or in the host's memory.
* A gather reads `number of indices * bytes of a slice` of its operand, beside the
  indices, and writes its result. Of a table it never charges the whole. Memory moves
  64 bytes at once, so a smaller slice counts as these.
* A scatter writes `number of indices * bytes of a slice`, reads indices and updates,
  and, unless it overwrites, reads what it adds to. A (dynamic) slice, or the update
  of one, moves the slice.
* A fusion reads its operands and writes its results. Where all it does with an operand
  is one of the above, it reads what that takes; where its result is an operand with a
  part replaced, it writes the part.
* A copy reads and writes; one between HBM and VMEM counts one of the two.
* A Pallas kernel moves the bytes that it declares (`pl.CostEstimate`), for its code is
  no HLO; one that declares none, its operands and results.
* Everything else (sorts among them) reads its operands and writes its results, once.
* Over the links of a slice, a device of a group of n sends `(n-1)/n` of an all-to-all's
  or reduce-scatter's operand, `2(n-1)/n` of an all-reduce's, `n-1` times that of an
  all-gather, and once that of a permutation. To other slices it sends what it hands to
  the host for them.

Left out: arithmetic, latency, slices that share what memory moves at once, several
passes over one array, links that a small slice does not have.
"""

import dataclasses
import math
import re
from typing import Final

from tpu_embedding.aot.hlo import HBM, Computation, Instruction, Module, Shape
from tpu_embedding.hardware import DMA_GRANULE_BYTES

COLLECTIVES: Final = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)

_FREE: Final = frozenset(
    {
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "domain",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
_FREE_CUSTOM_CALLS: Final = frozenset(
    {
        "AllocateBuffer",
        "AssumeGatherIndicesInBound",
        "ConcatBitcast",
        "PrepareAsyncCallDone",
        "PrepareAsyncCallStart",
    }
)
# What hands an operand on inside a fusion, where nothing is written in between.
_PASSES_ON: Final = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one device moves.

    Attributes:
      hbm_bytes: read from and written to its memory.
      ici_bytes: sent to other devices of its slice.
      dcn_bytes: sent to other slices.
    """

    hbm_bytes: float = 0
    ici_bytes: float = 0
    dcn_bytes: float = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            hbm_bytes=self.hbm_bytes + other.hbm_bytes,
            ici_bytes=self.ici_bytes + other.ici_bytes,
            dcn_bytes=self.dcn_bytes + other.dcn_bytes,
        )

    def times(self, turns: int) -> "Traffic":
        """Returns the traffic of so many turns."""
        return Traffic(
            hbm_bytes=self.hbm_bytes * turns,
            ici_bytes=self.ici_bytes * turns,
            dcn_bytes=self.dcn_bytes * turns,
        )

    @property
    def num_bytes(self) -> float:
        """All of it."""
        return self.hbm_bytes + self.ici_bytes + self.dcn_bytes


def traffic_of(
    instruction: Instruction, computation: Computation, module: Module
) -> Traffic:
    """Returns what an instruction moves, once.

    Args:
      instruction: any but those that run other computations (`while`, `call`, ...).
      computation: it stands in.
      module: the program.
    """
    if is_free(instruction):
        return Traffic()
    if instruction.opcode == "custom-call":
        declared = re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes)
        if declared is not None:
            return Traffic(hbm_bytes=int(declared[1]))
    read = sum(
        _bytes_used(shape, instruction, place, computation, module)
        for place, shapes in enumerate(computation.operand_shapes(instruction))
        for shape in shapes
        if shape.memory_space == HBM
    )
    written = sum(
        _bytes_written(shape, index, instruction, computation, module)
        for index, shape in enumerate(results_of(instruction, computation))
        if shape.memory_space == HBM
    )
    sent = _sent(instruction, computation, module)
    return sent + Traffic(hbm_bytes=read + written)


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction moves nothing, or was counted where it started."""
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")) or opcode in _FREE:
        return True
    target = instruction.text_attribute("custom_call_target")
    return opcode == "custom-call" and target in _FREE_CUSTOM_CALLS


def callee(instruction: Instruction, module: Module) -> Computation:
    """Returns what a fusion contains."""
    return module.computations[instruction.called("calls") or ""]


def results_of(instruction: Instruction, computation: Computation) -> tuple[Shape, ...]:
    """Returns the arrays that an instruction writes.

    The result of a start holds operands and flags too.
    """
    match instruction.opcode:
        case "copy-start" | "recv":
            return instruction.shapes[:1]
        case "send":
            return ()
        case opcode if opcode.endswith("-start") and opcode != "all-reduce-start":
            num_operands = sum(map(len, computation.operand_shapes(instruction)))
            return instruction.shapes[num_operands:]
    return instruction.shapes


def _bytes_used(
    shape: Shape,
    user: Instruction,
    place: int,
    computation: Computation,
    module: Module,
) -> int:
    """Returns how much of an operand an instruction reads.

    Args:
      shape: of the operand, as it lies in memory.
      user: the instruction.
      place: of the operand among the user's operands.
      computation: the user stands in.
      module: the program.
    """
    if user.opcode == "fusion":
        inside = callee(user, module)
        return _bytes_used_of(shape, inside.parameters[place], inside, module)
    if place > 0:
        # What a ragged all-to-all writes into comes in as an operand.
        is_target = user.base_opcode == "ragged-all-to-all" and place == 1
        return 0 if is_target else shape.num_bytes
    match user.base_opcode:
        case "gather":
            sizes = user.ints("slice_sizes")
            return _slices_bytes(shape, sizes, user, computation)
        case "slice" | "dynamic-slice":
            (result,) = results_of(user, computation)[:1]
            return shape.slice_bytes(result.dims)
        case "dynamic-update-slice":
            return 0
        case "scatter":
            if _overwrites(user, module):
                return 0
            return _scattered_bytes(shape, user, computation)
    return shape.num_bytes


def _bytes_used_of(
    shape: Shape, source: Instruction, computation: Computation, module: Module
) -> int:
    """Returns how much of an operand a fusion reads; `source` is what stands for it.

    Slices of one operand may overlap: at most all of it is read, but for gathers,
    which read again what they gather again.
    """
    gathered, sliced = 0, 0
    for user, place in computation.users.get(source.name, ()):
        if user.opcode in _PASSES_ON and user is not computation.root:
            used = _bytes_used_of(user.shapes[0], user, computation, module)
        else:
            used = _bytes_used(source.shapes[0], user, place, computation, module)
        if used > shape.num_bytes:
            gathered += used
        else:
            sliced += used
    return gathered + min(sliced, shape.num_bytes)


def _bytes_written(
    shape: Shape,
    index: int,
    instruction: Instruction,
    computation: Computation,
    module: Module,
) -> int:
    """Returns how much of a result an instruction writes.

    Args:
      shape: of the result, as it lies in memory.
      index: of the result among those of the instruction.
      instruction: that writes.
      computation: it stands in.
      module: the program.
    """
    match instruction.opcode:
        case "fusion":
            inside = callee(instruction, module)
            root = inside.root
            if root.opcode == "tuple" and len(root.operands) == len(instruction.shapes):
                root = inside.instructions[root.operands[index]]
            return _bytes_replaced(shape, root, inside, module)
        case "dynamic-update-slice" | "scatter":
            return _bytes_put(shape, instruction, computation)
    return shape.num_bytes


def _bytes_replaced(
    shape: Shape, root: Instruction, computation: Computation, module: Module
) -> int:
    """Returns how much a fusion writes of one of its results.

    A part, if the result is an operand with the part replaced: XLA then writes into the
    operand's buffer.
    """
    root = _passed_on(root, computation)
    if root.opcode == "fusion":
        return _bytes_written(shape, 0, root, computation, module)
    if root.opcode not in ("dynamic-update-slice", "scatter"):
        return shape.num_bytes
    target = computation.instructions[root.operands[0]]
    if _passed_on(target, computation).opcode != "parameter":
        return shape.num_bytes
    return _bytes_put(root.shapes[0], root, computation)


def _bytes_put(shape: Shape, instruction: Instruction, computation: Computation) -> int:
    if instruction.opcode == "scatter":
        return _scattered_bytes(shape, instruction, computation)
    (update,) = computation.instructions[instruction.operands[1]].shapes
    return shape.slice_bytes(update.dims)


def _num_indices(instruction: Instruction, computation: Computation) -> int:
    """Returns how many slices a gather or scatter moves."""
    num_arrays = (len(instruction.operands) - 1) // 2
    place = 1 if instruction.opcode == "gather" else num_arrays
    (indices,) = computation.instructions[instruction.operands[place]].shapes
    (vector_axis,) = instruction.ints("index_vector_dim")
    dims = list(indices.dims)
    if vector_axis < len(dims):
        del dims[vector_axis]
    return math.prod(dims)


def _scattered_bytes(
    shape: Shape, instruction: Instruction, computation: Computation
) -> int:
    """Returns the bytes of all slices that a scatter puts into an operand."""
    updates = computation.instructions[instruction.operands[-1]].shapes[0]
    absent = instruction.ints("inserted_window_dims") + instruction.ints(
        "input_batching_dims"
    )
    window = iter(instruction.ints("update_window_dims"))
    sizes = tuple(
        1 if axis in absent else updates.dims[next(window)]
        for axis in range(len(shape.dims))
    )
    return _slices_bytes(shape, sizes, instruction, computation)


def _slices_bytes(
    shape: Shape,
    sizes: tuple[int, ...],
    instruction: Instruction,
    computation: Computation,
) -> int:
    """Returns the bytes of as many slices as a gather or scatter has indices."""
    of_slice = max(shape.slice_bytes(sizes), DMA_GRANULE_BYTES)
    return _num_indices(instruction, computation) * of_slice


def _overwrites(scatter: Instruction, module: Module) -> bool:
    """Whether a scatter puts values in place of the old ones, and reads none."""
    combiner = module.computations.get(scatter.called("to_apply") or "")
    if combiner is None:
        return False
    return _passed_on(combiner.root, combiner).opcode == "parameter"


def _passed_on(instruction: Instruction, computation: Computation) -> Instruction:
    """Returns what an instruction hands on, or itself."""
    while instruction.opcode in _PASSES_ON:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _sent(
    instruction: Instruction, computation: Computation, module: Module
) -> Traffic:
    """Returns what an instruction sends to other devices."""
    if instruction.opcode == "fusion":
        inside = callee(instruction, module)
        return sum(
            (_sent(i, inside, module) for i in inside.instructions.values()), Traffic()
        )
    operands = computation.operand_shapes(instruction)
    if instruction.opcode == "send":
        return Traffic(dcn_bytes=sum(shape.num_bytes for shape in operands[0]))
    opcode = instruction.base_opcode
    if opcode not in COLLECTIVES:
        return Traffic()
    num_bytes = sum(shape.num_bytes for shapes in operands for shape in shapes)
    if opcode == "ragged-all-to-all":
        # The others are the buffer for the result, offsets and sizes.
        num_bytes = sum(shape.num_bytes for shape in operands[0])
    n = _group_size(instruction, module)
    if opcode == "all-reduce" and computation.root.opcode == "dynamic-slice":
        opcode = "reduce-scatter"  # what XLA:TPU makes of one, inside a fusion
    factor = {
        "all-gather": n - 1,
        "all-reduce": 2 * (n - 1) / n,
        "collective-broadcast": 1,
        "collective-permute": 1,
    }.get(opcode, (n - 1) / n)
    return Traffic(ici_bytes=factor * num_bytes)


def _group_size(instruction: Instruction, module: Module) -> int:
    """Returns how many devices a collective joins.

    XLA writes groups as `{{0,1},{2,3}}`, as `[2,2]<=[4]` (groups, devices in each), or
    as axes of a mesh, `mesh['a'=2,'b'=2] {'b'}`.
    """
    text = re.search(r"\breplica_groups=(.*)", instruction.attributes)
    groups = text[1] if text else ""
    if match := re.match(r"\{\{([\d,]*)\}", groups):
        return match[1].count(",") + 1
    if match := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(match[1])
    if match := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", groups):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", match[1]))
        return math.prod(
            int(sizes[axis]) for axis in re.findall(r"'([^']*)'", match[2])
        )
    return module.num_partitions
