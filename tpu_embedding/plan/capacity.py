"""How many ids and rows may travel in one round of the exchange.

Exchange buffers have static shapes. Their size is a question of speed only: what does
not fit travels in further rounds.

Ids always travel in parts of equal size, one for each destination. Rows do so too in a
*padded* exchange, whose buffers are long where a shard has few ids for each of many
others. In a *ragged* one (XLA's ragged all-to-all) they lie one after the other, with
no room between the parts.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Final, Literal, get_args

from tpu_embedding.rows.packed_rows import round_up

ExchangeKind = Literal["padded", "ragged"]
EXCHANGE_KINDS: Final[tuple[ExchangeKind, ...]] = get_args(ExchangeKind)

_DEVIATIONS: Final = 4
"""Room above the mean, in square roots of the mean.

Rows are dealt round-robin, so the unique ids that a shard sends to one destination are
nearly a Poisson count. Over zipf-distributed ids the fullest of all pairs stayed within
this (1.07 times the mean at 8 shards, 1.5 to 2 at 64, 3.5 to 6 at 256)."""

_RAGGED_DEVIATIONS: Final = 8
"""The same for the ids of a ragged exchange, where room costs four bytes, not a row."""

_PADDING_WORTH_RAGGED: Final = 1.25
"""Places per row from which a padded exchange is left for a ragged one.

Below, a padded all-to-all is at least as good: a ragged one sends narrow rows as 128
lanes where no kernel packs them, copies wide ones first, and exchanges sizes; see
`benchmarks/README.md`."""

_SUBLANES: Final = 8
"""Rows of a TPU tile; a buffer of another size is padded to it anyway."""

LANES: Final = 128
"""Ids of a TPU register. Parts of so many lie in memory as they are sent; those of
another size are first moved, by code that takes XLA seconds to compile."""

MANY_IDS: Final = 128 * LANES
"""From here on a part is a multiple of `LANES`, which adds 0.8 % at most."""

MANY_KERNEL_IDS: Final = 8 * LANES
"""The same where kernels move rows, so many at once: 12 % at most, and nothing is cut
to size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSize:
    """The static sizes of a round of the exchange, equal on all shards.

    Attributes:
      kind: how rows travel.
      capacity: ids that a shard may send to one other, at most; in a ragged exchange
        fewer where an owner has no room for what all shards ask of it.
      part: places for the ids of one destination, one of them for none.
      rows_per_line: rows of a line of the buffers of rows; in a ragged exchange, where
        lines travel, the rows of each destination begin with a new one.
      sent_rows: places for rows at the shard that asks for them; the last is no id's.
      received_rows: places for rows at their owner; the last is no row's.
      unique_rows: bound on the different rows among these.
      holds_all: whether no batch can need a second round.
    """

    kind: ExchangeKind
    capacity: int
    part: int
    rows_per_line: int
    sent_rows: int
    received_rows: int
    unique_rows: int
    holds_all: bool


def round_size(
    max_unique_ids: int,
    num_shards: int,
    rows_per_shard: int,
    *,
    capacity: int | None = None,
    kind: ExchangeKind | None = "padded",
    rows_per_line: int = 1,
    aligned_from: int = MANY_IDS,
) -> RoundSize:
    """Returns the sizes of a round.

    Args:
      max_unique_ids: bound on the unique ids that one shard can have in a step.
      num_shards: shards of the table.
      rows_per_shard: rows of the table that one shard owns; no source can ask it for
        more unique ids than that.
      capacity: the user's choice; None: the mean, and four standard deviations in a
        padded exchange, eight in a ragged one.
      kind: None: ragged where padded buffers would be a quarter longer, unless these
        hold all, or the user has chosen the capacity.
      rows_per_line: rows that share a line on their way.
      aligned_from: ids from which a part is a multiple of `LANES`.

    Example:
      >>> round_size(1000, 8, 10**6).received_rows
      1408
      >>> round_size(1000, 8, 10**6, kind="ragged").received_rows
      1128
    """
    bound = max(1, min(max_unique_ids, rows_per_shard))

    def part_size(capacity: int) -> int:
        return _part_size(capacity, rows_per_line, aligned_from)

    padded_capacity, ragged_capacity = (
        _capacity(max_unique_ids, num_shards, bound, capacity, deviations, part_size)
        for deviations in (_DEVIATIONS, _RAGGED_DEVIATIONS)
    )
    padded_rows = num_shards * part_size(padded_capacity)
    # All shards together send an owner about as many ids as a shard has. Rows that all
    # of them want come in lumps, but then a shard has fewer unique ids than the bound.
    received = math.ceil(max_unique_ids + _DEVIATIONS * math.sqrt(max_unique_ids))
    received = min(received, num_shards * ragged_capacity)
    begun_lines = num_shards * (rows_per_line - 1)
    received = max(num_shards * rows_per_line, received + begun_lines)
    received = part_size(received)
    if kind is None:
        is_long = padded_rows > _PADDING_WORTH_RAGGED * received
        is_enough = capacity is not None or padded_capacity >= bound
        kind = "ragged" if is_long and not is_enough else "padded"
    if kind == "padded":
        return RoundSize(
            kind="padded",
            capacity=padded_capacity,
            part=part_size(padded_capacity),
            rows_per_line=rows_per_line,
            sent_rows=padded_rows,
            received_rows=padded_rows,
            unique_rows=min(num_shards * padded_capacity, rows_per_shard),
            holds_all=padded_capacity >= bound,
        )
    sent = min(max_unique_ids, num_shards * ragged_capacity) + begun_lines
    return RoundSize(
        kind="ragged",
        capacity=ragged_capacity,
        part=part_size(ragged_capacity),
        rows_per_line=rows_per_line,
        sent_rows=part_size(sent),
        received_rows=received,
        unique_rows=min(received, rows_per_shard),
        holds_all=(
            ragged_capacity >= bound
            and received > num_shards * round_up(bound, rows_per_line)
        ),
    )


def _part_size(capacity: int, rows_per_line: int, aligned_from: int) -> int:
    """Returns the places for one destination in an exchange buffer.

    One more than the ids at least: a place that no id ever takes stands for none. They
    fill lines of `rows_per_line`.
    """
    few = max(_SUBLANES, rows_per_line)
    return round_up(capacity + 1, few if capacity < aligned_from else LANES)


def _capacity(
    max_unique_ids: int,
    num_shards: int,
    bound: int,
    requested: int | None,
    deviations: int,
    part_size: Callable[[int], int],
) -> int:
    """Returns the ids per destination and round."""
    if requested is not None:
        return min(requested, bound)
    mean = max(1, max_unique_ids) / num_shards
    capacity = math.ceil(mean + deviations * math.sqrt(mean))
    return min(part_size(capacity) - 1, bound)
