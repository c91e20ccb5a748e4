"""Names of tables and features, and which tables share an array."""

import jax
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tpu_embedding.optimizers.resolve import resolve_optimizer

SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
QUANTIZATION = te.QuantizationConfig(num_buckets=16, lower=-1.0, upper=1.0)


def table(name=None, vocabulary_size=10, dim=4, **options):
    return te.TableConfig(
        vocabulary_size=vocabulary_size, dim=dim, name=name, **options
    )


def plan_of(*tables, num_devices=1, **options):
    config = [te.FeatureConfig(table=t) for t in tables]
    return te.make_plan(config, mesh_of(num_devices), **options)


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
    plan = plan_of(*tables, num_devices=num_devices, hardware=info)
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
