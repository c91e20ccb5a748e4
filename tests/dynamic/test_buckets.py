"""Buckets of dynamic tables: where they lie, and how many ids find no place."""

import jax
import pytest

import tpu_embedding as te
from tests.checkpoint.states import plan_of
from tpu_embedding.dynamic.directory import dynamic_tables

CAPACITIES = (1000, 70)


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_rows_of_a_bucket_lie_on_one_device(num_devices):
    sizes = {f"{n}": te.Dynamic(capacity=n, default_row="learned") for n in CAPACITIES}
    plan = plan_of(sizes, devices=num_devices, dim=8)
    (stack,) = plan.stacks
    first_row = first_bucket = 0
    for member in dynamic_tables(stack):
        assert member.dynamic.num_buckets == -(-member.dynamic.capacity // 64)
        assert member.buckets_per_shard == -(-member.dynamic.num_buckets // num_devices)
        assert member.first_row == first_row
        assert member.first_bucket == first_bucket
        rows = 64 * member.buckets_per_shard + 1
        assert member.table.num_rows == num_devices * rows
        assert member.table.row_offset % num_devices == 0
        assert member.default_row == num_devices * (rows - 1)
        first_row += rows
        first_bucket += member.buckets_per_shard
    assert stack.vocabulary_bytes == 1024 * first_bucket


@pytest.mark.parametrize("admit", [None, te.dynamic.AdmitAfter(2)])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_the_memory_of_the_plan_is_that_of_the_arrays(num_devices, admit):
    sizes = {f"{n}": te.Dynamic(capacity=n, admit=admit) for n in CAPACITIES}
    plan = plan_of(sizes, devices=num_devices, dim=8)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    # Without clock, counts and keys, which take a few bytes.
    arrays = [x for x in jax.tree.leaves(tables) if x.ndim == 2 and x.shape[1] > 2]
    on_device = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    assert plan.table_bytes_per_device == on_device
