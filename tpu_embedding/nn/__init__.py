"""The embedding layer for Flax: lookups, gradients and train steps inside a model.

For NNX, users call `embedding` (the layer), `training` (its gradients), `optimizer` and
`pipeline`. For Linen, they call `linen/`. All build on `recording`, because JAX
derivatives are never sparse. Layers record their lookups, and table gradients are
computed from these records.
"""

from typing import TYPE_CHECKING

from tpu_embedding.lazy_names import import_when_used as _import_when_used
from tpu_embedding.nn.embedding import EmbeddingTables as EmbeddingTables
from tpu_embedding.nn.embedding import LookupStatsVariable as LookupStatsVariable
from tpu_embedding.nn.embedding import TPUEmbedding as TPUEmbedding
from tpu_embedding.nn.optimizer import Optimizer as Optimizer
from tpu_embedding.nn.optimizer import SlotVariables as SlotVariables
from tpu_embedding.nn.pipeline import PipelinedTrainStep as PipelinedTrainStep
from tpu_embedding.nn.pipeline import set_each_step as set_each_step
from tpu_embedding.nn.training import grad as grad
from tpu_embedding.nn.training import put_on_mesh as put_on_mesh
from tpu_embedding.nn.training import value_and_grad as value_and_grad

# `recommenders` imports this package, so its names are imported on first use.
if TYPE_CHECKING:
    from tpu_embedding.recommenders.feature_interactions import (
        DotInteraction as DotInteraction,
    )
    from tpu_embedding.recommenders.feature_interactions import (
        FeatureCross as FeatureCross,
    )
    from tpu_embedding.recommenders.ranking_losses import (
        in_batch_softmax as in_batch_softmax,
    )
    from tpu_embedding.recommenders.ranking_losses import list_mle_loss as list_mle_loss
    from tpu_embedding.recommenders.ranking_losses import pairwise_loss as pairwise_loss
    from tpu_embedding.recommenders.ranking_losses import (
        sampled_softmax as sampled_softmax,
    )
    from tpu_embedding.recommenders.retrieval import top_k as top_k
    from tpu_embedding.recommenders.retrieval import top_k_of_tower as top_k_of_tower

__getattr__ = _import_when_used(__name__)
