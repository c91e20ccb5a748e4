"""The directory of a stack of dynamic tables, as the core asks for it."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from tpu_embedding.dynamic.buckets import dynamic_tables
from tpu_embedding.dynamic.directory import (
    directory_name,
    empty_directory,
)
from tpu_embedding.dynamic.row_ids import DynamicStats
from tpu_embedding.dynamic.vocabulary import SLOTS_PER_BUCKET, AdmitAfter
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.packed_rows import round_up
from tpu_embedding.tables.initial_values import keys_of_tables
from tpu_embedding.vocabularies import VocabularyStacks


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
        """Advances the clock: ids of the next step may evict those of this one."""
        name = directory_name(stack.name)
        directory, last = tables[name], np.uint32(2**32 - 2)
        clock = jnp.minimum(directory.clock, last) + np.uint32(1)
        return {name: dataclasses.replace(directory, clock=clock)}

    def bytes_per_device(self, stack: StackPlan, hardware: HardwareInfo) -> int:
        """Returns the memory of the directory, buckets rounded up to whole tiles."""
        num_buckets = sum(x.buckets_per_shard for x in dynamic_tables(stack))
        bytes_of_line = 4 * 2 * SLOTS_PER_BUCKET
        num_arrays = 3 if _has_sketch(stack) else 2
        return num_arrays * round_up(num_buckets, hardware.sublanes) * bytes_of_line

    def notes(self, stack: StackPlan, hardware: HardwareInfo) -> Iterator[str]:
        """Yields the number of places for ids, and their memory."""
        num_places = sum(x.dynamic.num_places for x in dynamic_tables(stack))
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

        So a table of which every row is used has the sizes of one with a fixed
        vocabulary.
        """
        if stack.num_shards > 1:
            used_rows = jax.lax.psum(used_rows, stack.shard_axes)
        has_default = [x.default_row is not None for x in dynamic_tables(stack)]
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
