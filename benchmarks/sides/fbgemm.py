"""FBGEMM's table-batched embedding on CPUs: all tables in one operator."""

from typing import Any

import fbgemm_gpu  # pyright: ignore[reportMissingImports]
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # pyright: ignore[reportMissingImports]
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # pyright: ignore[reportMissingImports]
    ComputeDevice,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from settings import (
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Setting,
    cotangents,
    initial_table,
)


class Side:
    """Row-wise Adagrad, fused into the backward pass."""

    def __init__(self, setting: Setting):
        self.versions = {
            "fbgemm_gpu": fbgemm_gpu.__version__,
            "torch": str(torch.__version__),
        }
        table = (setting.rows, setting.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [table] * setting.tables,
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=EPSILON,
            pooling_mode=PoolingMode.SUM,
        )
        for i, weights in enumerate(self._tables.split_embedding_weights()):
            weights.copy_(torch.from_numpy(initial_table(setting, i)))
        for (accumulator,) in self._tables.split_optimizer_states():
            accumulator.fill_(INITIAL_ACCUMULATOR)
        num_samples = setting.tables * setting.batch
        self._offsets = torch.arange(num_samples + 1) * setting.valence
        joined = cotangents(setting).reshape(setting.batch, -1)
        self._cotangents = torch.from_numpy(joined)
        self._shape = (setting.batch, setting.tables, setting.dim)

    def load(self, ids: np.ndarray) -> Any:
        """Returns the ids of all features in one tensor."""
        return torch.from_numpy(ids.reshape(-1).astype(np.int64))

    def train(self, batch: Any) -> None:
        """Runs one train step."""
        self._look_up(batch).backward(self._cotangents)

    def forward(self, batch: Any) -> Any:
        """Runs one lookup."""
        with torch.no_grad():
            return self._look_up(batch)

    def activations(self, batch: Any) -> np.ndarray:
        """Returns the result of a lookup."""
        return self.forward(batch).numpy().reshape(self._shape)

    def _look_up(self, batch: Any) -> Any:
        return self._tables(indices=batch, offsets=self._offsets)
