"""Starts sides, and compares the first step of each with NumPy."""

import pathlib
import sys
from typing import Any, Final

import numpy as np
from interleaved import SideFailedError, SideProcess
from settings import (
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Setting,
    cotangents,
    initial_values,
)
from sides import SideInfo

from tpu_embedding.tools.data.teacher import ZipfIds

TOLERANCE: Final = 1e-4
"""Largest difference that rounding explains.

A step moves a row by at most the learning rate, 0.01, and a sample sums up to 20 rows.
The sum of a hot row's gradients, some thousand float32 values in any order, is right to
about 1e-4 of its size."""


def write_batches(
    setting: Setting, num_batches: int, directory: pathlib.Path
) -> pathlib.Path:
    """Writes the ids, `[batches, tables, batch, valence]`; returns the file."""
    law = ZipfIds(vocabulary_size=setting.rows, exponent=setting.exponent)
    generator = np.random.default_rng(0)
    shape = (setting.tables, setting.batch, setting.valence)
    file = directory / "batches.npy"
    np.save(file, np.stack([law.draw(generator, shape) for _ in range(num_batches)]))
    return file


def start_checked(
    info: SideInfo,
    setting: Setting,
    batches: pathlib.Path,
    *,
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
) -> tuple[SideProcess, dict[str, Any]]:
    """Starts a side and compares its first step with NumPy's.

    Args:
      info: library.
      setting: shapes.
      batches: from `write_batches`; batch 0 is that of the comparison.
      python: path of the interpreter.
      environment: variables of the process; None: those of this one.

    Returns:
      The side, its versions, and the largest difference of an activation.

    Raises:
      SideFailedError: if the side ends or computes something else.
    """
    side = SideProcess(
        info.module, setting, batches, python=python, environment=environment
    )
    try:
        file = batches.with_name("activations.npy")
        checked = side.ask("check", file=str(file))
        ids = np.load(batches, mmap_mode="r")[0]
        expected = first_step(setting, ids, info.optimizer)
        before, after = np.abs(np.load(file) - expected).max(axis=(1, 2, 3))
        if not max(before, after) <= TOLERANCE:
            raise SideFailedError(
                f"{info.title} differs from NumPy by {before:.2g} before its first "
                f"step and by {after:.2g} after it."
            )
    except SideFailedError:
        side.close()
        raise
    return side, checked | {"max_difference": float(max(before, after))}


def first_step(setting: Setting, ids: np.ndarray, optimizer: str) -> np.ndarray:
    """Returns the activations of a batch before and after one step on it.

    Args:
      setting: shapes.
      ids: `[tables, batch, valence]`.
      optimizer: `rowwise_adagrad` or `adagrad`.

    Returns:
      float32 `[2, batch, tables, dim]`.
    """
    result = np.empty((2, setting.batch, setting.tables, setting.dim), np.float32)
    derivatives = cotangents(setting)
    for table in range(setting.tables):
        row_ids, places = np.unique(ids[table], return_inverse=True)
        places = places.reshape(ids[table].shape)
        rows = initial_values(table, row_ids, setting.dim)
        result[0, :, table] = _sum_rows(rows, places)
        gradients = _sum_by_row(derivatives[:, table], places)
        squares = gradients**2
        if optimizer == "rowwise_adagrad":
            squares = squares.mean(axis=1, keepdims=True)
        scale = np.sqrt(INITIAL_ACCUMULATOR + squares) + EPSILON
        rows = rows - LEARNING_RATE * gradients / scale
        result[1, :, table] = _sum_rows(rows, places)
    return result


def _sum_rows(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the sum of each sample's rows, `[batch, dim]`."""
    return sum(rows[places[:, i]] for i in range(places.shape[1]))  # type: ignore


def _sum_by_row(derivatives: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the gradient of each row, `[rows, dim]`."""
    order = np.argsort(places, axis=None, kind="stable")
    samples = order // places.shape[1]
    starts = np.searchsorted(places.reshape(-1)[order], np.arange(places.max() + 1))
    return np.add.reduceat(derivatives[samples].astype(np.float64), starts, axis=0)
