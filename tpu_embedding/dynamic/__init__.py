"""Dynamic tables: any 64-bit id, admitted, aged and evicted within the compiled step.

A `TableConfig` whose `vocabulary_size` is a `Dynamic` has room for `capacity` rows. Its
ids need not be known beforehand: `insert_ids` of an optimizer gives each new id a row,
and takes rows back from ids that are no longer used. Two ids never share a row.
"""

# A vertical: the core knows `tpu_embedding.vocabularies` only, whose classes are
# implemented here.
#
# * `vocabulary`: what a user declares. `seam`: what the core calls.
# * `row_ids`: `insert_ids` and `find_ids`, which replace the ids of a batch by rows.
#   Ids travel to the owners of their buckets, and rows come back.
# * `find_or_insert`: finds ids in a directory, and admits and places new ones.
#   `new_rows` starts their rows.
# * `directory`: the arrays, and how buckets are dealt to shards.
# * `ids_64`: ids as two mixed words. `ids_on_host`: ids and their places in NumPy.

from tpu_embedding.dynamic.vocabulary import AdmitAfter as AdmitAfter
from tpu_embedding.dynamic.vocabulary import Dynamic as Dynamic
from tpu_embedding.dynamic.vocabulary import LeastFrequentlyUsed as LeastFrequentlyUsed
from tpu_embedding.dynamic.vocabulary import LeastRecentlyUsed as LeastRecentlyUsed
from tpu_embedding.dynamic.vocabulary import TimeToLive as TimeToLive

# Where users find it: the reference also lists it as `te.Dynamic`.
Dynamic.__module__ = __name__
