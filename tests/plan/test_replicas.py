"""The way in which copies of a shard add their gradients up."""

import dataclasses

import pytest

import tpu_embedding as te
from tests.lookup.placements import mesh_of_shape
from tpu_embedding.optimizers.row_optimizer import InSequence, Touched
from tpu_embedding.plan.replicas import choose_reduction


def stack_of(placement, optimizer="sgd", vocabulary_size=100):
    table = te.TableConfig(vocabulary_size=vocabulary_size, dim=4, placement=placement)
    plan = te.make_plan(
        te.FeatureConfig(table=table), mesh_of_shape("4x2"), optimizer=optimizer
    )
    return plan.stacks[0]


@pytest.mark.parametrize(
    ("placement", "num_rows", "num_replicas"),
    [
        (te.Replicated(), 100, 8),
        (te.Sharded(axes=("data",)), 25, 2),
        (te.Sharded(axes=("model",)), 50, 4),
    ],
)
def test_the_way_that_sends_fewer_rows_is_taken(placement, num_rows, num_replicas):
    stack = stack_of(placement)
    assert (stack.rows_per_shard, stack.num_replicas) == (num_rows, num_replicas)
    for received in range(1, 2 * num_rows):
        gathered = (num_replicas - 1) * received
        reduced = 2 * (num_replicas - 1) * num_rows / num_replicas
        expected = "rows" if gathered < reduced else "table"
        assert choose_reduction(stack, received) == expected


def test_one_copy_has_nothing_to_add():
    assert choose_reduction(stack_of(te.Sharded()), 10**6) == "none"


@pytest.mark.parametrize("driver", [InSequence(), Touched(occurrence_norm=True)])
def test_occurrences_are_never_summed_on_the_way(driver):
    stack = stack_of(te.Replicated())
    optimizer = dataclasses.replace(stack.optimizer, driver=driver)
    stack = dataclasses.replace(stack, optimizer=optimizer)
    assert choose_reduction(stack, 10**6) == "rows"
