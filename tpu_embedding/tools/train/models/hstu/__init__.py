"""HSTU: a sequential transducer over histories, and its layers."""

from tpu_embedding.tools.train.models.hstu.hstu_inputs import HSTUInputs as HSTUInputs
from tpu_embedding.tools.train.models.hstu.hstu_inputs import (
    longest_sequence as longest_sequence,
)
from tpu_embedding.tools.train.models.hstu.hstu_model import HSTU as HSTU
from tpu_embedding.tools.train.models.hstu.hstu_model import HSTUSizes as HSTUSizes
