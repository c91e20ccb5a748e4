"""Modelled traffic of one instruction: the bytes that it moves per device.

`cost.py` sums the traffic over a program. The model:

* An array counts with its tile padding. Only arrays in HBM count as HBM traffic; arrays
  in VMEM or host memory do not.
* A gather reads its indices and `number of indices * bytes of a slice` of its operand,
  never the whole table. It writes its result. HBM moves at least 64 bytes at a time, so
  a smaller slice counts as 64 bytes.
* A scatter reads its indices and updates, and writes `number of indices * bytes of a
  slice`. Unless it overwrites, it also reads the old slices.
* A slice, or an update of a slice, moves only the slice.
* A fusion reads its operands and writes its results. If the fusion only gathers from or
  slices an operand, only those slices count. If a result is an operand with one part
  replaced, only that part counts.
* A copy reads and writes. A copy between HBM and VMEM counts once.
* A Pallas kernel moves the bytes that it declares in `pl.CostEstimate`, because its
  code is not HLO. Without a declaration it reads its operands and writes its results.
* Every other instruction, sorts included, reads its operands and writes its results.
* Collectives within a slice: in a group of n, a device sends `(n-1)/n` of its operand
  in an all-to-all or reduce-scatter, `2(n-1)/n` in an all-reduce, `n-1` times its
  operand in an all-gather, and its operand once in a permutation.
* Transfers to other slices: a device sends the operand of each `send`.

The model ignores arithmetic, latency, neighbouring slices that share one 64-byte
access, repeated passes over an array, and links that a small slice lacks.
"""

import dataclasses
import math
import re
from typing import Final

from tpu_embedding.hardware import DMA_GRANULE_BYTES
from tpu_embedding.tools.compile_report.hlo import (
    HBM,
    Computation,
    HloShape,
    Instruction,
    Module,
)

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
# Opcodes that forward an operand inside a fusion without writing it to memory.
_FORWARDING: Final = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one device moves.

    Attributes:
      hbm_bytes: bytes read from and written to the device's memory.
      ici_bytes: bytes sent to other devices of the slice.
      dcn_bytes: bytes sent to other slices.
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

    def times(self, num_runs: int) -> "Traffic":
        """Returns the traffic of several runs of the same instruction."""
        return Traffic(
            hbm_bytes=self.hbm_bytes * num_runs,
            ici_bytes=self.ici_bytes * num_runs,
            dcn_bytes=self.dcn_bytes * num_runs,
        )

    @property
    def num_bytes(self) -> float:
        """Bytes over HBM and all links together."""
        return self.hbm_bytes + self.ici_bytes + self.dcn_bytes


def traffic_of(
    instruction: Instruction, computation: Computation, module: Module
) -> Traffic:
    """Returns the traffic of one run of an instruction.

    Args:
      instruction: any instruction that runs no other computation, so no `while`, `call`
        or `conditional`.
      computation: the computation that contains the instruction.
      module: the program.
    """
    if is_free(instruction):
        return Traffic()
    if instruction.opcode == "custom-call":
        declared = re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes)
        if declared is not None:
            return Traffic(hbm_bytes=int(declared[1]))
    read = sum(
        _bytes_read(shape, instruction, place, computation, module)
        for place, shapes in enumerate(computation.operand_shapes(instruction))
        for shape in shapes
        if shape.memory_space == HBM
    )
    written = sum(
        _bytes_written(shape, index, instruction, computation, module)
        for index, shape in enumerate(results_of(instruction, computation))
        if shape.memory_space == HBM
    )
    sent = _network_traffic(instruction, computation, module)
    return sent + Traffic(hbm_bytes=read + written)


def is_free(instruction: Instruction) -> bool:
    """Returns True if an instruction has no traffic of its own.

    An asynchronous operation counts at its start; its `-update` and `-done` are free.
    """
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")) or opcode in _FREE:
        return True
    target = instruction.text_attribute("custom_call_target")
    return opcode == "custom-call" and target in _FREE_CUSTOM_CALLS


def callee(instruction: Instruction, module: Module) -> Computation:
    """Returns the computation inside a fusion."""
    return module.computations[instruction.called("calls") or ""]


