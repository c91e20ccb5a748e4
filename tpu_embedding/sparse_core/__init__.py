"""XLA's own SparseCore operations, driven from raw ids inside `jit`.

`partition_ids` sorts the ids of a device into the buffers that the operations read;
`lookup` and `update` are the operations; `row_rule` lowers an optimizer to their
arithmetic on rows; `limits` says how many ids they may be given.
"""

from tpu_embedding.sparse_core.limits import Limits, are_within, choose_limits
from tpu_embedding.sparse_core.operations import lookup, unavailable_reason, update
from tpu_embedding.sparse_core.partitioned_ids import (
    LargestCounts,
    PartitionedIds,
    partition_ids,
)
from tpu_embedding.sparse_core.row_rule import RowRule, row_rule
