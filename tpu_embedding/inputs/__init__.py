"""Ids on the host: reads the user's containers and prepares batches for a step.

`containers` reads one feature's ids from any container. `prepare` checks a batch,
splits ragged ids by shard, and pads them to a static size. `buffer_sizes` chooses this
size, equally on all processes of a job.

`shard_inputs` has the rules for shapes and dtypes. It parses the batch of a lookup,
also inside a compiled step, and turns each feature into the input of each shard. String
ids are in `tpu_embedding.strings`, unique ids in `tpu_embedding.recommenders`.
"""

from typing import TYPE_CHECKING

from tpu_embedding.inputs.buffer_sizes import BufferSizes as BufferSizes
from tpu_embedding.inputs.prepare import prepare_features as prepare_features
from tpu_embedding.inputs.prepare import shard_batch as shard_batch
from tpu_embedding.lazy_names import import_when_used as _import_when_used
from tpu_embedding.plan.features import InputPlan as InputPlan
from tpu_embedding.types import PADDING_ROW_ID as PADDING_ROW_ID
from tpu_embedding.types import ShardedRaggedIds as ShardedRaggedIds

if TYPE_CHECKING:
    from tpu_embedding.recommenders.unique_ids import UniqueIds as UniqueIds
    from tpu_embedding.recommenders.unique_ids import unique_ids as unique_ids
    from tpu_embedding.strings.string_ids import Vocabulary as Vocabulary
    from tpu_embedding.strings.string_ids import fingerprint_ids as fingerprint_ids
    from tpu_embedding.strings.string_ids import hash_ids as hash_ids

__getattr__ = _import_when_used(__name__)
