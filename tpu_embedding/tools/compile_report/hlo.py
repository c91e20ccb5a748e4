"""Parser of XLA's HLO text: computations, instructions and array shapes.

The optimised HLO of a compiled program shows the compiler's decisions: fusions, memory
spaces, operations on SparseCore, and the source line of each instruction. JAX gives it
as text only (`compiled.as_text()`), so this module parses the text.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Final

from tpu_embedding.rows.packed_rows import round_up

HBM: Final = 0
"""Memory space of an array whose layout names no memory space.

XLA:TPU writes `S(1)` for VMEM, `S(5)` for host memory, and other numbers for scalars
and flags.
"""

_SHAPE: Final = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION: Final = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE: Final = re.compile(r"[a-z][\w\-]*")
_NAME: Final = re.compile(r"%([\w.\-]+)")
_SOURCE_TABLES: Final = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_SOURCE_TABLE_ENTRY: Final = re.compile(r"^(\d+) (.*)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HloShape:
    """Shape and memory layout of an array.

    Attributes:
      dtype: `"f32"`, `"s32"`, `"pred"`, ...
      dims: sizes of the axes.
      minor_to_major: axes in memory order, the contiguous axis first.
      tile: tile sizes. The most minor axes are padded to multiples of them. () means
        no tiles.
      memory_space: `HBM` or another number.
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    memory_space: int = HBM

    @property
    def num_elements(self) -> int:
        """Number of elements, without padding."""
        return math.prod(self.dims)

    @property
    def item_bits(self) -> int:
        """Bits of an element; 0 for a value that is not an array, such as a token."""
        if self.dtype == "pred":
            return 8
        digits = re.search(r"\d+", self.dtype)
        return int(digits.group()) if digits else 0

    @property
    def padded_dims(self) -> tuple[int, ...]:
        """Sizes of the axes, with tile padding."""
        padded = list(self.dims)
        for axis, multiple in zip(
            self.minor_to_major, reversed(self.tile), strict=False
        ):
            padded[axis] = round_up(padded[axis], multiple)
        return tuple(padded)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array in memory, with tile padding.

        Example:
          >>> parse_shapes("f32[1000,16]{1,0:T(8,128)}")[0].num_bytes
          512000
        """
        return math.prod(self.padded_dims) * self.item_bits // 8

    def slice_bytes(self, sizes: tuple[int, ...]) -> int:
        """Returns the bytes of a slice of the given sizes.

        An axis that the slice spans fully counts with its padding, such as the lanes of
        a row. An axis that it spans partly counts without.
        """
        taken = [
            padded if size == dim else size
            for size, dim, padded in zip(
                sizes, self.dims, self.padded_dims, strict=True
            )
        ]
        return math.prod(taken) * self.item_bits // 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a program.

    Attributes:
      name: name, unique within the program.
      opcode: operation, such as `"copy"` or `"fusion"`.
      shapes: shapes of the result's arrays; tuples are flattened.
      operands: names of the instructions that it reads.
      attributes: text after the operands.
      text: the whole line.
    """

    name: str
    opcode: str
    shapes: tuple[HloShape, ...]
    operands: tuple[str, ...]
    attributes: str
    text: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each array of the result."""
        return tuple(shape.num_elements for shape in self.shapes)

    @property
    def base_opcode(self) -> str:
        """Opcode without the suffix `-start` of asynchronous operations."""
        return self.opcode.removesuffix("-start")

    @property
    def parameter_number(self) -> int:
        """Index of this parameter among those of its computation."""
        match = re.search(r" parameter\((\d+)\)", self.text)
        assert match is not None, self.text
        return int(match[1])

    @property
    def op_name(self) -> str:
        """JAX's name of the operation that the instruction comes from, or ""."""
        return self.text_attribute("op_name")

    def text_attribute(self, name: str) -> str:
        """Returns the value of a quoted attribute, or ""."""
        match = re.search(rf'\b{name}="((?:[^"\\]|\\.)*)"', self.attributes)
        return match.group(1) if match else ""

    def ints(self, name: str) -> tuple[int, ...]:
        """Returns the integers of an attribute; () if absent.

        Examples of such attributes are `slice_sizes={1,128}` and `index=3`.

        Example:
          >>> module = parse_module('''ENTRY %main (p: f32[4]) -> f32[2] {
          ...   %p = f32[4]{0} parameter(0)
          ...   ROOT %s = f32[2]{0} dynamic-slice(%p), dynamic_slice_sizes={2}
          ... }''')
          >>> module.entry.root.ints("dynamic_slice_sizes")
          (2,)
        """
        match = re.search(rf"\b{name}=\{{?([\d,]*)", self.attributes)
        return tuple(int(n) for n in match.group(1).split(",") if n) if match else ()

    def called(self, name: str) -> str | None:
        """Returns the name after an attribute such as `calls=`; None if absent."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match.group(1) if match else None

    def branches(self) -> tuple[str, ...]:
        """Returns the names of the computations that a conditional chooses from."""
        match = re.search(r"\bbranch_computations=\{([^}]*)\}", self.attributes)
        if match:
            return tuple(_NAME.findall(match.group(1)))
        chosen = (self.called("true_computation"), self.called("false_computation"))
        return tuple(name for name in chosen if name is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """A function of a program: the entry, a loop's body, the inside of a fusion, ...

    Attributes:
      name: name of the computation.
      instructions: instructions by name, in program order.
      root: the instruction whose result the computation returns.
    """

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter instructions by index."""
        return {
            i.parameter_number: i
            for i in self.instructions.values()
            if i.opcode == "parameter"
        }

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Readers of each instruction by its name, as (reader, operand index) pairs."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for place, operand in enumerate(instruction.operands):
                users.setdefault(operand, []).append((instruction, place))
        return users

    def operand_shapes(self, instruction: Instruction) -> list[tuple[HloShape, ...]]:
        """Returns the array shapes of each operand of an instruction."""
        return [self.instructions[name].shapes for name in instruction.operands]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A compiled program.

    Attributes:
      computations: computations by name.
      entry: the computation that runs first.
      num_partitions: number of devices that the program runs on.
      sources: Python source line, `"file:line"`, by stack frame number.
    """

    computations: dict[str, Computation]
    entry: Computation
    num_partitions: int
    sources: dict[int, str]

    def source_of(self, instruction: Instruction) -> str:
        """Returns the Python source line of an instruction, `"file:line"`, or ""."""
        file = instruction.text_attribute("source_file")
        if file:
            return f"{file}:{instruction.ints('source_line')[0]}"
        frame = instruction.ints("stack_frame_id")
        return self.sources.get(frame[0], "") if frame else ""

    def unfused_instructions(self) -> Iterator[Instruction]:
        """Yields all instructions except those inside fusions."""
        fused = {
            i.called("calls")
            for computation in self.computations.values()
            for i in computation.instructions.values()
            if i.opcode == "fusion"
        }
        for computation in self.computations.values():
            if computation.name not in fused:
                yield from computation.instructions.values()


def parse_module(text: str) -> Module:
    """Parses a program from the text of `compiled.as_text()`.

    Raises:
      ValueError: if the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, root = None, "", None
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start is not None:
            name, root, instructions = start[2], None, {}
            entry = name if start[1] else entry
        elif line.startswith("}") and instructions:
            last = root or list(instructions.values())[-1]
            computations[name] = Computation(
                name=name, instructions=instructions, root=last
            )
            instructions = {}
        elif match := _INSTRUCTION.match(line):
            instruction = _parse_instruction(match[2], match[3], line.strip())
            if instruction is not None:
                instructions[instruction.name] = instruction
                root = instruction if match[1] else root
    if entry is None or entry not in computations:
        raise ValueError(
            "text must be an HLO program, got one with no ENTRY computation; pass the "
            "result of compiled.as_text()."
        )
    partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
    return Module(
        computations=computations,
        entry=computations[entry],
        num_partitions=int(partitions[1]) if partitions else 1,
        sources=_parse_sources(text),
    )


