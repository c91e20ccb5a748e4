"""Parser of XLA's HLO text: computations and their instructions.

The optimised HLO of a compiled program shows the compiler's decisions: copies, fusions
and operations on SparseCore. JAX gives it as text only (`compiled.as_text()`), so this
module parses the text.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Final

_DIMS: Final = re.compile(r"\b[a-z]\w*\[([^\]]*)\]")
_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION: Final = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE: Final = re.compile(r"[a-z][\w\-]*")
_NAME: Final = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a program.

    Attributes:
      name: name, unique within the program.
      opcode: operation, such as `"copy"` or `"fusion"`.
      dims: shape of each array of the result; tuples are flattened.
      is_on_chip: True if an array of the result lies in on-chip memory, not in HBM.
      operands: names of the instructions that it reads.
      attributes: text after the operands.
      text: the whole line.
    """

    name: str
    opcode: str
    dims: tuple[tuple[int, ...], ...]
    is_on_chip: bool
    operands: tuple[str, ...]
    attributes: str
    text: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each array of the result."""
        return tuple(map(math.prod, self.dims))

    @property
    def base_opcode(self) -> str:
        """Opcode without the suffix `-start` of asynchronous operations."""
        return self.opcode.removesuffix("-start")

    def called(self, name: str) -> str | None:
        """Returns the name after an attribute such as `calls=`; None if absent."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match.group(1) if match else None


Computation = dict[str, Instruction]
"""A function of a program: the entry, a loop's body, the inside of a fusion, ...; its
instructions by name, in program order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A compiled program.

    Attributes:
      computations: computations by name.
      entry: the computation that runs first.
    """

    computations: dict[str, Computation]
    entry: Computation

    def unfused_instructions(self) -> Iterator[Instruction]:
        """Yields all instructions except those inside fusions."""
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
    """Parses a program from the text of `compiled.as_text()`.

    Raises:
      ValueError: if the text has no entry computation.

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
            "text must be an HLO program, got one with no ENTRY computation; pass the "
            "result of compiled.as_text()."
        )
    return Module(computations=computations, entry=computations[entry])


def _parse_instruction(name: str, rest: str, text: str) -> Instruction | None:
    result, call = _split(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, parenthesis, _ = call.lstrip().partition("(")
    if not parenthesis or not _OPCODE.fullmatch(opcode):
        return None
    operands, attributes = _split(call.lstrip()[len(opcode) :])
    return Instruction(
        name=name,
        opcode=opcode,
        dims=tuple(
            tuple(int(n) for n in re.findall(r"\d+", dims))
            for dims in _DIMS.findall(result)
        ),
        is_on_chip="S(1)" in result,
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
