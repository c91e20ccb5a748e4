"""Embedding tables for JAX on TPUs: sharded, exact under any skew, any optax optimizer.

Start with `TPUEmbedding`, the Flax layer, and `value_and_grad` and `Optimizer`, which
train it. `tpu_embedding.linen` has the same for Flax Linen, and
`tpu_embedding.functional` without Flax.
"""

# First of all: the imports below take seconds, in which signals arrive, too.
from tpu_embedding.supervision import early_signals as _early_signals  # noqa: F401

# isort: split
import importlib.metadata

from tpu_embedding import checkpoint as checkpoint
from tpu_embedding import distributed as distributed
from tpu_embedding import export as export
from tpu_embedding import initializers as initializers
from tpu_embedding import metrics as metrics
from tpu_embedding import optimizers as optimizers
from tpu_embedding.checkpoint.saving import restore as restore
from tpu_embedding.checkpoint.saving import save as save
from tpu_embedding.combiners import CustomCombiner as CustomCombiner
from tpu_embedding.config import FeatureConfig as FeatureConfig
from tpu_embedding.config import QuantizationConfig as QuantizationConfig
from tpu_embedding.config import TableConfig as TableConfig
from tpu_embedding.finalize import (
    finalize_variable_values as finalize_variable_values,
)
from tpu_embedding.following_slots import with_table_values as with_table_values
from tpu_embedding.functional import LookupResult as LookupResult
from tpu_embedding.functional import Routed as Routed
from tpu_embedding.functional import activation_shapes as activation_shapes
from tpu_embedding.functional import apply_gradients as apply_gradients
from tpu_embedding.functional import compute_gradients as compute_gradients
from tpu_embedding.functional import init_slots as init_slots
from tpu_embedding.functional import lookup as lookup
from tpu_embedding.functional import read_rows as read_rows
from tpu_embedding.functional import route as route
from tpu_embedding.gradients import TableGradients as TableGradients
from tpu_embedding.gradients import add as add
from tpu_embedding.gradients import all_finite as all_finite
from tpu_embedding.gradients import clip_by_global_norm as clip_by_global_norm
from tpu_embedding.gradients import global_norm as global_norm
from tpu_embedding.gradients import scale as scale
from tpu_embedding.gradients import update_if as update_if
from tpu_embedding.hardware import hardware_by_name as hardware_by_name
from tpu_embedding.initializers import RowIdInitializer as RowIdInitializer
from tpu_embedding.inputs.string_ids import Vocabulary as Vocabulary
from tpu_embedding.inputs.string_ids import hash_ids as hash_ids
from tpu_embedding.lookup.buffer_sizes import BufferSizes as BufferSizes
from tpu_embedding.lookup.prepare import prepare_features as prepare_features
from tpu_embedding.lookup.prepare import shard_batch as shard_batch
from tpu_embedding.nn import Gradients as Gradients
from tpu_embedding.nn import Optimizer as Optimizer
from tpu_embedding.nn import PipelinedTrainStep as PipelinedTrainStep
from tpu_embedding.nn import TPUEmbedding as TPUEmbedding
from tpu_embedding.nn import linen as linen
from tpu_embedding.nn import value_and_grad as value_and_grad
from tpu_embedding.placement import AutoPlacement as AutoPlacement
from tpu_embedding.placement import Replicated as Replicated
from tpu_embedding.placement import ReplicateSmall as ReplicateSmall
from tpu_embedding.placement import Sharded as Sharded
from tpu_embedding.plan.device_mesh import device_mesh as device_mesh
from tpu_embedding.plan.input_plan import InputPlan as InputPlan
from tpu_embedding.plan.make_plan import make_plan as make_plan
from tpu_embedding.plan.plan import EmbeddingPlan as EmbeddingPlan
from tpu_embedding.tables.initial_values import init_tables as init_tables
from tpu_embedding.tables.slot_values import slot_values as slot_values
from tpu_embedding.tables.slot_values import with_slot_values as with_slot_values
from tpu_embedding.tables.table_values import unstack_tables as unstack_tables
from tpu_embedding.tables.touched_rows import touched_rows as touched_rows
from tpu_embedding.tables.touched_rows import (
    with_touched_tables as with_touched_tables,
)
from tpu_embedding.types import PADDING_ROW_ID as PADDING_ROW_ID
from tpu_embedding.types import DenseIds as DenseIds
from tpu_embedding.types import LookupStats as LookupStats
from tpu_embedding.types import RaggedIds as RaggedIds
from tpu_embedding.types import RowUpdates as RowUpdates
from tpu_embedding.types import ShardedRaggedIds as ShardedRaggedIds
from tpu_embedding.types import SparseIds as SparseIds
from tpu_embedding.update.lift import lift_to_rows as lift_to_rows

try:
    __version__ = importlib.metadata.version("tpu-embedding")
except importlib.metadata.PackageNotFoundError:  # A checkout that is not installed.
    __version__ = "unknown"
