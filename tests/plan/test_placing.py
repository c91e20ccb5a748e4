"""The mesh axes of each table, and the reasons that a plan prints."""

import optax
import pytest

import tpu_embedding as te
from tests.lookup.placements import mesh_of_shape

MESH = "4x2"


def table(name, vocabulary_size=10, dim=4, **options):
    return te.TableConfig(
        vocabulary_size=vocabulary_size, dim=dim, name=name, **options
    )


def plan_of(*tables, mesh=MESH, optimizer=None, feature_options=(), **options):
    config = [
        te.FeatureConfig(table=t, **(feature_options[i] if feature_options else {}))
        for i, t in enumerate(tables)
    ]
    return te.make_plan(config, mesh_of_shape(mesh), optimizer=optimizer, **options)


def placed(plan):
    """Returns the axes and the reason of each table."""
    return {
        table.name: (stack.shard_axes, table.placement_reason)
        for stack in plan.stacks
        for table in stack.tables
    }


def axes(plan):
    return {name: of_table for name, (of_table, _) in placed(plan).items()}


PLACEMENTS = {
    "whole": (te.Sharded(), ("data", "model"), (), 8),
    "data": (te.Sharded(axes=("data",)), ("data",), ("model",), 4),
    "model": (te.Sharded(axes=("model",)), ("model",), ("data",), 2),
    "both": (te.Sharded(axes=("model", "data")), ("data", "model"), (), 8),
    "replicated": (te.Replicated(), (), ("data", "model"), 1),
}


@pytest.mark.parametrize("where", ["plan", "table"])
@pytest.mark.parametrize(
    ("placement", "shard_axes", "replica_axes", "num_shards"),
    PLACEMENTS.values(),
    ids=PLACEMENTS,
)
def test_a_placement_chooses_the_axes(
    placement, shard_axes, replica_axes, num_shards, where
):
    if where == "plan":
        plan = plan_of(table("a"), placement=placement)
        reason = "make_plan(placement=...)"
    else:
        # The table's own placement comes first.
        plan = plan_of(table("a", placement=placement), placement=te.Replicated())
        reason = "TableConfig.placement"
    assert placed(plan) == {"a": (shard_axes, reason)}
    (stack,) = plan.stacks
    assert stack.replica_axes == replica_axes
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


def test_small_tables_are_replicated():
    plan = plan_of(
        table("edge", 100),
        table("over", 101),
        table("own", 5, placement=te.Sharded()),
        placement=te.ReplicateSmall(
            max_rows=100, otherwise=te.Sharded(axes=("model",))
        ),
    )
    assert placed(plan) == {
        "edge": ((), "ReplicateSmall: at most 100 rows"),
        "over": (("model",), "ReplicateSmall: more than 100 rows"),
        "own": (("data", "model"), "TableConfig.placement"),
    }
    assert axes(plan_of(table("a", 1), placement=te.ReplicateSmall(max_rows=0))) == {
        "a": ("data", "model")
    }


def test_automatic_placement_compares_rows_with_lookups():
    # 64 samples on 8 devices: 8 ids per device and feature.
    tables = [
        table("edge", 8),
        table("over", 9),
        table("sequence", 24),
        table("long", 25),
        table("bag", 20),
        table("twice", 16),
        table("twice", 16),
        table("shaped", 32),
        table("unique", 9),
        table("expected", 20),
    ]
    features = [
        {},
        {},
        {"max_sequence_length": 3},
        {"max_sequence_length": 3},
        {"expected_valence": 2.5},
        {"name": "first"},
        {"name": "second"},
        {"output_shape": (64, 4)},
        {"output_shape": (-1,)},
        {"output_shape": (-1,), "expected_valence": 2.5},
    ]
    plan = plan_of(
        *tables,
        feature_options=features,
        placement=te.AutoPlacement(batch_size=64),
    )
    replicated = {name for name, found in axes(plan).items() if not found}
    assert replicated == {*("edge", "sequence", "bag", "twice", "shaped", "expected")}
    reasons = {reason for _, reason in placed(plan).values()}
    assert reasons == {
        "AutoPlacement: at most as many rows as lookups per device",
        "AutoPlacement: more rows than a device looks up in a step",
    }


@pytest.mark.parametrize(
    ("optimizer", "row_bytes"),
    # Momenta, velocities; without an optimizer, the row alone.
    [(None, 16), (optax.adam(0.1), 48), (te.optimizers.rowwise_adagrad(0.1), 20)],
    ids=["none", "adam", "rowwise_adagrad"],
)
def test_automatic_placement_stays_within_its_memory(optimizer, row_bytes):
    def replicated(max_bytes):
        policy = te.AutoPlacement(batch_size=800, max_bytes=max_bytes)
        plan = plan_of(
            table("b", 10), table("a", 30), optimizer=optimizer, placement=policy
        )
        return {name for name, found in axes(plan).items() if not found}, plan

    assert replicated(40 * row_bytes)[0] == {"a", "b"}
    names, plan = replicated(40 * row_bytes - 1)
    assert names == {"b"}
    used_up = f"AutoPlacement: max_bytes={40 * row_bytes - 1:,} is used up"
    assert placed(plan)["a"] == (("data", "model"), used_up)
    assert replicated(10 * row_bytes - 1)[0] == set()


WRONG = {
    "a string": ("replicated", TypeError, "placement must be .*'replicated'"),
    "a class": (te.Replicated, TypeError, "placement must be"),
    "an unknown axis": (
        te.Sharded(axes=("data", "row")),
        ValueError,
        r"placement must name axes of the mesh, \['data', 'model'\], got \['row'\]",
    ),
    "an unknown axis of a policy": (
        te.ReplicateSmall(otherwise=te.Sharded(axes=("row",))),
        ValueError,
        r"placement must name axes of the mesh.*got \['row'\]",
    ),
}


@pytest.mark.parametrize(("placement", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_placements_are_refused(placement, kind, message):
    with pytest.raises(kind, match=message):
        plan_of(table("a"), placement=placement)
