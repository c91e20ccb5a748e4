"""Finds the unique ids of each shard, for features with `FeatureConfig.unique_rows`.

A model that transforms rows before it expands them, such as one of histories, computes
each item once per device instead of once per event. The lookup then has one place per
unique id, and an index tells where each event finds its row.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from tpu_embedding.dynamic import Dynamic
from tpu_embedding.inputs.buffer_sizes import RaggedDemand
from tpu_embedding.inputs.forms import HostIds
from tpu_embedding.inputs.wide_ids import padding_of
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    RaggedIds,
    UniqueIds,
)

_MAX_ROWS_PER_ID: Final = 16
"""Rows of a table per id up to which a mark per row is faster than sorting the ids."""

ONLY: Final = None
"""Name of the ids of a feature that are no dict."""


class HostNest(NamedTuple):
    """The ids of a feature with unique rows on the host, by their names in a dict.

    Attributes:
      leaves: name to ids; `ONLY` if the user passed no dict.
    """

    leaves: dict[Any, HostIds]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """`(batch,)`."""
        return (self.batch_size,)

    @property
    def batch_size(self) -> int:
        """Number of samples, the same for all arrays."""
        return _batch_size_of(next(iter(self.leaves.values())))

    def refuse_uneven(self, owner: str) -> None:
        """Raises a ValueError if the arrays have different numbers of samples."""
        sizes = {name: _batch_size_of(ids) for name, ids in self.leaves.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"The ids of feature {owner!r} must have the same number of samples, "
                f"got {sizes}."
            )


class UniqueShards(NamedTuple):
    """The unique ids of each shard, and the index of its samples into them.

    Attributes:
      ids: per shard, int32 or uint64 `[unique]`, rising.
      index: name to int32 `[batch, ...]`; -1 where there is no id.
      out_of_range: ids of each shard that were dropped or clipped.
      samples_per_shard: the same for all shards; the last ones are filled up.
      max_unique: an upper bound on the unique ids of any shard.
    """

    ids: list[np.ndarray]
    index: dict[Any, np.ndarray]
    out_of_range: list[int]
    samples_per_shard: int
    max_unique: int

    @classmethod
    def of(
        cls, ids: Mapping[Any, np.ndarray], feature: FeaturePlan, num_shards: int
    ) -> "UniqueShards":
        """Deals consecutive samples to shards, and ranks the ids of each.

        Args:
          ids: name to int32 or uint64 `[batch, ...]`, checked, with padding in unused
            places.
          feature: says what becomes of ids outside its table.
          num_shards: shards of this process.
        """
        batch_size = next(iter(ids.values())).shape[0]
        per_shard = -(-batch_size // num_shards)
        index = {name: np.empty(x.shape, np.int32) for name, x in ids.items()}
        unique_ids, out_of_range = [], []
        for shard in range(num_shards):
            part = slice(shard * per_shard, (shard + 1) * per_shard)
            parts = {name: x[part] for name, x in ids.items()}
            of_shard, num_outside = _within_table(
                np.concatenate([x.ravel() for x in parts.values()]), feature
            )
            unique, places = _rank_unique(of_shard, feature)
            unique_ids.append(unique)
            out_of_range.append(num_outside)
            ends = np.cumsum([x.size for x in parts.values()])[:-1]
            for (name, x), of_name in zip(
                parts.items(), np.split(places, ends), strict=True
            ):
                index[name][part] = of_name.reshape(x.shape)
        num_places = per_shard * sum(math.prod(x.shape[1:]) for x in ids.values())
        return cls(
            ids=unique_ids,
            index=index,
            out_of_range=out_of_range,
            samples_per_shard=per_shard,
            max_unique=num_places,
        )

    def demand(self, feature: FeaturePlan) -> RaggedDemand:
        """Returns the facts that the size of the buffer depends on.

        Their spread is that of ids which come one by one at random, because the number
        of unique ids is no sum over samples.
        """
        counts = [ids.shape[0] for ids in self.ids]
        num_samples = next(iter(self.index.values())).shape[0]
        mean = sum(counts) / num_samples
        return RaggedDemand(
            feature_name=feature.name,
            expected_valence=feature.config.expected_valence,
            samples_per_shard=self.samples_per_shard,
            num_ids=max(counts),
            num_samples=num_samples,
            valence_sum=float(sum(counts)),
            valence_square_sum=num_samples * (mean**2 + mean),
        )

    def padded(self, size: int) -> UniqueIds:
        """Copies each shard's ids into a buffer of at most `size` ids."""
        size = max(1, min(size, self.max_unique))
        ids = np.full((len(self.ids), size), padding_of(self.ids[0].dtype))
        for buffer, unique in zip(ids, self.ids, strict=True):
            buffer[: unique.shape[0]] = unique
        index = {
            name: np.where(places < 0, np.int32(size), places)
            for name, places in self.index.items()
        }
        return UniqueIds(
            ids=ids,
            index=index[ONLY] if ONLY in index else index,
            out_of_range=np.asarray(self.out_of_range, np.int32),
        )


