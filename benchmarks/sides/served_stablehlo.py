"""This package: the exported StableHLO program, read by `te.export.load`."""

import pathlib
from typing import Any

import jax
import numpy as np
from settings import ServingSetting

import tpu_embedding as te


class Side:
    """A server of the program, with its tables on the CPU."""

    def __init__(self, setting: ServingSetting):
        self.versions = {"tpu_embedding": te.__version__, "jax": jax.__version__}
        self._setting = setting
        self._served = te.export.load(pathlib.Path(setting.directory) / "stablehlo")

    def load(self, ids: np.ndarray) -> Any:
        """Returns a request."""
        return self._setting.by_feature(ids)

    def forward(self, batch: Any) -> list[np.ndarray]:
        """Serves a request; returns NumPy arrays."""
        return [np.asarray(rows) for rows in self._served(batch).values()]

    def activations(self, batch: Any) -> np.ndarray:
        """Returns the result of a lookup."""
        return np.stack(self.forward(batch), axis=1)
