"""Flax modules over the functional core: parameters and lookup."""

from tpu_embedding.nn.embedding import EmbeddingTables as EmbeddingTables
from tpu_embedding.nn.embedding import LookupStatsVariable as LookupStatsVariable
from tpu_embedding.nn.embedding import TPUEmbedding as TPUEmbedding
from tpu_embedding.nn.pipeline import PipelinedTrainStep as PipelinedTrainStep
from tpu_embedding.nn.training import Optimizer as Optimizer
from tpu_embedding.nn.training import SlotVariables as SlotVariables
from tpu_embedding.nn.training import value_and_grad as value_and_grad
