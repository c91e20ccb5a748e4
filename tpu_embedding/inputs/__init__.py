"""Prepares ids for a step: reads user containers and makes static shapes.

On the host, `containers` reads ids from any unambiguous container. `prepare` checks a
batch and pads ragged ids, and `buffer_sizes` chooses equal sizes on all processes.
Inside a step, `shard_inputs` parses the batch and splits it by shard.
"""

from typing import TYPE_CHECKING

from tpu_embedding.inputs.buffer_sizes import BufferSizes as BufferSizes
from tpu_embedding.inputs.prepare import prepare_features as prepare_features
from tpu_embedding.inputs.prepare import shard_batch as shard_batch
from tpu_embedding.lazy_names import import_when_used as _import_when_used
from tpu_embedding.plan.features import InputPlan as InputPlan
from tpu_embedding.types import PADDING_ROW_ID as PADDING_ROW_ID
from tpu_embedding.types import ShardedRaggedIds as ShardedRaggedIds

# These modules import this package, so their names are imported on first use.
if TYPE_CHECKING:
    from tpu_embedding.recommenders.unique_ids import UniqueIds as UniqueIds
    from tpu_embedding.recommenders.unique_ids import unique_ids as unique_ids
    from tpu_embedding.strings.string_ids import Vocabulary as Vocabulary
    from tpu_embedding.strings.string_ids import fingerprint_ids as fingerprint_ids
    from tpu_embedding.strings.string_ids import hash_ids as hash_ids

__getattr__ = _import_when_used(__name__)
