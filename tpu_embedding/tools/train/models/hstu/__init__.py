"""HSTU: a sequential transducer over histories, and its layers.

`hstu_model` has the model, `hstu_sizes` its sizes, and `hstu_inputs` what it reads.
`token_encoder` makes the tokens of a sequence, `position_encoder` adds their places and
ages, and `stu_layer` has the layers, with the attention of `silu_attention` and the
MLPs of `swish_mlp`. `micro_batches` runs them for some samples at a time.
"""

from tpu_embedding.tools.train.models.hstu.hstu_inputs import HSTUInputs as HSTUInputs
from tpu_embedding.tools.train.models.hstu.hstu_inputs import Samples as Samples
from tpu_embedding.tools.train.models.hstu.hstu_inputs import (
    longest_sequence as longest_sequence,
)
from tpu_embedding.tools.train.models.hstu.hstu_model import HSTU as HSTU
from tpu_embedding.tools.train.models.hstu.hstu_sizes import HSTUSizes as HSTUSizes
