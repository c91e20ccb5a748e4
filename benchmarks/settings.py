"""The shapes that steps are timed at, and the values that all sides start from.

Needs NumPy only: every side imports this, also in an environment without JAX.
"""

import dataclasses
from typing import Any, Final

import numpy as np

LEARNING_RATE: Final = 0.01
INITIAL_ACCUMULATOR: Final = 0.1
EPSILON: Final = 1e-10
"""Adagrad's small number: so small that its place in the formula does not matter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Equal tables with one feature each, and a batch of Zipf-distributed ids.

    Attributes:
      name: of the setting, in commands and in results.
      tables: number of tables.
      rows: rows of each table.
      dim: elements of a row.
      batch: samples per step.
      valence: ids of a sample in each feature; their rows are summed.
      exponent: skew of the ids.
    """

    name: str
    tables: int
    rows: int
    dim: int
    batch: int
    valence: int
    exponent: float = 1.05

    @property
    def table_bytes(self) -> int:
        """Size of all tables in float32, without slot variables."""
        return 4 * self.tables * self.rows * self.dim

    def shapes(self) -> dict[str, Any]:
        """Returns the fields but the name, for results."""
        fields = dataclasses.asdict(self)
        del fields["name"]
        return fields


SETTINGS: Final = {
    setting.name: setting
    for setting in (
        Setting(name="S1", tables=26, rows=100_000, dim=64, batch=4096, valence=1),
        Setting(name="S2", tables=26, rows=1_000_000, dim=32, batch=8192, valence=1),
        Setting(name="S3", tables=8, rows=1_000_000, dim=128, batch=2048, valence=20),
        Setting(name="T0", tables=3, rows=1000, dim=8, batch=64, valence=3),
    )
}
"""S1 to S3 are measured. T0 is tiny, to try the command."""

BLOCK: Final = 2**14
"""Rows that `initial_table` computes at a time: little memory beside a table."""


def initial_values(table: Any, row_ids: Any, dim: int, numpy: Any = np) -> Any:
    """Returns rows before the first step, the same bits in every library.

    Args:
      table: number of the table, an integer.
      row_ids: ids of the rows, `[rows]`.
      dim: elements of a row.
      numpy: `numpy` or `jax.numpy`, which computes the values.

    Returns:
      float32 `[rows, dim]` of -1/32 to 1/32: a hash, scaled without rounding.
    """
    rows = row_ids.astype(numpy.uint32).reshape(-1, 1) * numpy.uint32(2654435761)
    columns = numpy.arange(dim, dtype=numpy.uint32).reshape(1, -1)
    mixed = rows + (columns * numpy.uint32(40503) + numpy.uint32(table * 97))
    mixed = (mixed ^ (mixed >> numpy.uint32(15))) * numpy.uint32(2246822519)
    mixed = (mixed >> numpy.uint32(8)).astype(numpy.float32)
    return mixed * numpy.float32(2.0**-28) - numpy.float32(2.0**-5)


def initial_table(setting: Setting, table: int) -> np.ndarray:
    """Returns a whole table before the first step, `[rows, dim]`."""
    rows = np.empty((setting.rows, setting.dim), np.float32)
    for start in range(0, setting.rows, BLOCK):
        row_ids = np.arange(start, min(start + BLOCK, setting.rows))
        rows[row_ids] = initial_values(table, row_ids, setting.dim)
    return rows


def cotangents(setting: Setting) -> np.ndarray:
    """Returns the derivative of the loss, `[batch, tables, dim]`, of every step."""
    shape = (setting.batch, setting.tables, setting.dim)
    return np.random.default_rng(1).standard_normal(shape, np.float32)
