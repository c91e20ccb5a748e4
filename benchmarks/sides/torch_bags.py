"""PyTorch's EmbeddingBag with sparse gradients, and its sparse Adagrad.

It runs on the GPU if there is one, as JAX does.
"""

from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from settings import (
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Setting,
    cotangents,
    initial_table,
)


class Side:
    """One EmbeddingBag per table."""

    def __init__(self, setting: Setting):
        self.versions = {"torch": str(torch.__version__)}
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._bags = [
            torch.nn.EmbeddingBag(
                setting.rows,
                setting.dim,
                mode="sum",
                sparse=True,
                _weight=torch.from_numpy(initial_table(setting, i)).to(self._device),
            )
            for i in range(setting.tables)
        ]
        self._optimizer = torch.optim.Adagrad(
            [bag.weight for bag in self._bags],
            lr=LEARNING_RATE,
            initial_accumulator_value=INITIAL_ACCUMULATOR,
            eps=EPSILON,
        )
        by_table = np.ascontiguousarray(np.moveaxis(cotangents(setting), 1, 0))
        self._cotangents = list(torch.from_numpy(by_table).to(self._device))

    def load(self, ids: np.ndarray) -> Any:
        """Returns a tensor of ids for each bag."""
        return list(torch.from_numpy(ids.astype(np.int64)).to(self._device))

    def train(self, batch: Any) -> None:
        """Runs one train step."""
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self._look_up(batch), self._cotangents)
        self._optimizer.step()
        self._wait()

    def forward(self, batch: Any) -> Any:
        """Runs one lookup."""
        with torch.no_grad():
            activations = self._look_up(batch)
        self._wait()
        return activations

    def activations(self, batch: Any) -> np.ndarray:
        """Returns the result of a lookup."""
        return np.stack([a.cpu().numpy() for a in self.forward(batch)], axis=1)

    def _look_up(self, batch: Any) -> Any:
        return [bag(ids) for bag, ids in zip(self._bags, batch, strict=True)]

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
