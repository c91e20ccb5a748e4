"""Chooses how many ids and rows fit in one round of the exchange.

Exchange buffers have static shapes. Their size affects speed only: ids that do not fit
spill to a later round.

Ids travel in buckets of equal size, one bucket per destination. Rows travel in one of
two ways:

* A *padded* exchange uses equal buckets for rows too. Padding then dominates where a
  shard sends few ids to each of many others.
* A *ragged* exchange (XLA's ragged all-to-all) stores the buckets one after the other,
  without padding between them.
"""

import dataclasses
import math
from typing import Final, Literal, get_args

from tpu_embedding.rows.packed_rows import round_up

ExchangeKind = Literal["padded", "ragged"]
EXCHANGE_KINDS: Final[tuple[ExchangeKind, ...]] = get_args(ExchangeKind)

_PADDED_HEADROOM_STDDEVS: Final = 4
"""Headroom of a padded bucket above the mean number of ids, in standard deviations.

Rows are dealt round-robin. The number of unique ids that a shard sends to one
destination is therefore nearly Poisson, with a standard deviation of sqrt(mean). Over
zipf-distributed ids, the fullest bucket of all pairs of shards stayed within this
headroom (1.07 times the mean at 8 shards, 1.5 to 2 at 64, 3.5 to 6 at 256)."""

_RAGGED_HEADROOM_STDDEVS: Final = 8
"""Headroom of the ids of a ragged exchange, in standard deviations.

It exceeds the padded headroom because an unused entry costs 4 bytes, not a row."""

_MAX_PADDED_TO_RAGGED_RATIO: Final = 1.25
"""Maximum ratio of padded to ragged buffer length at which padded is still chosen.

Up to this ratio a padded all-to-all is at least as fast. A ragged one sends narrow rows
as 128 lanes, copies wide rows first, and exchanges bucket
sizes; see `benchmarks/README.md`."""

_SUBLANES: Final = 8
"""Rows of a TPU tile. XLA pads buffers to a multiple of this in any case."""

LANES: Final = 128
"""32-bit values in one row of a TPU vector register.

A bucket whose size is a multiple of this is sent as it lies in memory. Any other bucket
is copied first, by code that takes XLA seconds to compile."""

LANE_ALIGNMENT_MIN_IDS: Final = 128 * LANES
"""Minimum capacity at which bucket sizes are rounded up to a multiple of `LANES`.

The rounding then adds at most 0.8 %."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSize:
    """The static buffer sizes of one round of the exchange, equal on all shards.

    Attributes:
      kind: `"padded"` or `"ragged"` exchange of rows.
      capacity: maximum number of ids that a shard sends to one destination. A ragged
        exchange sends fewer where the ids of all shards exceed the owner's buffer.
      bucket_size: entries per destination in the buffer of ids. At least one of them
        is never used, and stands for "no id".
      sent_rows: length, in rows, of the row buffer at the shard that asks. The last
        entry belongs to no id.
      received_rows: length, in rows, of the row buffer at the owner. The last entry
        belongs to no row.
      unique_rows: upper bound on the distinct rows among `received_rows`.
      holds_all: True if no batch can need a second round.
    """

    kind: ExchangeKind
    capacity: int
    bucket_size: int
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
) -> RoundSize:
    """Returns the buffer sizes of one round.

    Args:
      max_unique_ids: upper bound on the unique ids of one shard in one step.
      num_shards: number of shards of the table.
      rows_per_shard: rows of the table that one shard owns. No source device can ask
        an owner for more unique ids than that.
      capacity: ids per destination and round, as set by the user. None: the mean plus
        four standard deviations if padded, or plus eight if ragged.
      kind: the exchange of rows. None: padded if the user has set `capacity`, if one
        padded round holds every batch, or if padded buffers are at most 1.25 times as
        long as ragged ones; otherwise ragged.

    Example:
      >>> round_size(1000, 8, 10**6).received_rows
      1408
      >>> round_size(1000, 8, 10**6, kind="ragged").received_rows
      1128
    """
    bound = max(1, min(max_unique_ids, rows_per_shard))
    padded_capacity, ragged_capacity = (
        _capacity(max_unique_ids, num_shards, bound, capacity, stddevs)
        for stddevs in (_PADDED_HEADROOM_STDDEVS, _RAGGED_HEADROOM_STDDEVS)
    )
    padded_rows = num_shards * _bucket_size(padded_capacity)
    # On average, an owner receives as many ids in total as one shard sends in total.
    # Rows that every shard asks for break the Poisson assumption. But then each shard
    # has repeated ids, and so fewer unique ids than the bound.
    headroom = _PADDED_HEADROOM_STDDEVS * math.sqrt(max_unique_ids)
    received = math.ceil(max_unique_ids + headroom)
    received = min(received, num_shards * ragged_capacity)
    received = _bucket_size(max(num_shards, received))
    if kind is None:
        is_long = padded_rows > _MAX_PADDED_TO_RAGGED_RATIO * received
        is_enough = capacity is not None or padded_capacity >= bound
        kind = "ragged" if is_long and not is_enough else "padded"
    if kind == "padded":
        return RoundSize(
            kind="padded",
            capacity=padded_capacity,
            bucket_size=_bucket_size(padded_capacity),
            sent_rows=padded_rows,
            received_rows=padded_rows,
            unique_rows=min(num_shards * padded_capacity, rows_per_shard),
            holds_all=padded_capacity >= bound,
        )
    sent = min(max_unique_ids, num_shards * ragged_capacity)
    return RoundSize(
        kind="ragged",
        capacity=ragged_capacity,
        bucket_size=_bucket_size(ragged_capacity),
        sent_rows=_bucket_size(sent),
        received_rows=received,
        unique_rows=min(received, rows_per_shard),
        holds_all=ragged_capacity >= bound and received > num_shards * bound,
    )


def _bucket_size(capacity: int) -> int:
    """Returns the entries per destination of an exchange buffer.

    They exceed the capacity by at least one: the entry that no id uses stands for "no
    id".
    """
    is_small = capacity < LANE_ALIGNMENT_MIN_IDS
    return round_up(capacity + 1, _SUBLANES if is_small else LANES)


def _capacity(
    max_unique_ids: int,
    num_shards: int,
    bound: int,
    requested: int | None,
    headroom_stddevs: int,
) -> int:
    """Returns the maximum ids per destination and round.

    Without a request, this is the mean plus its headroom, and then as many more as the
    padding of the bucket can hold.
    """
    if requested is not None:
        return min(requested, bound)
    mean = max(1, max_unique_ids) / num_shards
    capacity = math.ceil(mean + headroom_stddevs * math.sqrt(mean))
    return min(_bucket_size(capacity) - 1, bound)