def results_of(
    instruction: Instruction, computation: Computation
) -> tuple[HloShape, ...]:
    """Returns the shapes of the arrays that an instruction writes.

    They exclude the operands and flags in the result of an asynchronous start.
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


def _bytes_read(
    shape: HloShape,
    user: Instruction,
    place: int,
    computation: Computation,
    module: Module,
) -> int:
    """Returns the bytes that an instruction reads of one operand.

    Args:
      shape: shape and layout of the operand in memory.
      user: the instruction.
      place: index of the operand.
      computation: the computation that contains the instruction.
      module: the program.
    """
    if user.opcode == "fusion":
        inside = callee(user, module)
        return _bytes_read_in(shape, inside.parameters[place], inside, module)
    if place > 0:
        # Operand 1 of a ragged all-to-all is its output buffer.
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


def _bytes_read_in(
    shape: HloShape, source: Instruction, computation: Computation, module: Module
) -> int:
    """Returns the bytes that a computation reads of one array.

    Slices may overlap, so together they read the array at most once. Gathers may read
    more than the whole array, because they read repeated rows again.

    Args:
      shape: shape and layout of the array in memory.
      source: the instruction that yields the array, such as a fusion's parameter.
      computation: the computation that contains the instruction.
      module: the program.
    """
    gathered, sliced = 0, 0
    for user, place in computation.users.get(source.name, ()):
        if user.opcode in _FORWARDING and user is not computation.root:
            used = _bytes_read_in(user.shapes[0], user, computation, module)
        else:
            used = _bytes_read(source.shapes[0], user, place, computation, module)
        if used > shape.num_bytes:
            gathered += used
        else:
            sliced += used
    return gathered + min(sliced, shape.num_bytes)


def _bytes_written(
    shape: HloShape,
    index: int,
    instruction: Instruction,
    computation: Computation,
    module: Module,
) -> int:
    """Returns the bytes that an instruction writes of one result.

    Args:
      shape: shape and layout of the result in memory.
      index: index of the result.
      instruction: the instruction.
      computation: the computation that contains the instruction.
      module: the program.
    """
    match instruction.opcode:
        case "fusion":
            inside = callee(instruction, module)
            root = inside.root
            if root.opcode == "tuple" and len(root.operands) == len(instruction.shapes):
                root = inside.instructions[root.operands[index]]
            return _bytes_written_by_fusion(shape, root, inside, module)
        case "dynamic-update-slice" | "scatter":
            return _update_bytes(shape, instruction, computation)
    return shape.num_bytes


def _bytes_written_by_fusion(
    shape: HloShape, root: Instruction, computation: Computation, module: Module
) -> int:
    """Returns the bytes that a fusion writes of one result.

    XLA reuses an operand's buffer for a result that replaces one part of the operand.
    Such a fusion writes only that part.
    """
    root = _computed_value(root, computation)
    if root.opcode == "fusion":
        return _bytes_written(shape, 0, root, computation, module)
    if root.opcode not in ("dynamic-update-slice", "scatter"):
        return shape.num_bytes
    target = computation.instructions[root.operands[0]]
    if _computed_value(target, computation).opcode != "parameter":
        return shape.num_bytes
    return _update_bytes(root.shapes[0], root, computation)


def _update_bytes(
    shape: HloShape, instruction: Instruction, computation: Computation
) -> int:
    if instruction.opcode == "scatter":
        return _scattered_bytes(shape, instruction, computation)
    (update,) = computation.instructions[instruction.operands[1]].shapes
    return shape.slice_bytes(update.dims)


def _num_indices(instruction: Instruction, computation: Computation) -> int:
    """Returns the number of slices that a gather or scatter moves."""
    num_arrays = (len(instruction.operands) - 1) // 2
    place = 1 if instruction.opcode == "gather" else num_arrays
    (indices,) = computation.instructions[instruction.operands[place]].shapes
    (vector_axis,) = instruction.ints("index_vector_dim")
    dims = list(indices.dims)
    if vector_axis < len(dims):
        del dims[vector_axis]
    return math.prod(dims)


def _scattered_bytes(
    shape: HloShape, instruction: Instruction, computation: Computation
) -> int:
    """Returns the bytes of all slices that a scatter writes."""
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
    shape: HloShape,
    sizes: tuple[int, ...],
    instruction: Instruction,
    computation: Computation,
) -> int:
    """Returns the bytes of all slices that a gather or scatter moves."""
    slice_bytes = max(shape.slice_bytes(sizes), DMA_GRANULE_BYTES)
    return _num_indices(instruction, computation) * slice_bytes


def _overwrites(scatter: Instruction, module: Module) -> bool:
    """Returns True if a scatter overwrites old values without reading them."""
    combiner = module.computations.get(scatter.called("to_apply") or "")
    if combiner is None:
        return False
    return _computed_value(combiner.root, combiner).opcode == "parameter"


def _computed_value(instruction: Instruction, computation: Computation) -> Instruction:
    """Returns the instruction that computes a value, behind any forwarding ones."""
    while instruction.opcode in _FORWARDING:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _network_traffic(
    instruction: Instruction, computation: Computation, module: Module
) -> Traffic:
    """Returns the traffic that an instruction sends to other devices."""
    if instruction.opcode == "fusion":
        inside = callee(instruction, module)
        return sum(
            (_network_traffic(i, inside, module) for i in inside.instructions.values()),
            Traffic(),
        )
    operands = computation.operand_shapes(instruction)
    if instruction.opcode == "send":
        return Traffic(dcn_bytes=sum(shape.num_bytes for shape in operands[0]))
    opcode = instruction.base_opcode
    if opcode not in COLLECTIVES:
        return Traffic()
    num_bytes = sum(shape.num_bytes for shapes in operands for shape in shapes)
    if opcode == "ragged-all-to-all":
        # The other operands are the output buffer, offsets and sizes.
        num_bytes = sum(shape.num_bytes for shape in operands[0])
    n = _group_size(instruction, module)
    if opcode == "all-reduce" and computation.root.opcode == "dynamic-slice":
        opcode = "reduce-scatter"  # XLA:TPU fuses one as an all-reduce and a slice
    factor = {
        "all-gather": n - 1,
        "all-reduce": 2 * (n - 1) / n,
        "collective-broadcast": 1,
        "collective-permute": 1,
    }.get(opcode, (n - 1) / n)
    return Traffic(ici_bytes=factor * num_bytes)


def _group_size(instruction: Instruction, module: Module) -> int:
    """Returns the number of devices in one group of a collective.

    XLA writes groups as `{{0,1},{2,3}}`, as `[groups,group size]<=[devices]`, or as
    axes of a mesh, `mesh['a'=2,'b'=2] {'b'}`.
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
