"""Implements the core's vocabulary interface for dynamic tables.

On the host, ids are uint64 until the last step in `prepare` splits them into words.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from tpu_embedding.dynamic.directory import (
    LINE_LANES,
    directory_name,
    dynamic_tables,
    empty_directory,
)
from tpu_embedding.dynamic.find_or_insert import find_lane
from tpu_embedding.dynamic.ids_64 import (
    NO_ID,
    Ids64,
    mix_ids,
    multiply_high,
    truncated_ids,
)
from tpu_embedding.dynamic.row_ids import DynamicStats, find_ids
from tpu_embedding.dynamic.vocabulary import SLOTS_PER_BUCKET, AdmitAfter, Dynamic
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.packed_rows import round_up
from tpu_embedding.tables.initial_values import keys_of_tables
from tpu_embedding.types import (
    NO_ID_64,
    PADDING_ROW_ID,
    DenseIds,
    RowIds,
    ids_of,
    is_integer,
    with_ids,
)
from tpu_embedding.vocabularies import VocabularyInputs, VocabularyStacks

_CONTAINERS: Final = (list, tuple, np.ndarray, jax.Array)


class DynamicInputs(VocabularyInputs):
    """Reads 64-bit ids and finds their rows."""

    text_to_ids = "te.inputs.fingerprint_ids"
    need_of_rows = (
        "of a te.Dynamic table must hold RowIds inside a loss, got ids. Begin the step "
        "with ids = optimizer.insert_ids(model, ids), state, ids = "
        "state.insert_ids(ids) in Linen, or te.functional.insert_ids. To insert no "
        "ids, use te.functional.find_ids."
    )

    def read(self, ids: Any, feature: FeaturePlan) -> Any:
        """Converts `Ids64` to uint64. Rejects `RowIds` and JAX arrays of narrow ids."""
        if isinstance(ids, RowIds):
            raise TypeError(
                f"Feature {feature.name!r} holds RowIds, which are already rows. Pass "
                "ids to prepare."
            )
        words = ids.ids if isinstance(ids, DenseIds) else ids
        if isinstance(words, Ids64):
            return with_ids(ids, words.to_numpy())
        for array in _arrays_in(ids):
            is_of_jax = isinstance(array, jax.Array)
            if is_of_jax and is_integer(array.dtype) and array.dtype.itemsize < 8:
                raise truncated_ids(f"a JAX array of {array.dtype}", feature)
        return ids

    def check(
        self, ids: np.ndarray, holds_padding: bool, feature: FeaturePlan, where: str
    ) -> np.ndarray:
        """Converts ids to uint64 with sign extension. `NO_ID_64` marks missing ids."""
        # Convert via int64, because NumPy cannot view types such as int4 as uint64.
        as_uint64 = (
            ids if ids.dtype == np.uint64 else ids.astype(np.int64).view(np.uint64)
        )
        is_reserved = as_uint64 == NO_ID_64
        if feature.config.out_of_range_ids == "error" and is_reserved.any():
            position = tuple(int(i) for i in np.argwhere(is_reserved)[0])
            raise ValueError(
                f"Ids of feature {feature.name!r} must not be 2**64 - 1 (-1 if "
                f"signed), which means 'no id' in a dynamic table, got {ids[position]} "
                f"at {where} {position}, {int(is_reserved.sum())} such ids in all. "
                "Use another id, or set FeatureConfig.out_of_range_ids to 'drop'."
            )
        if holds_padding and ids.dtype == np.int32:
            return np.where(ids == PADDING_ROW_ID, NO_ID_64, as_uint64)
        return as_uint64.copy()

    def for_step(self, ids: Any) -> Any:
        return with_ids(ids, Ids64.of_array(ids_of(ids)))

    def find_rows(
        self, tables: dict[str, Any], features: Any, plan: EmbeddingPlan
    ) -> Any:
        return find_ids(tables, features, plan).features

    def served_rows(
        self, ids: Any, feature: FeaturePlan, tables: Mapping[str, Any], name: str
    ) -> Any:
        dynamic, words = feature.table.vocabulary, ids_of(ids)
        assert isinstance(dynamic, Dynamic)
        if not isinstance(words, Ids64):
            words = Ids64.of_array(words)  # jnp.asarray would truncate NumPy's int64.
        high, low = (jnp.asarray(w).reshape(-1) for w in (words.high, words.low))
        mixed, _ = mix_ids(high, low)
        buckets = multiply_high(mixed, dynamic.num_buckets)
        is_id = ~((high == NO_ID) & (low == NO_ID))
        keys = tables[directory_name(name)]
        # Exports store ids unmixed, as the user has them. The mixed word only selects
        # the bucket.
        lanes = jax.vmap(functools.partial(find_lane, keys))(buckets, high, low)
        missing = PADDING_ROW_ID
        if dynamic.default_row == "learned":
            missing = dynamic.num_places
        rows = jnp.where(lanes < 0, missing, SLOTS_PER_BUCKET * buckets + lanes)
        rows = jnp.where(is_id, rows, PADDING_ROW_ID).astype(jnp.int32)
        return with_ids(ids, rows.reshape(words.high.shape))


DYNAMIC_INPUTS: Final = DynamicInputs()


def _arrays_in(ids: Any) -> Iterator[Any]:
    if isinstance(ids, list | tuple):
        # Checking each distinct type is much faster than checking each item.
        if any(issubclass(kind, _CONTAINERS) for kind in set(map(type, ids))):
            for item in ids:
                yield from _arrays_in(item)
        return
    yield ids
    for name in ("ids", "values"):
        inner = getattr(ids, name, None)
        if inner is not None:
            yield from _arrays_in(inner)


class DynamicStacks(VocabularyStacks):
    """Keeps a directory of ids for each stack."""

    @property
    def zero_counts(self) -> DynamicStats:
        fields = dataclasses.fields(DynamicStats)
        return DynamicStats(**{field.name: jnp.int32(0) for field in fields})

    def plan_stack(self, stack: StackPlan) -> StackPlan:
        members = dynamic_tables(stack)
        num_buckets = sum(member.buckets_per_shard for member in members)
        # A TPU stores whole tiles, so the last one counts in full.
        num_buckets = round_up(num_buckets, stack.hardware.sublanes)
        num_arrays = 3 if _has_sketch(stack) else 2
        num_bytes = num_arrays * num_buckets * 4 * LINE_LANES
        num_places = sum(member.dynamic.num_places for member in members)
        note = (
            f"{num_places:,} places for ids, whose directory takes "
            f"{format_bytes(num_bytes)} per device"
        )
        return dataclasses.replace(
            stack,
            array_names=(directory_name(stack.name),),
            vocabulary_bytes=num_bytes,
            notes=(*stack.notes, note),
        )

    def init_arrays(
        self, stack: StackPlan, plan: EmbeddingPlan, key: jax.Array
    ) -> dict[str, Any]:
        members = dynamic_tables(stack)
        make = functools.partial(
            empty_directory,
            sum(member.buckets_per_shard for member in members),
            _has_sketch(stack),
        )
        # Built shard by shard, so no device ever holds the whole directory.
        directory = on_shards(
            make, plan, in_specs=PartitionSpec(), out_specs=stack.rows_spec
        )(keys_of_tables(stack.tables, key))
        return {directory_name(stack.name): directory}

    def end_step(self, tables: Mapping[str, Any], stack: StackPlan) -> dict[str, Any]:
        """Advances the clock, so that the next step may evict this step's ids."""
        name = directory_name(stack.name)
        directory, last = tables[name], np.uint32(2**32 - 2)
        # The clock stops at its maximum. If it wrapped, every age would be 0.
        clock = jnp.minimum(directory.clock, last) + np.uint32(1)
        return {name: dataclasses.replace(directory, clock=clock)}

    def table_sizes(
        self, arrays: Mapping[str, Any], stack: StackPlan
    ) -> Float[Array, " tables"]:
        """Counts rows in use over all shards, including default rows."""
        used_rows = arrays[directory_name(stack.name)].used_rows
        if stack.num_shards > 1:
            used_rows = jax.lax.psum(used_rows, stack.shard_axes)
        has_default = [table.default_row is not None for table in dynamic_tables(stack)]
        return (used_rows + np.asarray(has_default, np.int32)).astype(jnp.float32)

    def rows_on_one_shard(
        self, rows: Int[Array, " rows"], stack: StackPlan
    ) -> Int[Array, " rows"]:
        result = rows
        for member in dynamic_tables(stack):
            offset = member.table.row_offset
            on_shard, shard = jnp.divmod(rows - offset, member.num_shards)
            per_shard = member.buckets_per_shard * SLOTS_PER_BUCKET
            # On a single shard, the blocks of buckets from all shards follow each
            # other.
            row = shard * per_shard + on_shard
            # The default row follows the last place of the table.
            row = jnp.where(on_shard == per_shard, member.dynamic.num_places, row)
            result = jnp.where(rows >= offset, offset + row, result)
        return result


DYNAMIC_STACKS: Final = DynamicStacks()


def _has_sketch(stack: StackPlan) -> bool:
    # `admit` is part of the stacking key, so it is equal for all tables in a stack.
    admit = dynamic_tables(stack)[0].dynamic.admit
    return isinstance(admit, AdmitAfter)
