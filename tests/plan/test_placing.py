"""The mesh axes of each table, and the reasons that a plan prints."""

import numpy as np
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


def test_the_default_splits_rows_over_the_whole_mesh():
    plan = plan_of(table("a"))
    assert placed(plan) == {"a": (("data", "model"), "the default")}
    (stack,) = plan.stacks
    assert (stack.num_shards, stack.num_replicas) == (8, 1)
    assert stack.replica_axes == ()


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
        {"unique_rows": True, "max_sequence_length": 3},
        {"unique_rows": True, "max_sequence_length": 3, "expected_valence": 2.5},
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


def test_an_unknown_axis_of_a_table_is_refused_with_its_name():
    wrong = table("movie", placement=te.Sharded(axes=("rows",)))
    message = r"TableConfig.placement of table 'movie' must name axes .*\['rows'\]"
    with pytest.raises(ValueError, match=message):
        plan_of(table("a"), wrong)


def test_a_plan_prints_its_placements():
    plan = plan_of(
        table("a", 1000),
        table("b", 100, placement=te.Replicated()),
        table("c", 100, placement=te.Sharded(axes=("data",))),
        table("d", 100, dim=3, placement=te.Replicated(), optimizer="sgd"),
        table(
            "e",
            100,
            dim=5,
            placement=te.Replicated(),
            optimizer=te.optimizers.adagrad(0.1, use_gradient_accumulation=False),
        ),
    )
    rows = str(plan).split("\n\n")[1].splitlines()[1:]
    cells = [[cell for cell in row.split("  ") if cell] for row in rows]
    cells = [[cell.strip() for cell in row] for row in cells]
    by_table = "TableConfig.placement"
    assert cells == [
        ["stack_0", "data, model", "1", "the default", "-"],
        ["stack_1", "no axis", "8 over data, model", by_table, "not trained"],
        ["stack_2", "data", "2 over model", by_table, "not trained"],
        ["stack_3", "no axis", "8 over data, model", by_table]
        + ["all-gather of rows; all-reduce of the shard from 25 rows a round"],
        ["stack_4", "no axis", "8 over data, model", by_table]
        + ["all-gather of rows: the optimizer sees each occurrence of an id"],
    ]


def test_memory_counts_the_copies_of_a_device():
    sharded = plan_of(table("a", 800))
    replicated = plan_of(table("a", 800), placement=te.Replicated())
    assert replicated.table_bytes_per_device == 8 * sharded.table_bytes_per_device
    halved = plan_of(table("a", 800), placement=te.Sharded(axes=("model",)))
    assert halved.table_bytes_per_device == 4 * sharded.table_bytes_per_device
    assert np.prod(halved.stacks[0].layout.lines_shape) == 400 * 4