def as_ragged(ids: HostIds) -> HostIds:
    """Returns lists that happen to have equal lengths as ragged ids.

    Otherwise the shape of the index would depend on the data.
    """
    if not isinstance(ids.ids, DenseIds) or np.ndim(ids.ids.ids) != 2:
        return ids
    array = np.asarray(ids.ids.ids)
    num_samples, num_places = array.shape
    ragged = RaggedIds(
        values=array.reshape(-1), row_splits=np.arange(num_samples + 1) * num_places
    )
    return dataclasses.replace(ids, ids=ragged)


def in_places(ids: DenseIds | RaggedIds, feature: FeaturePlan) -> np.ndarray:
    """Returns ids with one place per position, `[batch]` or `[batch, places]`.

    Ragged ids become sequences: longer samples are cut, shorter ones padded.

    Args:
      ids: int32 or uint64, checked.
      feature: has the length of sequences.

    Raises:
      ValueError: if ragged ids have no length, or an array has more axes.
    """
    if isinstance(ids, DenseIds):
        array = np.asarray(ids.ids)
        if array.ndim > 2:
            raise ValueError(
                f"Feature {feature.name!r} has unique_rows, so its ids must be ragged "
                f"or have shape [batch] or [batch, places], got {array.shape}; reshape "
                "the expanded rows instead."
            )
        return array
    length = length_of_ragged(feature)
    row_splits = np.asarray(ids.row_splits).astype(np.int64, copy=False)
    lengths = np.diff(row_splits)
    values = np.asarray(ids.values)
    sequences = np.full((lengths.shape[0], length), padding_of(values.dtype))
    is_used = np.arange(length) < lengths[:, None]
    starts = row_splits[:-1, None] + np.arange(length)
    sequences[is_used] = values[starts[is_used]]
    return sequences


def length_of_ragged(feature: FeaturePlan) -> int:
    """Returns the length of the sequences that ragged ids become.

    Raises:
      ValueError: if the feature has none.
    """
    length = feature.config.max_sequence_length
    if not length:
        raise ValueError(
            f"Feature {feature.name!r} has unique_rows and ragged ids, whose index "
            "needs a length; set FeatureConfig.max_sequence_length."
        )
    return length


def named(feature: FeaturePlan, name: Any) -> FeaturePlan:
    """Returns the feature under the name of one of its arrays, for errors."""
    if name is ONLY:
        return feature
    return dataclasses.replace(feature, name=f"{feature.name}/{name}")


def _within_table(ids: np.ndarray, feature: FeaturePlan) -> tuple[np.ndarray, int]:
    """Drops or clips ids outside the feature's table, and counts them.

    It is done before ids are ranked, so that equal rows are one, and dropped ids none.
    """
    num_rows = feature.table.vocabulary_size
    if isinstance(num_rows, Dynamic):
        return ids, 0
    is_outside = ((ids < 0) | (ids >= num_rows)) & (ids != PADDING_ROW_ID)
    num_outside = int(is_outside.sum())
    if not num_outside:
        return ids, 0
    nearest = np.clip(ids, 0, num_rows - 1)
    if feature.config.out_of_range_ids != "clip":
        nearest = np.int32(PADDING_ROW_ID)
    return np.where(is_outside, nearest, ids), num_outside


def _rank_unique(
    ids: np.ndarray, feature: FeaturePlan
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different ids, rising, and the rank of each id; -1 for padding."""
    is_id = ids != padding_of(ids.dtype)
    num_rows = feature.table.vocabulary_size
    used = ids[is_id]
    places = np.full(ids.shape, -1, np.int32)
    if isinstance(num_rows, int) and num_rows <= _MAX_ROWS_PER_ID * used.size:
        is_used = np.zeros(num_rows, bool)
        is_used[used] = True
        unique = np.flatnonzero(is_used).astype(np.int32)
        ranks = np.empty(num_rows, np.int32)
        ranks[unique] = np.arange(unique.shape[0], dtype=np.int32)
        places[is_id] = ranks[used]
        return unique, places
    unique, inverse = np.unique(used, return_inverse=True)
    places[is_id] = inverse
    return unique, places


def _batch_size_of(ids: HostIds) -> int:
    return ids.batch_shape[0] if ids.batch_shape else 0
