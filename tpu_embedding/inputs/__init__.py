"""Ids on the host: containers of users, and batches that are fit for a step.

`containers` reads the ids of one feature from any container. `prepare` checks a batch
and gives ragged features a static size, which `buffer_sizes` chooses and `agreed_sizes`
agrees on over the processes of a job. `ragged_shards` and `sparse_ids` convert for it.
`ids_64` holds the ids of dynamic tables. `unique_ids` names each id of a device once,
for a plain feature.

`shard_inputs` turns a feature into the input of each shard. It also runs inside the
step, for ids that go into `jit` as they are. Ids of strings come from
`tpu_embedding.strings`, which is imported when one of its names is used.
"""

import importlib as _importlib
from typing import Any as _Any

from tpu_embedding.inputs.buffer_sizes import BufferSizes as BufferSizes
from tpu_embedding.inputs.prepare import prepare_features as prepare_features
from tpu_embedding.inputs.prepare import shard_batch as shard_batch
from tpu_embedding.inputs.unique_ids import UniqueIds as UniqueIds
from tpu_embedding.inputs.unique_ids import unique_ids as unique_ids
from tpu_embedding.plan.input_plan import InputPlan as InputPlan
from tpu_embedding.types import PADDING_ROW_ID as PADDING_ROW_ID
from tpu_embedding.types import ShardedRaggedIds as ShardedRaggedIds


def __getattr__(name: str) -> _Any:
    """Imports a name for strings when it is used first."""
    if name in ("Vocabulary", "fingerprint_ids", "hash_ids"):
        return getattr(_importlib.import_module("tpu_embedding.strings"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
