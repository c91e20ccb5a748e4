"""Dynamic tables of 64-bit ids that are admitted and evicted within the compiled step.

A `TableConfig` whose `vocabulary_size` is a `Dynamic` has room for `capacity` rows. Ids
need not be known in advance: an optimizer's `insert_ids` assigns rows to new ids, and
evicts ids that are no longer used. Two ids never share a row.
"""

# The core only knows the interfaces in `tpu_embedding.vocabularies`, which this package
# implements.
#
# * `vocabulary`: what a user declares. `seam`: what the core calls.
# * `row_ids`: `insert_ids` and `find_ids`, which replace a batch's ids with rows. Ids
#   are sent to the devices that own their buckets, which reply with rows.
# * `find_or_insert`: finds ids in a directory, and admits and places new ids.
#   `new_rows` initializes the rows of new ids.
# * `directory`: the arrays, and how buckets are distributed over shards.
# * `ids_64`: ids as two mixed words. `ids_on_host`: ids and their places in NumPy.

from tpu_embedding.dynamic.vocabulary import AdmitAfter as AdmitAfter
from tpu_embedding.dynamic.vocabulary import Dynamic as Dynamic
from tpu_embedding.dynamic.vocabulary import LeastFrequentlyUsed as LeastFrequentlyUsed
from tpu_embedding.dynamic.vocabulary import LeastRecentlyUsed as LeastRecentlyUsed
from tpu_embedding.dynamic.vocabulary import TimeToLive as TimeToLive

# The public path of `Dynamic`. The reference also lists it as `te.Dynamic`.
Dynamic.__module__ = __name__
