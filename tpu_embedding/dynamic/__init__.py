"""Dynamic tables of 64-bit ids that are admitted and evicted within the compiled step.

A `TableConfig` whose `vocabulary_size` is a `Dynamic` has room for `capacity` rows. Ids
need not be known in advance: an optimizer's `insert_ids` assigns rows to new ids, and
evicts ids that are no longer used. Two ids never share a row.
"""

# The core only knows the interfaces in `tpu_embedding.vocabularies`. The modules
# `vocabulary` and `seam` implement them. To follow a batch of ids through a step, read
# `row_ids`, then `find_or_insert`, then `new_rows`.

from tpu_embedding.dynamic.vocabulary import AdmitAfter as AdmitAfter
from tpu_embedding.dynamic.vocabulary import Dynamic as Dynamic
from tpu_embedding.dynamic.vocabulary import LeastFrequentlyUsed as LeastFrequentlyUsed
from tpu_embedding.dynamic.vocabulary import LeastRecentlyUsed as LeastRecentlyUsed
from tpu_embedding.dynamic.vocabulary import TimeToLive as TimeToLive

# Makes `Dynamic` show its public path. The reference also lists it as `te.Dynamic`.
Dynamic.__module__ = __name__
