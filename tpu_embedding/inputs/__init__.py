"""Ids on the host: forms in which users hold them, and batches that are fit for a step.

`forms` reads the ids of one feature from any container, `string_ids` makes ids from
strings by `fingerprints`. `prepare` checks a batch and gives ragged features a static
size, which `buffer_sizes` chooses and `agreed_sizes` agrees on over the processes of a
job. `ragged_shards` and `sparse_ids` convert for it.
`wide_ids` holds the ids of dynamic tables. `unique_ids` names each id of a device once,
for a plain feature.

`shard_inputs` turns a feature into the input of each shard. It also runs inside the
step, for ids that go into `jit` as they are.
"""

from tpu_embedding.inputs.buffer_sizes import BufferSizes as BufferSizes
from tpu_embedding.inputs.prepare import prepare_features as prepare_features
from tpu_embedding.inputs.prepare import shard_batch as shard_batch
from tpu_embedding.inputs.string_ids import Vocabulary as Vocabulary
from tpu_embedding.inputs.string_ids import hash_ids as hash_ids
from tpu_embedding.inputs.unique_ids import UniqueIds as UniqueIds
from tpu_embedding.inputs.unique_ids import unique_ids as unique_ids
from tpu_embedding.plan.input_plan import InputPlan as InputPlan
from tpu_embedding.types import PADDING_ROW_ID as PADDING_ROW_ID
from tpu_embedding.types import ShardedRaggedIds as ShardedRaggedIds
