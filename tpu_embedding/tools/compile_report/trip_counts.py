"""Trip counts of a program's loops, for loops whose count is a constant.

XLA:TPU prints no trip counts. This module finds them from the loop's counter: a state
element that starts at a constant, grows by a constant and is compared with a constant.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Final

from tpu_embedding.tools.compile_report.hlo import Computation, Instruction, Module

_FORWARDING: Final = frozenset(
    {"bitcast", "convert", "copy", "copy-done", "copy-start", "reshape"}
)
_KNOWN: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MIRRORED: Final = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def trip_count(loop: Instruction, enclosing: Computation, module: Module) -> int | None:
    """Returns the number of iterations of a `while`; None if it depends on data.

    Args:
      loop: the `while` instruction.
      enclosing: the computation that contains the instruction.
      module: the program.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    outside = _Scope(enclosing, module)
    body = _Scope(module.computations[loop.called("body") or ""], module)
    state = enclosing.instructions[loop.operands[0]]
    if state.opcode != "tuple" or body.root.opcode != "tuple":
        return None

    def initial(index: int) -> int | None:
        value = outside.value(state.operands[index])
        return value.number if value is not None and value.carry is None else None

    def increment(index: int) -> int | None:
        value = body.value(body.root.operands[index])
        return value.number if value is not None and value.carry == index else None

    condition = _Scope(module.computations[loop.called("condition") or ""], module)
    left, right, direction = condition.comparison()
    if left is not None and left.carry is None:
        left, right, direction = right, left, _MIRRORED.get(direction, "")
    if left is None or right is None or left.carry is None:
        return None
    limit: int | None = right.number
    if right.carry is not None:
        fixed = initial(right.carry) if increment(right.carry) == 0 else None
        limit = None if fixed is None else right.number + fixed
    first, step = initial(left.carry), increment(left.carry)
    if first is None or step is None or limit is None:
        return None
    return _num_iterations(first + left.number, step, limit, direction)


def _num_iterations(first: int, step: int, limit: int, direction: str) -> int | None:
    """Returns the iterations of loops like `for (i = first; i < limit; i += step)`."""
    if direction in ("GT", "GE") or (direction == "NE" and step < 0):
        first, step, limit = -first, -step, -limit
        direction = _MIRRORED[direction]
    if step <= 0:
        return None
    if direction == "LE":
        limit += 1
    elif direction == "NE" and (limit - first) % step:
        return None
    elif direction not in ("LT", "NE"):
        return None
    return max(0, -((first - limit) // step))


@dataclasses.dataclass(frozen=True)
class _Value:
    """A scalar: `number`, plus the loop's state element `carry` if that is not None."""

    number: int
    carry: int | None = None


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A computation and the known values of its parameters.

    Attributes:
      computation: the computation whose instructions are evaluated.
      module: the program.
      bound: function from parameter number to value. None if the only parameter is the
        state of a loop.
    """

    computation: Computation
    module: Module
    bound: Callable[[int], _Value | None] | None = None

    @property
    def root(self) -> Instruction:
        return self.computation.root

    def comparison(self) -> tuple[_Value | None, _Value | None, str]:
        """Returns left side, right side and direction of the root comparison."""
        if self.root.opcode == "fusion":
            return self.inside(self.root).comparison()
        if self.root.opcode != "compare":
            return None, None, ""
        left, right = (self.value(name) for name in self.root.operands)
        return left, right, self.root.called("direction") or ""

    def inside(self, fusion: Instruction) -> "_Scope":
        """Returns the scope of the computation inside a fusion."""
        return _Scope(
            self.module.computations[fusion.called("calls") or ""],
            self.module,
            lambda number: self.value(fusion.operands[number]),
        )

    def value(self, name: str) -> _Value | None:
        """Returns a value that is a constant or carry plus constant; None otherwise."""
        instruction = self.computation.instructions[name]
        if instruction.shapes[0].num_elements != 1:
            return None
        if instruction.opcode in _FORWARDING:
            return self.value(instruction.operands[0])
        match instruction.opcode:
            case "constant":
                literal = re.search(r"constant\((-?\d+)\)", instruction.text)
                return _Value(int(literal[1])) if literal else None
            case "parameter" if self.bound is not None:
                return self.bound(instruction.parameter_number)
            case "add" | "subtract":
                return self._sum(instruction)
            case "get-tuple-element":
                return self._element(instruction)
            case "fusion":
                inside = self.inside(instruction)
                return inside.value(inside.root.name)
        return None

    def _sum(self, instruction: Instruction) -> _Value | None:
        left, right = (self.value(name) for name in instruction.operands)
        if left is None or right is None:
            return None
        if instruction.opcode == "subtract":
            if right.carry is not None:
                return None
            right = _Value(-right.number)
        if left.carry is not None and right.carry is not None:
            return None
        carry = right.carry if left.carry is None else left.carry
        return _Value(left.number + right.number, carry)

    def _element(self, instruction: Instruction) -> _Value | None:
        (index,) = instruction.ints("index")
        source = self.computation.instructions[instruction.operands[0]]
        if source.opcode == "parameter" and self.bound is None:
            return _Value(0, carry=index)
        if source.opcode == "tuple":
            return self.value(source.operands[index])
        if source.opcode == "fusion":
            inside = self.inside(source)
            if inside.root.opcode == "tuple":
                return inside.value(inside.root.operands[index])
        return None
