"""Sections: several arrays whose rows a kernel numbers one array after the other.

A chunk of rows may belong to any array, which a worker knows only when it runs.
`Sections` finds the array, and the ids of its rows, with traced integers.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Sections:
    """Arrays whose rows, and whose ids, are numbered one array after the other.

    Each row of a section has one or more ids. The first ids of all rows of the section
    come first, then the second ids, and so on. A section of 4 rows with 1 id each and
    one of 2 rows with 3 ids each:

        rows   | 0  1  2  3 | 4  5             |
        ids    | 0  1  2  3 | 4  5  6  7  8  9 |      row 4 has the ids 4, 6 and 8

    Attributes:
      sizes: rows of each section.
      ids_per_row: ids of each row of a section.
    """

    sizes: Sequence[int]
    ids_per_row: Sequence[int]

    @property
    def starts(self) -> list[int]:
        """First row of each section, and the number of all rows."""
        return _starts(self.sizes)

    @property
    def num_rows(self) -> int:
        """Rows of all sections."""
        return sum(self.sizes)

    def contains(self, section: int, row: Int[Array, ""]) -> Array:
        """Returns True if a row belongs to a section."""
        start, end = self.starts[section : section + 2]
        return (start <= row) & (row < end)

    def find(self, row: Int[Array, ""]) -> list[Int[Array, ""]]:
        """Returns first row, size, first id and ids per row of the section of a row."""
        starts = self.starts
        id_starts = _starts(map(operator.mul, self.sizes, self.ids_per_row))
        columns = (starts, self.sizes, id_starts, self.ids_per_row)
        found = [jnp.int32(column[0]) for column in columns]
        for i in range(1, len(self.sizes)):
            is_behind = row >= starts[i]
            found = [
                jnp.where(is_behind, column[i], value)
                for column, value in zip(columns, found, strict=True)
            ]
        return found


def _starts(sizes: Iterable[int]) -> list[int]:
    """Returns the start of each of several sections, and the end of the last one."""
    return [0, *itertools.accumulate(sizes)]
