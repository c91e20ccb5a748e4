"""Decides which unknown ids get rows, and counts them in a sketch. Per shard."""

import dataclasses
from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from tpu_embedding.dynamic.directory import (
    LINE_LANES,
    IdDirectory,
    MixedIds,
    Pass,
    add_to_elements,
    read_elements,
    set_elements,
)
from tpu_embedding.dynamic.vocabulary import AdmitAfter, Dynamic

_COUNT_BITS: Final = 8
_MAX_COUNT: Final = 2**_COUNT_BITS - 1
_TOTAL_LANE: Final = LINE_LANES - 1
"""Lane of a bucket's sketch that holds the number of ids counted; others count ids."""


def admit(
    directory: IdDirectory,
    ids: MixedIds,
    is_unknown: Bool[Array, " ids"],
    dynamic: Dynamic,
    now: UInt32[Array, ""],
    of_pass: Pass,
) -> tuple[IdDirectory, Bool[Array, " ids"]]:
    """Decides which unknown ids may have a row."""
    rule, sketch = dynamic.admit, directory.sketch
    if rule is None:
        return directory, is_unknown
    noted, filled = is_unknown & of_pass.notes, is_unknown & of_pass.fills
    sketch = _count_in_sketch(sketch, ids, noted, rule, now)
    found = [
        read_elements(sketch, ids.buckets, lanes) & _MAX_COUNT
        for lanes in _counters(ids)
    ]
    is_admitted = is_unknown & (jnp.minimum(*found) >= rule.count)
    # Only now, as all ids of a call count in one epoch.
    sketch = add_to_elements(sketch, ids.buckets, jnp.int32(_TOTAL_LANE), filled)
    return dataclasses.replace(directory, sketch=sketch), is_admitted


def _counters(ids: MixedIds) -> tuple[Array, Array]:
    """Returns the lanes of the two counters of each id."""
    lanes = np.uint32(_TOTAL_LANE)
    first, second = ids.second % lanes, ids.second // lanes % lanes
    return first.astype(jnp.int32), second.astype(jnp.int32)


def _count_in_sketch(
    sketch: UInt32[Array, "buckets _"],
    ids: MixedIds,
    is_counted: Bool[Array, " ids"],
    rule: AdmitAfter,
    now: UInt32[Array, ""],
) -> UInt32[Array, "buckets _"]:
    """Counts ids in two counters each, and halves or clears counters of earlier times.

    A counter holds the epoch of its latest change, which tells how often it is halved
    before the next. `AdmitAfter.ids_per_halving` ids end an epoch of their bucket. A
    new window is `_COUNT_BITS` epochs later, which leaves nothing of a count.
    """
    total = read_elements(sketch, ids.buckets, jnp.int32(_TOTAL_LANE))
    epoch = total // np.uint32(rule.ids_per_halving)
    if rule.window is not None:
        epoch += now // np.uint32(rule.window) * np.uint32(_COUNT_BITS)
    epoch = epoch << _COUNT_BITS
    first, second = _counters(ids)
    counters = ((first, is_counted), (second, is_counted & (first != second)))
    for lanes, is_used in counters:
        old = read_elements(sketch, ids.buckets, lanes)
        count = old & _MAX_COUNT
        halvings = (epoch - (old - count)) >> _COUNT_BITS
        count = count >> jnp.minimum(halvings, _COUNT_BITS)
        sketch = set_elements(sketch, ids.buckets, lanes, epoch | count, is_used)
    for lanes, is_used in counters:
        sketch = add_to_elements(sketch, ids.buckets, lanes, is_used)
    # Both counters are read before one is cut off: two ids may share one.
    found = [read_elements(sketch, ids.buckets, lanes) - epoch for lanes, _ in counters]
    for (lanes, is_used), value in zip(counters, found, strict=True):
        value = epoch | jnp.minimum(value, _MAX_COUNT)
        sketch = set_elements(sketch, ids.buckets, lanes, value, is_used)
    return sketch
