"""The tables that a foreign file or checkpoint offers, whatever its format.

Each module of this package that knows a format returns a `TableSource`. Rows are read
when they are written to a model, block by block. So a table of any size passes through
the host without being there as a whole.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES


@dataclasses.dataclass(frozen=True)
class RowArray:
    """An array of a source, whose rows are read range by range.

    `np.asarray` reads all of them.

    Attributes:
      shape: `[rows, *row_shape]`.
      dtype: type of the elements.
      read: returns a range of rows, `(start, num_rows) -> [num_rows, *row_shape]`.
      check: compares all bytes with their checksums, if the format has any. It runs
        before the model changes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], np.ndarray] = dataclasses.field(repr=False)
    check: Callable[[], object] = dataclasses.field(default=lambda: None, repr=False)

    @classmethod
    def whole(
        cls, shape: tuple[int, ...], dtype: np.dtype, load: Callable[[], np.ndarray]
    ) -> Self:
        """Returns an array that its format reads and checks as a whole only.

        Args:
          shape: see the class.
          dtype: see the class.
          load: reads the array, and keeps it for the next call.
        """
        return cls(shape, dtype, lambda start, n: load()[start : start + n], load)

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.check()
        return np.array(self.read(0, self.shape[0]), dtype)

    def holds_int8_rows(self, dim: int) -> bool:
        """True for rows of bytes: `dim` codes, then scale and bias in float32."""
        row_shape = (dim + SCALE_AND_BIAS_BYTES,)
        return self.dtype == np.uint8 and self.shape[1:] == row_shape

    @property
    def is_floating(self) -> bool:
        """True for floating numbers, narrow ones included."""
        return jnp.issubdtype(self.dtype, jnp.floating)

    def squeezed(self) -> "RowArray":
        """Returns `[rows]` in place of `[rows, 1]`."""
        return dataclasses.replace(
            self,
            shape=self.shape[:1],
            read=lambda start, num_rows: self.read(start, num_rows)[:, 0],
        )


def array_of(values: Any) -> RowArray:
    """Returns an array in memory, or mapped to memory, as a `RowArray`.

    Args:
      values: NumPy or JAX array, or anything that NumPy makes an array of.

    Example:
      >>> print(array_of(np.zeros((10, 4), np.float32)))
      float32[10, 4]
    """
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    return RowArray(array.shape, array.dtype, lambda start, n: array[start : start + n])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceIds:
    """The ids of the rows of a table, and what its source knows of their use.

    Attributes:
      ids: uint64 `[rows]`, none twice.
      last_used: uint32 `[rows]`, step or other clock of the last use; None: not known.
      counts: uint32 `[rows]`, number of uses; None: not known.
      clock: clock of the source, not before any last use.
    """

    ids: np.ndarray
    last_used: np.ndarray | None = None
    counts: np.ndarray | None = None
    clock: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table of a source.

    Attributes:
      values: `[rows, dim]`.
      slots: slot variables by the names that the source gives them.
      ids: ids of the rows, for dynamic tables; None: the rows are numbered.
    """

    values: RowArray
    slots: Mapping[str, RowArray] = dataclasses.field(default_factory=dict)
    ids: SourceIds | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleSlots:
    """The slot variables of one optimizer rule in a source.

    Attributes:
      rule: name of the rule; see `slot_names.RULES`.
      names: slot name of this package to that of the source.
    """

    rule: str
    names: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSource:
    """The tables of a foreign file or checkpoint, which are read when needed.

    `print` shows their names, shapes and slot variables.

    Attributes:
      origin: format and path, for messages.
      tables: by the names that the source gives them.
      rules: slot names of the rules that the source's library has. None: the source
        uses the slot names of this package.
      assumed: table to what was assumed of it, because nothing in the source tells.
    """

    origin: str
    tables: Mapping[str, SourceTable]
    rules: tuple[RuleSlots, ...] | None = None
    assumed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [self.origin]
        for name, table in sorted(self.tables.items()):
            slots = [f"{slot} {array}" for slot, array in sorted(table.slots.items())]
            ids = [] if table.ids is None else ["rows by id"]
            lines.append(f"  {name}: {', '.join([str(table.values), *ids, *slots])}")
        if self.assumed:
            lines.append("Assumed, as nothing in the source tells:")
            lines += [f"  {name}: {text}" for name, text in self.assumed.items()]
        return "\n".join(lines)
