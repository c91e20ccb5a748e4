"""The rows, indices and times that HSTU reads, and the order of a sample's events.

The candidate follows the last event of the history directly. So all tokens of a sample
lie together, and padding is behind them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Rows, indices and times of some samples.

    Attributes:
      numbers: number of each sample in the batch, on which its dropout depends.
      contextual: one row per contextual feature and sample.
      history: unique item of each event, from the earliest to the latest; padding
        follows.
      lengths: number of events of each history, from 0 to the width of `history`.
      candidate: unique item of each candidate.
      actions: bits of the action of each event in the history.
      times: time of each event in the history, in seconds.
      query_times: time of each candidate, in seconds.
    """

    numbers: Int[Array, " batch"]
    contextual: Float[Array, "batch contextual dim"]
    history: Int[Array, "batch events"]
    lengths: Int[Array, " batch"]
    candidate: Int[Array, " batch"]
    actions: Int[Array, "batch events"]
    times: Int[Array, "batch events"]
    query_times: Int[Array, " batch"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HSTUInputs:
    """The samples of a batch, and the unique rows that they index.

    Attributes:
      items: row of each unique item.
      artists: row of the artist of each unique item.
      albums: row of the album of each unique item.
      samples: the samples.
    """

    items: Float[Array, "unique dim"]
    artists: Float[Array, "unique dim"]
    albums: Float[Array, "unique dim"]
    samples: Samples


def append_candidate(
    history: Int[Array, "batch events"],
    candidate: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> Int[Array, "batch events_and_candidate"]:
    """Returns the history with the candidate behind its last event.

    Example:
      >>> history = jnp.array([[7, 8], [7, -1]])
      >>> append_candidate(history, jnp.array([4, 5]), jnp.array([2, 1])).tolist()
      [[7, 8, 4], [7, 5, 0]]
    """
    events = jnp.pad(history, ((0, 0), (0, 1)))
    is_candidate = jnp.arange(events.shape[1])[None, :] == lengths[:, None]
    return jnp.where(is_candidate, candidate[:, None], events)


def longest_sequence(
    history_lengths: Int[Array, " batch"], num_contextual: int
) -> Int[Array, ""]:
    """Returns the benchmark's `N`: tokens of the longest sample of the global batch.

    Args:
      history_lengths: lengths of all histories of the step, those of all micro-batches
        included.
      num_contextual: number of contextual tokens.
    """
    return jnp.max(history_lengths) + num_contextual + 1
