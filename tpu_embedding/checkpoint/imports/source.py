"""Defines what all formats share: named tables whose rows are read by range."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import jax.numpy as jnp
import numpy as np

from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES

MAX_EXPANSION: Final = 10
_SMALL_BYTES: Final = 200 * 2**20


def max_bytes_of_files(num_bytes: int) -> int:
    """Computes how much memory arrays may take, given the size of their files."""
    # A small file of compressed zeros may declare arrays of any size.
    return MAX_EXPANSION * num_bytes + _SMALL_BYTES


@dataclasses.dataclass(frozen=True)
class RowArray:
    """An array `[rows, dim]` or `[rows]`, whose rows are read on demand.

    Attributes:
      read: `read(start, num_rows)` reads `num_rows` rows from `start`.
      check: raises `CheckpointError` if any of the data is damaged. It is called before
        the model changes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], np.ndarray] = dataclasses.field(repr=False)
    check: Callable[[], object] = dataclasses.field(default=lambda: None, repr=False)

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.check()
        return np.array(self.read(0, self.shape[0]), dtype)

    def holds_int8_rows(self, dim: int) -> bool:
        """Checks if rows are FBGEMM bytes: `dim` codes, then float32 scale and bias."""
        row_shape = (dim + SCALE_AND_BIAS_BYTES,)
        return self.dtype == np.uint8 and self.shape[1:] == row_shape

    @property
    def is_floating(self) -> bool:
        # `np.issubdtype` doesn't know bfloat16.
        return jnp.issubdtype(self.dtype, jnp.floating)

    def squeezed(self) -> Self:
        """Drops the second axis from `[rows, 1]`."""
        return dataclasses.replace(
            self,
            shape=self.shape[:1],
            read=lambda start, num_rows: self.read(start, num_rows)[:, 0],
        )


def array_of(values: Any) -> RowArray:
    """Wraps an array, which may be memory-mapped.

    Example:
      >>> print(array_of(np.zeros((10, 4), np.float32)))
      float32[10, 4]
    """
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    return RowArray(array.shape, array.dtype, lambda start, n: array[start : start + n])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTable:
    """Table values `[rows, dim]`, and slot variables by their names in the source."""

    values: RowArray
    slots: Mapping[str, RowArray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSource:
    """The tables in another library's file or checkpoint, read on demand.

    `print` shows you their names, shapes and slot variables.

    Attributes:
      origin: format and path, for messages.
      tables: tables by their names in the source.

    Example:
      >>> import tpu_embedding as te
      >>> source = te.checkpoint.open_tables({"movie": np.zeros((10, 4), np.float32)})
      >>> print(source.tables["movie"].values)
      float32[10, 4]
    """

    origin: str
    tables: Mapping[str, SourceTable]

    @property
    def arrays(self) -> dict[str, RowArray]:
        """All arrays: tables by name, and slot variables as `"table/slot"`."""
        arrays = {name: table.values for name, table in self.tables.items()}
        for name, table in self.tables.items():
            arrays |= {f"{name}/{slot}": array for slot, array in table.slots.items()}
        return arrays

    def __str__(self) -> str:
        lines = [self.origin]
        for name, table in sorted(self.tables.items()):
            slots = [f"{slot} {array}" for slot, array in sorted(table.slots.items())]
            lines.append(f"  {name}: {', '.join([str(table.values), *slots])}")
        return "\n".join(lines)
