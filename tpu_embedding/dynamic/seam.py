"""What the core asks about the ids and the stacks of dynamic tables.

On the host, ids are uint64 until the last step, then two words.
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
from tpu_embedding.hardware import HardwareInfo
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
    """Reads ids of 64 bits, and finds their rows."""

    text_to_ids = "te.inputs.fingerprint_ids"

    def read(self, ids: Any, feature: FeaturePlan) -> Any:
        """Returns ids that are words already as uint64; other ids as they are.

        Raises:
          TypeError: if the rows of the ids are known already, or an array of JAX may
            hold only the lower halves of ids.
        """
        if isinstance(ids, RowIds):
            raise TypeError(
                f"Feature {feature.name!r} holds RowIds, whose rows are known already; "
                "prepare takes ids."
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
        """Returns the ids as uint64; positions without an id hold `NO_ID_64`.

        Negative ids are extended to 64 bits. The id with all bits set is reserved.
        """
        # Types such as int4 are none of NumPy's, so they pass through int64.
        as_uint64 = (
            ids if ids.dtype == np.uint64 else ids.astype(np.int64).view(np.uint64)
        )
        is_reserved = as_uint64 == NO_ID_64
        if feature.config.out_of_range_ids == "error" and is_reserved.any():
            position = tuple(int(i) for i in np.argwhere(is_reserved)[0])
            raise ValueError(
                f"Ids of feature {feature.name!r} must not be 2**64 - 1 (-1 if "
                f"signed), which means 'no id' in a dynamic table, got {ids[position]} "
                f"at {where} {position}, and {int(is_reserved.sum())} such ids in all. "
                "Give it another id, or set FeatureConfig.out_of_range_ids to 'drop'."
            )
        if holds_padding and ids.dtype == np.int32:
            return np.where(ids == PADDING_ROW_ID, NO_ID_64, as_uint64)
        return as_uint64.copy()

    def for_step(self, ids: Any) -> Any:
        """Returns a prepared feature with `Ids64` for its uint64 array."""
        return with_ids(ids, Ids64.of_array(ids_of(ids)))

    def needs_rows(self, ids: Any) -> bool:
        """Returns True for ids, False for `RowIds`."""
        return not isinstance(ids, RowIds)

    def row_numbers(self, ids: Any, feature: FeaturePlan) -> Any:
        """Returns the rows of `RowIds`."""
        if isinstance(ids, RowIds):
            return ids.ids
        raise self.unknown_rows(feature)

    def unknown_rows(self, feature: FeaturePlan) -> TypeError:
        """Returns the error for a feature that holds ids inside a loss."""
        return TypeError(
            f"Feature {feature.name!r} of a table with a te.Dynamic vocabulary must "
            "hold RowIds inside a loss, got ids. Replace them at the beginning of the "
            "step, so that new ids get rows: ids = optimizer.insert_ids(model, ids), "
            "state, ids = state.insert_ids(ids), or te.functional.insert_ids. To train "
            "without new ids: te.functional.find_ids."
        )

    def find_rows(
        self, tables: dict[str, Any], features: Any, plan: EmbeddingPlan
    ) -> Any:
        """Returns the features of `find_ids`."""
        return find_ids(tables, features, plan).features

    def served_rows(
        self, ids: Any, feature: FeaturePlan, tables: Mapping[str, Any], name: str
    ) -> Any:
        """Returns the rows of ids in tables of an export.

        A table has 64 rows per bucket, maybe a default row after them. The upper and
        lower words of its ids are under its `directory_name`, uint32 `[buckets, 128]`.
        """
        dynamic, words = feature.table.vocabulary, ids_of(ids)
        assert isinstance(dynamic, Dynamic)
        if not isinstance(words, Ids64):
            words = Ids64.of_array(words)  # jnp.asarray would cut NumPy's int64.
        high, low = (jnp.asarray(w).reshape(-1) for w in (words.high, words.low))
        mixed, _ = mix_ids(high, low)
        buckets = multiply_high(mixed, dynamic.num_buckets)
        is_id = ~((high == NO_ID) & (low == NO_ID))
        keys = tables[directory_name(name)]
        lanes = jax.vmap(functools.partial(find_lane, keys))(buckets, high, low)
        missing = PADDING_ROW_ID
        if dynamic.default_row == "learned":
            missing = dynamic.num_places
        rows = jnp.where(lanes < 0, missing, SLOTS_PER_BUCKET * buckets + lanes)
        rows = jnp.where(is_id, rows, PADDING_ROW_ID).astype(jnp.int32)
        return with_ids(ids, rows.reshape(words.high.shape))


DYNAMIC_INPUTS: Final = DynamicInputs()


def _arrays_in(ids: Any) -> Iterator[Any]:
    """Yields the arrays of ids in a container."""
    if isinstance(ids, list | tuple):
        # One look at each type is much faster than one at each item.
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

    def array_names(self, stack: StackPlan) -> tuple[str, ...]:
        """Returns the name of the directory."""
        return (directory_name(stack.name),)

    def init_arrays(
        self, stack: StackPlan, plan: EmbeddingPlan, key: jax.Array
    ) -> dict[str, Any]:
        """Returns a directory without ids. Global."""
        members = dynamic_tables(stack)
        make = functools.partial(
            empty_directory,
            sum(member.buckets_per_shard for member in members),
            _has_sketch(stack),
        )
        directory = on_shards(
            make, plan, in_specs=PartitionSpec(), out_specs=stack.rows_spec
        )(keys_of_tables(stack.tables, key))
        return {directory_name(stack.name): directory}

    def end_step(self, tables: Mapping[str, Any], stack: StackPlan) -> dict[str, Any]:
        """Advances the clock: ids of the next step may evict ids of this one."""
        name = directory_name(stack.name)
        directory, last = tables[name], np.uint32(2**32 - 2)
        clock = jnp.minimum(directory.clock, last) + np.uint32(1)
        return {name: dataclasses.replace(directory, clock=clock)}

    def bytes_per_device(self, stack: StackPlan, hardware: HardwareInfo) -> int:
        """Returns the memory of the directory, buckets rounded up to whole tiles."""
        num_buckets = sum(table.buckets_per_shard for table in dynamic_tables(stack))
        bytes_of_line = 4 * 2 * SLOTS_PER_BUCKET
        num_arrays = 3 if _has_sketch(stack) else 2
        return num_arrays * round_up(num_buckets, hardware.sublanes) * bytes_of_line

    def notes(self, stack: StackPlan, hardware: HardwareInfo) -> Iterator[str]:
        """Yields the number of places for ids, and their memory."""
        num_places = sum(table.dynamic.num_places for table in dynamic_tables(stack))
        yield (
            f"{stack.name}: {num_places:,} places for ids, which take "
            f"{format_bytes(self.bytes_per_device(stack, hardware))} per device"
        )

    def zero_counts(self, stack: StackPlan) -> dict[str, DynamicStats]:
        """Returns the counts of each table before the first `insert_ids`."""
        names = [field.name for field in dataclasses.fields(DynamicStats)]
        return {
            table.name: DynamicStats(**{name: jnp.int32(0) for name in names})
            for table in stack.tables
        }

    def used_rows(
        self, tables: Mapping[str, Any], stack: StackPlan
    ) -> Int[Array, " tables"]:
        """Returns the rows that ids have, by shard and table."""
        return tables[directory_name(stack.name)].used_rows

    def table_sizes(
        self, used_rows: Int[Array, " tables"], stack: StackPlan
    ) -> Float[Array, " tables"]:
        """Returns the rows that ids have over all shards, and the learned default row.

        So a table in full use has the sizes of one with a fixed vocabulary.
        """
        if stack.num_shards > 1:
            used_rows = jax.lax.psum(used_rows, stack.shard_axes)
        has_default = [table.default_row is not None for table in dynamic_tables(stack)]
        return (used_rows + np.asarray(has_default, np.int32)).astype(jnp.float32)

    def rows_on_one_shard(
        self, rows: Int[Array, " rows"], stack: StackPlan
    ) -> Int[Array, " rows"]:
        """Returns the numbers that rows of a stack have on a single shard."""
        result = rows
        for member in dynamic_tables(stack):
            offset = member.table.row_offset
            on_shard, shard = jnp.divmod(rows - offset, member.num_shards)
            per_shard = member.buckets_per_shard * SLOTS_PER_BUCKET
            row = shard * per_shard + on_shard
            # The default row follows the last place of the table.
            row = jnp.where(on_shard == per_shard, member.dynamic.num_places, row)
            result = jnp.where(rows >= offset, offset + row, result)
        return result


DYNAMIC_STACKS: Final = DynamicStacks()


def _has_sketch(stack: StackPlan) -> bool:
    admit = dynamic_tables(stack)[0].dynamic.admit
    return isinstance(admit, AdmitAfter)
