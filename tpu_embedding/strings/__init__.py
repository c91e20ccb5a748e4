"""String ids: hashes, fingerprints and vocabularies, as in TensorFlow and Keras.

The layer takes integers, and never imports this package. `tpu_embedding.inputs` imports
the public names on first use.
"""

from tpu_embedding.strings.string_ids import Vocabulary as Vocabulary
from tpu_embedding.strings.string_ids import fingerprint_ids as fingerprint_ids
from tpu_embedding.strings.string_ids import hash_ids as hash_ids
