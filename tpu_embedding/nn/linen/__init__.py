"""Embedding tables in Flax Linen models, public as `te.linen`.

`variables` finds the tables in a dict, `layer` looks them up, `training` updates them.
"""

from typing import TYPE_CHECKING

from tpu_embedding.lazy_names import import_when_used as _import_when_used
from tpu_embedding.nn.linen.layer import TPUEmbedding as TPUEmbedding
from tpu_embedding.nn.linen.training import TrainState as TrainState
from tpu_embedding.nn.linen.training import value_and_grad as value_and_grad
from tpu_embedding.nn.linen.variables import LayerTables as LayerTables
from tpu_embedding.nn.linen.variables import embedding_tables as embedding_tables
from tpu_embedding.nn.linen.variables import (
    with_embedding_tables as with_embedding_tables,
)

if TYPE_CHECKING:
    from tpu_embedding.host_rows.linen import host_rows as host_rows

__getattr__ = _import_when_used(__name__)
