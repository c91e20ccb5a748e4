"""The mesh axes of each table, and the reasons that a plan prints."""

import pytest

import tpu_embedding as te
from tests.lookup.placements import mesh_of_shape
from tests.rejections import rejects

MESH = "4x2"


def table(name, vocabulary_size=10, dim=4, **options):
    return te.TableConfig(
        vocabulary_size=vocabulary_size, dim=dim, name=name, **options
    )


def plan_of(*tables, **options):
    config = [te.FeatureConfig(table=t) for t in tables]
    return te.make_plan(config, mesh_of_shape(MESH), **options)


def placed(plan):
    """Returns the axes and the reason of each table."""
    return {
        table.name: (stack.shard_axes, table.placement_reason)
        for stack in plan.stacks
        for table in stack.tables
    }


PLACEMENTS = {
    "whole": (te.Sharded(), ("data", "model"), 8),
    "data": (te.Sharded(axes=("data",)), ("data",), 4),
    "both": (te.Sharded(axes=("model", "data")), ("data", "model"), 8),
    "replicated": (te.Replicated(), (), 1),
}


@pytest.mark.parametrize("is_own", [False, True], ids=["plan", "table"])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_a_placement_chooses_the_axes(case, is_own):
    placement, shard_axes, num_shards = PLACEMENTS[case]
    plan, reason = plan_of(table("a"), placement=placement), "make_plan(placement=...)"
    if is_own:  # The table's own placement comes first.
        plan = plan_of(table("a", placement=placement), placement=te.Replicated())
        reason = "TableConfig.placement"
    assert placed(plan) == {"a": (shard_axes, reason)}
    (stack,) = plan.stacks
    assert {*stack.replica_axes} == {"data", "model"} - {*shard_axes}
    assert stack.num_shards == num_shards
    assert stack.num_shards * stack.num_replicas == 8
    assert stack.rows_per_shard == -(-10 // num_shards)
    assert plan.num_shards == 8


def test_tables_of_one_placement_share_a_stack():
    plan = plan_of(
        table("a"),
        table("b", placement=te.Replicated()),
        table("c", placement=te.Sharded()),
        table("d", placement=te.Replicated()),
        table("e", placement=te.Sharded(axes=("model",))),
        table("f", placement=te.Sharded(axes=("data", "model"))),
    )
    names = [[table.name for table in stack.tables] for stack in plan.stacks]
    assert names == [["a", "c", "f"], ["b", "d"], ["e"]]


def test_a_function_places_each_table():
    def replicate_small(name, num_rows):
        if num_rows <= 100:
            return te.Replicated()
        return te.Sharded(axes=("model",)) if name == "over" else te.Sharded()

    plan = plan_of(
        table("edge", 100),
        table("over", 101),
        table("rest", 102),
        table("own", 5, placement=te.Sharded()),
        placement=replicate_small,
    )
    assert placed(plan) == {
        "edge": ((), "make_plan(placement=...)"),
        "over": (("model",), "make_plan(placement=...)"),
        "rest": (("data", "model"), "make_plan(placement=...)"),
        "own": (("data", "model"), "TableConfig.placement"),
    }


WRONG = {
    "a string": "replicated",
    "a class": te.Replicated,
    "an unknown axis": te.Sharded(axes=("data", "row")),
    "an unknown axis of a function": lambda name, num_rows: te.Sharded(axes=("row",)),
    "a function without a result": lambda name, num_rows: None,
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_placements_are_rejected(case):
    with rejects((TypeError, ValueError), fix="placement"):
        plan_of(table("a"), placement=WRONG[case])
