"""Which table each row of a shard belongs to, against a loop over the tables."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.update.update_cases import plan_of, sharded
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.update.shard_rows import shard_rows

STACKS = {
    "one_device": ([5, 1, 6], 1),
    "exact": ([5, 1, 6], 3),
    "unused_row": ([4, 6, 1], 3),
    "unused_rows_of_two_shards": ([4, 3, 3], 3),
    "fewer_rows_than_devices": ([1, 1], 3),
    "one_table": ([7], 2),
    "one_table_one_device": ([7], 1),
}


def all_reduce(totals, reduction):
    del reduction
    return totals + 1


@pytest.mark.parametrize("name", STACKS)
def test_tables_of_rows(name):
    sizes, num_devices = STACKS[name]
    plan, stack = plan_of(sizes, 2, "sgd", num_devices=num_devices)
    rows_per_shard = -(-sum(sizes) // num_devices)
    assert stack.rows_per_shard == rows_per_shard
    # Every row in falling order, and ids beyond the last one.
    row_ids = np.int32(
        [*range(rows_per_shard, -1, -1), PADDING_ROW_ID, PADDING_ROW_ID - 1]
    )
    is_touched = row_ids % 2 == 0

    def facts(row_ids):
        known = shard_rows(row_ids, jnp.asarray(is_touched), all_reduce, stack)
        assert known.all_reduce is all_reduce
        assert known.occurrence_squares is None
        assert known.table_sizes.dtype == jnp.float32
        assert (known.tables is None) == (len(sizes) == 1)
        tables = known.tables
        if tables is None:
            tables = jnp.zeros(row_ids.shape, jnp.int32)
        assert tables.dtype == jnp.int32
        return known.table_sizes, tables, known.is_used, known.is_touched

    results = sharded(plan, facts)([row_ids] * num_devices)
    table_of_row = np.repeat(np.arange(len(sizes)), sizes)
    for shard, (table_sizes, tables, is_used, touched) in enumerate(results):
        np.testing.assert_array_equal(table_sizes, sizes)
        np.testing.assert_array_equal(touched, is_touched)
        of_stack = row_ids.astype(np.int64) * num_devices + shard
        expected = (row_ids < rows_per_shard) & (of_stack < sum(sizes))
        np.testing.assert_array_equal(is_used, expected)
        found = tables[is_used]
        np.testing.assert_array_equal(found, table_of_row[of_stack[is_used]])
        # A rule reads the values of its table even for places without a row.
        assert ((tables >= 0) & (tables < len(sizes))).all()


def test_totals_of_each_table():
    """Rows of several tables on each shard, one total per table."""
    sizes = [4, 6, 1]
    plan, stack = plan_of(sizes, 2, "sgd", num_devices=3)
    row_ids = np.int32([3, 0, 1, 2, PADDING_ROW_ID])

    def total(row_ids):
        shard = row_ids * 0
        known = shard_rows(row_ids, shard == 0, lambda x, _: x, stack)
        return known.total(jnp.float32(1) + row_ids % 4), known.minimum(
            (row_ids % 4).astype(jnp.float32)
        )

    results = sharded(plan, total)([row_ids] * 3)
    table_of_row = np.repeat(np.arange(3), sizes)
    totals, least = np.zeros(3), np.full(3, np.inf)
    for row in range(11):
        totals[table_of_row[row]] += 1 + row // 3 % 4
        least[table_of_row[row]] = min(least[table_of_row[row]], row // 3 % 4)
    np.testing.assert_array_equal(sum(total for total, _ in results), totals)
    np.testing.assert_array_equal(np.min([x for _, x in results], axis=0), least)
