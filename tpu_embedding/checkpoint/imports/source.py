"""The tables of another library's file or checkpoint, whose rows are read by range."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import jax.numpy as jnp
import numpy as np

from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES

MAX_EXPANSION: Final = 10
_SMALL_BYTES: Final = 200 * 2**20


def max_bytes_of_files(num_bytes: int) -> int:
    """Returns the memory that arrays may take, given the size of their files.

    The limit guards against small files of compressed zeros.
    """
    return MAX_EXPANSION * num_bytes + _SMALL_BYTES


@dataclasses.dataclass(frozen=True)
class RowArray:
    """An array whose rows are read on demand.

    Attributes:
      shape: `[rows, dim]` or `[rows]`.
      dtype: element type.
      read: `read(start, num_rows)` returns `num_rows` rows beginning at `start`.
      check: raises `CheckpointError` if any data that `read` would return is damaged.
        Called before the model changes.
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
        """Returns True for byte rows: `dim` codes, then a float32 scale and bias."""
        row_shape = (dim + SCALE_AND_BIAS_BYTES,)
        return self.dtype == np.uint8 and self.shape[1:] == row_shape

    @property
    def is_floating(self) -> bool:
        """True for floating-point types, including narrow ones such as bfloat16."""
        return jnp.issubdtype(self.dtype, jnp.floating)

    def squeezed(self) -> Self:
        """Returns the array with shape `[rows]` instead of `[rows, 1]`."""
        return dataclasses.replace(
            self,
            shape=self.shape[:1],
            read=lambda start, num_rows: self.read(start, num_rows)[:, 0],
        )


def array_of(values: Any) -> RowArray:
    """Returns an in-memory or memory-mapped array as a `RowArray`.

    Args:
      values: NumPy or JAX array, or anything that `np.asarray` accepts.

    Example:
      >>> print(array_of(np.zeros((10, 4), np.float32)))
      float32[10, 4]
    """
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    return RowArray(array.shape, array.dtype, lambda start, n: array[start : start + n])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table of a source.

    Attributes:
      values: `[rows, dim]`.
      slots: slot variables by name in the source.
    """

    values: RowArray
    slots: Mapping[str, RowArray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSource:
    """The tables of another library's file or checkpoint, read on demand.

    `print` shows their names, shapes and slot variables.

    Attributes:
      origin: format and path, for messages.
      tables: tables by name in the source.

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
