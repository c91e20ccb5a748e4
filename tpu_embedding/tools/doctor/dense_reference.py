"""The dense reference of the doctor: `table[ids]`, a gradient by row, plain formulas.

NumPy in float64, without any code of the layer. So a mistake of the layer cannot hide
in the reference.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import numpy as np

from tpu_embedding import optimizers
from tpu_embedding.kernel_verdicts import RuleKind

RuleName = Literal[
    "sgd",
    "adagrad",
    "adam",
    "rowwise_adagrad",
    "clippy_adagrad",
]

STEPS_BEFORE: Final = 99
"""Steps that the optimizers have counted before the step of a case."""

Rows = Mapping[str, np.ndarray]
"""Rows of a table, `"values"`, and of its slot variables: `[rows, dim]` or `[rows]`."""

_RATE: Final = 0.5
_BETA_1: Final = 0.9
_BETA_2: Final = 0.999
_THRESHOLD: Final = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedIds:
    """The ids of a feature, with the sample and the gain of each.

    Attributes:
      ids: `[ids]`, row ids in the table.
      samples: `[ids]`, the sample of each id.
      gains: `[ids]`, the weight of each id, as the combiner normalises it.
      num_samples: samples of the batch; some may have no ids.
    """

    ids: np.ndarray
    samples: np.ndarray
    gains: np.ndarray
    num_samples: int

    def normalised(self) -> "WeightedIds":
        """Returns the ids for the combiner "mean": gains sum to 1 in each sample."""
        totals = np.bincount(self.samples, self.gains, minlength=self.num_samples)
        return dataclasses.replace(self, gains=self.gains / totals[self.samples])


def pooled_rows(table: np.ndarray, weighted: WeightedIds) -> np.ndarray:
    """Returns the activations: the sum of gain times row for each sample.

    Args:
      table: `[vocabulary_size, dim]`.
      weighted: the ids.

    Returns:
      `[samples, dim]`, float64.

    Example:
      >>> weighted = WeightedIds(
      ...     ids=np.array([2, 0]),
      ...     samples=np.array([0, 0]),
      ...     gains=np.array([1.0, 0.5]),
      ...     num_samples=1,
      ... )
      >>> pooled_rows(np.array([[2.0], [3.0], [4.0]]), weighted)
      array([[5.]])
    """
    activations = np.zeros((weighted.num_samples, table.shape[1]))
    rows = table[weighted.ids].astype(np.float64)
    np.add.at(activations, weighted.samples, weighted.gains[:, None] * rows)
    return activations


def gradient_by_row(
    cotangents: np.ndarray, weighted: WeightedIds
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows that ids name, each once, and the gradient of each.

    Args:
      cotangents: derivatives of the loss by the activations, `[samples, dim]`.
      weighted: the ids.

    Returns:
      Row ids in rising order, and float64 `[rows, dim]`.
    """
    row_ids, places = np.unique(weighted.ids, return_inverse=True)
    gradient = np.zeros((len(row_ids), cotangents.shape[1]))
    of_ids = weighted.gains[:, None] * cotangents[weighted.samples].astype(np.float64)
    np.add.at(gradient, places, of_ids)
    return row_ids, gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceRule:
    """An optimizer of the package, and its formula.

    Attributes:
      optimizer: the optimizer of the tables.
      step: takes the looked-up rows of one table and their gradients, in float64, and
        returns the new rows.
      kind: kind of the rule, on which the verdict on updates depends.
      is_exact: True if float32 computes the step without rounding, given short numbers.
    """

    optimizer: Any
    step: Callable[[Rows, np.ndarray], Rows]
    kind: RuleKind = "elements"
    is_exact: bool = False


def _sgd(old: Rows, g: np.ndarray) -> Rows:
    return {"values": old["values"] - _RATE * g}


def _adagrad(old: Rows, g: np.ndarray) -> Rows:
    a = old["accumulators"] + g**2
    return {"values": old["values"] - _RATE * g / np.sqrt(a), "accumulators": a}


def _rowwise_adagrad(old: Rows, g: np.ndarray) -> Rows:
    a = old["accumulators"] + np.mean(g**2, axis=1)
    step = _RATE * g / np.sqrt(a)[:, None]
    return {"values": old["values"] - step, "accumulators": a}


def _adam(old: Rows, g: np.ndarray) -> Rows:
    t = STEPS_BEFORE + 1
    m = _BETA_1 * old["momenta"] + (1 - _BETA_1) * g
    v = _BETA_2 * old["velocities"] + (1 - _BETA_2) * g**2
    correction = np.sqrt(1 - _BETA_2**t) / (1 - _BETA_1**t)
    rate = _decayed_rate(STEPS_BEFORE)
    step = correction * rate * m / np.sqrt(v + 1e-7**2)
    return {"values": old["values"] - step, "momenta": m, "velocities": v}


def _clippy(old: Rows, g: np.ndarray) -> Rows:
    w, a = old["values"], old["accumulators"]
    d = _RATE * g / np.sqrt(a + 1e-7)
    is_moved = d != 0
    bound = 0.1 * np.abs(w) + _THRESHOLD
    ratios = bound[is_moved] / np.abs(d[is_moved])
    scale = min(1.0, float(ratios.min(initial=1.0)))
    return {"values": w - scale * d, "accumulators": a + g**2}


def _decayed_rate(count: Any) -> Any:
    return _RATE / (1.0 + count)


RULES: Final[Mapping[RuleName, ReferenceRule]] = {
    "sgd": ReferenceRule(optimizer=optimizers.sgd(_RATE), step=_sgd, is_exact=True),
    "adagrad": ReferenceRule(optimizer=optimizers.adagrad(_RATE), step=_adagrad),
    "adam": ReferenceRule(
        optimizer=optimizers.adam(_decayed_rate, bias_correction=True), step=_adam
    ),
    "rowwise_adagrad": ReferenceRule(
        optimizer=optimizers.rowwise_adagrad(_RATE),
        step=_rowwise_adagrad,
        kind="row sums",
    ),
    "clippy_adagrad": ReferenceRule(
        optimizer=optimizers.clippy_adagrad(_RATE, absolute_threshold=_THRESHOLD),
        step=_clippy,
    ),
}
"""Rules by element, with a sum over a row and one value per row, with a count and a
schedule, and with a total over the table."""