def parse_shapes(text: str) -> tuple[HloShape, ...]:
    """Parses a result type and returns its array shapes; tuples are flattened.

    Example:
      >>> [shape.dims for shape in parse_shapes("(f32[8,128]{1,0}, (s32[]))")]
      [(8, 128), ()]
    """
    return tuple(_shape(*found) for found in _SHAPE.findall(text))


@functools.lru_cache(maxsize=4096)
def _shape(dtype: str, dims: str, layout: str) -> HloShape:
    order, _, rest = layout.partition(":")
    tile = re.search(r"T\(([\d,]+)\)", rest)
    space = re.search(r"S\((\d+)\)", rest)
    return HloShape(
        dtype=dtype,
        dims=tuple(int(n) for n in re.findall(r"\d+", dims)),
        minor_to_major=tuple(int(n) for n in order.split(",") if n),
        tile=tuple(int(n) for n in tile[1].split(",")) if tile else (),
        memory_space=int(space[1]) if space else HBM,
    )


def _parse_instruction(name: str, rest: str, text: str) -> Instruction | None:
    result, call = _split(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, parenthesis, _ = call.lstrip().partition("(")
    if not parenthesis or not _OPCODE.fullmatch(opcode):
        return None
    operands, attributes = _split(call.lstrip()[len(opcode) :])
    return Instruction(
        name=name,
        opcode=opcode,
        shapes=parse_shapes(result),
        operands=tuple(_NAME.findall(operands)),
        attributes=attributes,
        text=text,
    )


def _split(text: str) -> tuple[str, str]:
    """Splits a text that starts with a parenthesised group after that group."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return text[: match.end()], text[match.end() :]
    return text, ""


def _parse_sources(text: str) -> dict[int, str]:
    """Parses the tables of files and stack frames that precede the computations."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _SOURCE_TABLES}
    current: dict[int, str] = {}
    for line in text.splitlines():
        if _COMPUTATION.match(line):
            break
        if line in tables:
            current = tables[line]
        elif match := _SOURCE_TABLE_ENTRY.match(line):
            current[int(match[1])] = match[2]

    def number(entry: str, field: str) -> int:
        match = re.search(rf"\b{field}=(\d+)", entry)
        return int(match[1]) if match else 0

    files, locations = tables["FileNames"], tables["FileLocations"]
    sources = {}
    for frame, entry in tables["StackFrames"].items():
        location = locations.get(number(entry, "file_location_id"), "")
        file = files.get(number(location, "file_name_id"), "").strip('"')
        if file:
            sources[frame] = f"{file}:{number(location, 'line')}"
    return sources
