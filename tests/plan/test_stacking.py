"""Names of tables and features, which tables share an array, and where it is stored."""

import jax
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.lookup.placements import mesh_of_shape
from tests.rejections import rejects
from tpu_embedding.optimizers.resolve import resolve_optimizer

SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
ONE_DEVICE, MESH = mesh_of(1), mesh_of_shape("4x2")
QUANTIZATION = te.QuantizationConfig(num_buckets=16, lower=-1.0, upper=1.0)


def table(name=None, vocabulary_size=10, dim=4, **options):
    return te.TableConfig(
        vocabulary_size=vocabulary_size, dim=dim, name=name, **options
    )


def plan_of(*tables, mesh=ONE_DEVICE, **options):
    return te.make_plan([te.FeatureConfig(table=t) for t in tables], mesh, **options)


def groups(plan):
    """Table names per stack."""
    return [[t.name for t in stack.tables] for stack in plan.stacks]


def test_equal_tables_share_a_stack_in_the_order_of_their_names():
    plan = plan_of(table("b", 7), table("a", 5), table("c", 3))
    assert groups(plan) == [["a", "b", "c"]]
    assert [t.row_offset for t in plan.stacks[0].tables] == [0, 5, 12]
    assert plan.stacks[0].num_rows == 15
    assert [f.row_offset for f in plan.features] == [5, 0, 12]


@pytest.mark.parametrize("hardware", ["cpu", "v5p", "v6e"])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_tables_of_a_stack_begin_at_different_owners(num_devices, hardware):
    """Id 0 is often the most frequent one, so its rows are apart."""
    info = te.hardware.hardware_by_name(hardware)
    tables = [table(f"t{i:02d}", vocabulary_size=2**10) for i in range(26)]
    plan = plan_of(*tables, mesh=mesh_of(num_devices), hardware=info)
    num_owners = num_devices * max(1, info.cores_per_device)
    offsets = [t.row_offset for t in plan.stacks[0].tables]
    counts = np.bincount(np.array(offsets) % num_owners, minlength=num_owners)
    assert counts.max() - counts.min() <= 1
    gaps = np.diff(offsets) - 2**10
    assert np.all((gaps >= 0) & (gaps < num_owners))


DIFFERENCES = {
    "dim": dict(dim=5),
    "quantization": dict(quantization_config=QUANTIZATION),
    "optimizer": dict(optimizer=ADAM),
    "rows_of_the_optimizer": dict(optimizer=te.optimizers.every_row(SGD)),
    "placement": dict(placement=te.Replicated()),
    "duplicates_of_the_optimizer": dict(optimizer=te.optimizers.in_sequence(SGD)),
}


@pytest.mark.parametrize("options", DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_keeps_tables_apart(options):
    plan = plan_of(table("a"), table("b", **options), table("c"), optimizer=SGD)
    assert groups(plan) == [["a", "c"], ["b"]]
    assert [f.stack_index for f in plan.features] == [0, 1, 0]


def test_what_does_not():
    for options in (dict(vocabulary_size=9), dict(combiner="sum"), dict(optimizer=SGD)):
        plan = plan_of(table("a"), table("b", **options), optimizer=SGD)
        assert groups(plan) == [["a", "b"]]


def test_optimizer_of_the_table_wins():
    plan = plan_of(table("a"), table("b", optimizer=ADAM), optimizer=SGD)
    sgd, adam = (resolve_optimizer(rule, "a", 4) for rule in (SGD, ADAM))
    assert [stack.optimizer for stack in plan.stacks] == [sgd, adam]
    plan = plan_of(table("a"), table("b", optimizer=ADAM))
    not_trained, trained = plan.stacks
    assert not not_trained.is_trained
    assert trained.optimizer == adam


def test_tables_without_a_name_are_shared_by_object_only():
    shared = table()
    plan = plan_of(table(), shared, shared, table())
    assert groups(plan) == [["table_0", "table_1", "table_2"]]
    assert [f.row_offset for f in plan.features] == [0, 10, 10, 20]


@pytest.mark.parametrize(
    "options",
    [
        dict(vocabulary_size=11),
        dict(combiner="sum"),
        dict(optimizer=ADAM),
        dict(initializer=jax.nn.initializers.zeros),
        dict(quantization_config=QUANTIZATION),
    ],
    ids=lambda options: next(iter(options)),
)
def test_two_tables_of_one_name(options):
    with rejects(field="TableConfig.name", value="a", fix=next(iter(options))):
        plan_of(table("a"), table("a", **options))


@pytest.mark.parametrize("named_first", [True, False])
def test_a_name_that_an_unnamed_table_would_get(named_first):
    tables = [table("table_0"), table()]
    with rejects(field="TableConfig.name", value="table_0"):
        plan_of(*(tables if named_first else reversed(tables)))


def test_names_of_features():
    t = table("t")
    config = {
        "user": [te.FeatureConfig(table=t), te.FeatureConfig(table=t, name="own")],
        "item": {"id": te.FeatureConfig(table=t)},
    }
    names = [f.name for f in te.make_plan(config, mesh_of(1)).features]
    assert names == ["item/id", "user/0", "own"]
    alone = te.make_plan(te.FeatureConfig(table=t), mesh_of(1))
    assert [f.name for f in alone.features] == ["feature"]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("x", lambda f: {"a": f(name="x"), "b": f(name="x")}),
        ("a", lambda f: {"a": f(), "b": f(name="a")}),
        ("a/b", lambda f: {"a": {"b": f()}, "c": f(name="a/b")}),
    ],
)
def test_two_features_of_one_name(name, config):
    t = table("t")
    with rejects(field="FeatureConfig.name", value=name):
        te.make_plan(config(lambda **o: te.FeatureConfig(table=t, **o)), mesh_of(1))


