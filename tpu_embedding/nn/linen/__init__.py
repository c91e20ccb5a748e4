"""Embedding tables in Flax Linen models: layer, gradients and train state.

The names imported here are public, as `te.linen`.

* `layer`: the layer `TPUEmbedding`. `variables`: tables in a dict of variables.
* `training`: `value_and_grad` and `TrainState`.
"""

from tpu_embedding.nn.linen.layer import TPUEmbedding as TPUEmbedding
from tpu_embedding.nn.linen.training import TrainState as TrainState
from tpu_embedding.nn.linen.training import value_and_grad as value_and_grad
from tpu_embedding.nn.linen.variables import LayerTables as LayerTables
from tpu_embedding.nn.linen.variables import embedding_tables as embedding_tables
from tpu_embedding.nn.linen.variables import (
    with_embedding_tables as with_embedding_tables,
)
