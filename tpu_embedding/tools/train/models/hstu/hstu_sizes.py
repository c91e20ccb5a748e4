"""The sizes of `HSTU`, which its layers read."""

import dataclasses
import math
from typing import Final, Literal

from tpu_embedding.tools.train.models.hstu.silu_attention import DEFAULT_BLOCK_SIZE

DEFAULT_MICRO_BATCH_SIZE: Final = 32
"""Samples of a device that are computed at a time."""

SECONDS_PER_SQUARE: Final = 60
"""Bucket `k` of ages starts at an age of `60 * k ** 2` seconds."""

MAX_TIME_BUCKETS: Final = math.isqrt((2**31 - 1) // SECONDS_PER_SQUARE) - 1
"""Limit of `num_time_buckets`; the age of the next bucket must be an int32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HSTUSizes:
    """Sizes of `HSTU`.

    Attributes:
      dim: dimension of rows and tokens.
      num_layers: number of STU layers.
      num_heads: number of heads of each layer.
      head_dim: dimension of queries, keys and values of a head.
      token_hidden_size: width of the hidden layers of the MLPs of tokens.
      item_hidden_size: width of the hidden layers of the candidate's MLP and the head.
      num_contextual: number of contextual tokens.
      num_positions: rows of the table of positions; more than `num_contextual`. Tokens
        that are further away share the last row.
      num_time_buckets: largest bucket of ages. Bucket `k` starts at `60 * k ** 2`
        seconds.
      input_dropout: dropout rate of the encoded tokens.
      dropout: dropout rate in each layer.
      block_size: tokens per block of attention.
      micro_batch_size: largest number of samples that a device computes at a time.
        Results do not depend on it, up to rounding: tables are looked up and updated
        once per step, and gradients are those of the whole batch. Fewer samples take
        less memory.
      dtype: dtype in which tokens are computed. Parameters are float32.
    """

    dim: int
    num_layers: int
    num_heads: int
    head_dim: int
    token_hidden_size: int
    item_hidden_size: int
    num_contextual: int
    num_positions: int
    num_time_buckets: int
    input_dropout: float
    dropout: float
    block_size: int = DEFAULT_BLOCK_SIZE
    micro_batch_size: int = DEFAULT_MICRO_BATCH_SIZE
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self):
        if self.num_positions <= self.num_contextual:
            raise ValueError(
                "HSTUSizes.num_positions must exceed num_contextual, got "
                f"{self.num_positions} and {self.num_contextual}."
            )
        if self.num_time_buckets > MAX_TIME_BUCKETS:
            raise ValueError(
                f"HSTUSizes.num_time_buckets must be at most {MAX_TIME_BUCKETS}, got "
                f"{self.num_time_buckets}."
            )