def test_a_stack_never_has_more_rows_than_int32_counts():
    # Four would have 2**31 rows.
    plan = plan_of(*(table(f"t{i}", 2**29) for i in range(9)))
    assert [len(stack.tables) for stack in plan.stacks] == [3, 3, 3]
    assert sum(groups(plan), []) == [f"t{i}" for i in range(9)]


@pytest.mark.parametrize(
    ("surplus", "num_stacks"), [(0, 1), (1, 2)], ids=["just_fits", "one_too_many"]
)
def test_a_stack_leaves_room_for_the_rows_that_shards_add(surplus, num_stacks):
    unused = 8192  # at most, between the two tables
    rest = 2**31 - 1 - 2**20 - 1000 - unused + surplus
    assert len(plan_of(table("a", 1000), table("b", rest)).stacks) == num_stacks


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
    plan = plan_of(table("a"), mesh=MESH, placement=placement)
    reason = "make_plan(placement=...)"
    if is_own:  # The table's own placement comes first.
        own = table("a", placement=placement)
        plan = plan_of(own, mesh=MESH, placement=te.Replicated())
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
        mesh=MESH,
    )
    assert groups(plan) == [["a", "c", "f"], ["b", "d"], ["e"]]


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
        mesh=MESH,
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
        plan_of(table("a"), mesh=MESH, placement=WRONG[case])


# The form in which each kind of hardware pools rows and applies gradients.
FORMS = {
    # The devices, hardware, options; if ids are sent, and the forms.
    "one device": (1, None, {}, False, "by_feature", "blocks"),
    "eight devices": (8, None, {}, True, "fused", "whole"),
    "copies": (8, None, {"placement": te.Replicated()}, False, "by_feature", "whole"),
    "asked for rounds": (1, None, {"capacity": 4}, True, "by_feature", "whole"),
    "one GPU": (1, "gpu", {}, False, "fused", "whole"),
    "one chip": (1, "v5p", {}, False, "whole", "whole"),
    "eight chips": (8, "v6e", {}, True, "whole", "whole"),
}
WITHOUT_BLOCKS = {
    "every_row": te.optimizers.every_row(optax.adam(0.1)),
    "sequence": te.optimizers.in_sequence(optax.sgd(0.1)),
    "totals": te.optimizers.clippy_adagrad(0.1),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms(case):
    num_devices, name, options, sends_ids, gathers, updates = FORMS[case]
    hardware = None if name is None else te.hardware.hardware_by_name(name)
    options = dict(mesh=mesh_of(num_devices), hardware=hardware) | options
    (stack,) = plan_of(table("t"), optimizer=SGD, **options).stacks
    assert stack.sends_ids == sends_ids
    assert (stack.gathers, stack.updates) == (gathers, updates)


@pytest.mark.parametrize("name", WITHOUT_BLOCKS)
def test_rules_that_do_not_run_in_blocks(name):
    (stack,) = plan_of(table("t"), optimizer=WITHOUT_BLOCKS[name]).stacks
    assert stack.updates == "whole"
