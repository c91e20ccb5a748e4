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

SERVED_SHAPES: Final[dict[str, dict[str, int]]] = {
    "one_hot": {"tables": 26, "dim": 32, "valence": 1},
    "bags": {"tables": 8, "dim": 128, "valence": 20},
    "tiny": {"tables": 2, "dim": 8, "valence": 4},
}
"""Shapes of `serving_latency.py`. `tiny` is to try the command."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingSetting(Setting):
    """Lookups that are served, without training.

    Attributes:
      dtype: storage type of the rows, `float32` or `int8`.
      directory: holds the exports; see `serving_export.py`.
    """

    dtype: str
    directory: str

    def by_feature(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns a request: int64 `[batch]` or `[batch, valence]` by feature.

        Args:
          ids: `[tables, batch, valence]`.
        """
        ids = ids.astype(np.int64)
        by_table = ids[..., 0] if self.valence == 1 else ids
        return {f"f{i:03d}": each for i, each in enumerate(by_table)}


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


def int8_codes(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rows as bytes `q`, scales and biases: a row is `scale * q + bias`.

    Args:
      rows: `[rows, dim]`; no row has equal elements only.

    Returns:
      uint8 `[rows, dim]`, and float32 `[rows]` twice.
    """
    bias = rows.min(axis=1)
    scale = (rows.max(axis=1) - bias) / np.float32(255)
    codes = np.rint((rows - bias[:, None]) / scale[:, None])
    return np.clip(codes, 0, 255).astype(np.uint8), scale, bias


def cotangents(setting: Setting) -> np.ndarray:
    """Returns the derivative of the loss, `[batch, tables, dim]`, of every step."""
    shape = (setting.batch, setting.tables, setting.dim)
    return np.random.default_rng(1).standard_normal(shape, np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmSetting:
    """A training of DLRM by one of the run configs.

    Attributes:
      config: name of the run config.
      table_learning_rate: initial one; it falls linearly to 2 %.
      dense_learning_rate: that of the dense parameters; it falls likewise.
      num_steps: steps until both are at 2 %.
      parameters_file: `.npz` of the initial parameters. This package's side writes it,
        and starts before the others.
    """

    config: str
    table_learning_rate: float
    dense_learning_rate: float
    num_steps: int
    parameters_file: str


LAST_RATE: Final = 0.02
"""Last learning rates of `DlrmSetting`, as a multiple of the first."""
INITIAL_DLRM_ACCUMULATOR: Final = 1e-6
