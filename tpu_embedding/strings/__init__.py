"""Ids of strings: hashes, fingerprints and vocabularies, as in TensorFlow and Keras.

The layer itself takes integers and imports nothing of this package. Users find its
names in `tpu_embedding.inputs`, which imports them when they are used.
"""

from tpu_embedding.strings.string_ids import Vocabulary as Vocabulary
from tpu_embedding.strings.string_ids import fingerprint_ids as fingerprint_ids
from tpu_embedding.strings.string_ids import hash_ids as hash_ids
