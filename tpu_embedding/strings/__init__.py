"""Ids of strings: hashes, fingerprints and vocabularies, as in TensorFlow and Keras.

The layer itself takes integers, and never imports this package. Public names are in
`tpu_embedding.inputs`, which imports them on first use.
"""

from tpu_embedding.strings.string_ids import Vocabulary as Vocabulary
from tpu_embedding.strings.string_ids import fingerprint_ids as fingerprint_ids
from tpu_embedding.strings.string_ids import hash_ids as hash_ids
