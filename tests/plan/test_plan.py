"""Making, comparing and printing plans."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tpu_embedding.config import MAX_VOCABULARY_SIZE
from tpu_embedding.tools import compile_report

SGD = optax.sgd(0.1)
TABLE = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
FEATURE = te.FeatureConfig(table=TABLE, name="watched")


def make_plan(**options):
    arguments = dict(feature_config={"watched": FEATURE}, mesh=mesh_of(2))
    return te.make_plan(**arguments | options)


def test_defaults():
    plan = te.make_plan(FEATURE)
    assert plan.mesh.size == len(jax.devices())
    assert plan.sample_axes == ("shard",)
    assert plan.hardware.name == "cpu"
    (stack,) = plan.stacks
    assert stack.optimizer is None
    assert stack.capacity is None
    assert stack.slots == ()


def test_any_mesh_axes_share_tables_and_batch():
    devices = np.asarray(jax.devices()[:6]).reshape(2, 3)
    plan = make_plan(mesh=Mesh(devices, ("data", "model")))
    assert plan.num_shards == 6
    assert plan.sample_spec == PartitionSpec(("data", "model"))
    assert plan.batch_sharding.spec == plan.sample_spec
    assert plan.replicated.spec == PartitionSpec()
    assert plan.stacks[0].rows_per_shard == 2


@pytest.mark.parametrize("config", [{}, [], (), {"a": {}}, None], ids=repr)
def test_empty_config_is_refused(config):
    with pytest.raises(ValueError, match="at least one FeatureConfig") as error:
        make_plan(feature_config=config)
    assert repr(config) in str(error.value)


@pytest.mark.parametrize(
    ("leaf", "shown"),
    [(TABLE, "TableConfig"), ("watched", "'watched'"), (3, "3"), (dict, "dict")],
    ids=["table", "string", "number", "class"],
)
def test_leaf_that_is_no_feature_config_is_refused_by_place(leaf, shown):
    with pytest.raises(ValueError, match="nest of FeatureConfig") as error:
        make_plan(feature_config={"a": FEATURE, "b": [FEATURE, leaf]})
    assert "'b/1'" in str(error.value)
    assert shown in str(error.value)


@pytest.mark.parametrize("capacity", [0, -1, 2.0, "8", True], ids=repr)
def test_wrong_capacity_is_refused(capacity):
    with pytest.raises(ValueError, match="capacity must be an int") as error:
        make_plan(capacity=capacity)
    assert repr(capacity) in str(error.value)


def features_of_dims(*dims, num_rows=1000):
    return [
        te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=num_rows, dim=dim, name=f"dim{dim}")
        )
        for dim in dims
    ]


@pytest.mark.parametrize("kernels", ["Interpreter", 1, True], ids=repr)
def test_wrong_kernels_are_refused(kernels):
    with pytest.raises(ValueError, match="kernels must be one of") as error:
        make_plan(kernels=kernels)
    assert repr(kernels) in str(error.value)


@needs_kernels
def test_kernels_of_sparse_cores_need_sparse_cores():
    for hardware in (None, te.hardware.hardware_by_name("v5p")):
        with pytest.raises(ValueError, match="without SparseCores, got 'sparse_core'"):
            make_plan(kernels="sparse_core", hardware=hardware)


@needs_kernels
def test_kernels_reach_rows_that_fill_lines():
    plan = te.make_plan(
        features_of_dims(4, 8, 24, 64, 100, 128, 384),
        mesh_of(3),
        optimizer=te.optimizers.rowwise_adagrad(0.1),
        hardware=te.hardware.hardware_by_name("v6e"),
        kernels="interpreter",
    )
    reached = {stack.dim for stack in plan.stacks if stack.kernels is not None}
    assert reached == {8, 64, 128, 384}
    # 334 rows per shard, and one for ids that stand for none; 2 in a line of 64, and
    # wide lines fill tiles of 8.
    shapes = {stack.dim: stack.layout.lines_shape for stack in plan.stacks}
    assert [shapes[dim] for dim in (64, 128, 384)] == [
        (168, 128),
        (335, 128),
        (336, 384),
    ]
    slots = [plan.slot_layout(stack, stack.slots[0]) for stack in plan.stacks]
    assert {slot.lines_shape for slot in slots} == {(334,)}


@needs_kernels
def test_interpreted_kernels_need_rows_that_share_lines():
    with pytest.raises(ValueError, match="for 'cpu': give hardware= of a TPU"):
        make_plan(kernels="interpreter")


@pytest.mark.parametrize("kernels", ["interpreter", "sparse_core"])
def test_kernels_need_a_later_jax(kernels, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert make_plan().stacks[0].kernels is None
    with pytest.raises(ValueError, match="kernels need jax 0.12"):
        make_plan(kernels=kernels)


@pytest.mark.parametrize("kernels", [None, "xla"])
@pytest.mark.parametrize(
    "hardware", [None, te.hardware.hardware_by_name("v5p")], ids=str
)
def test_xla_is_the_default(hardware, kernels):
    plan = te.make_plan(
        features_of_dims(8), mesh_of(2), hardware=hardware, kernels=kernels
    )
    assert plan.stacks[0].kernels is None
    assert {choice.backend for choice in plan.stacks[0].backends} == {"xla"}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2", "v5e:2x2"])
def test_kernels_of_tpus(topology):
    mesh = compile_report.topology_mesh(topology)
    plan = te.make_plan(features_of_dims(8), mesh)
    assert plan.stacks[0].kernels is None
    if topology == "v5e:2x2" or jax.__version_info__ < (0, 12):
        with pytest.raises(ValueError, match="got 'sparse_core'"):
            te.make_plan(features_of_dims(8), mesh, kernels="sparse_core")
        return
    plan = te.make_plan(features_of_dims(8), mesh, kernels="sparse_core")
    assert plan.stacks[0].kernels.backend == "sparse_core"
    large = features_of_dims(64, num_rows=4 * 2**26)
    plan = te.make_plan(large, mesh, kernels="sparse_core")
    assert plan.stacks[0].kernels is None
    assert "16 GiB" in plan.stacks[0].backends.read.reason


@pytest.mark.parametrize("exchange", ["Ragged", 1, True], ids=repr)
def test_wrong_exchange_is_refused(exchange):
    with pytest.raises(ValueError, match="exchange must be one of") as error:
        make_plan(exchange=exchange)
    assert repr(exchange) in str(error.value)


@pytest.mark.tpu_compiler
def test_exchange_across_slices_is_padded():
    mesh = compile_report.topology_mesh("v5p:2x2x1", num_slices=2)
    assert make_plan(mesh=mesh).stacks[0].exchange == "padded"
    with pytest.raises(ValueError, match="'ragged' on 2"):
        make_plan(mesh=mesh, exchange="ragged")


@pytest.mark.parametrize("owner", ["layer", "table"])
def test_optimizer_that_is_none_of_optax_is_refused(owner):
    with pytest.raises(ValueError, match="optimizer"):
        if owner == "layer":
            make_plan(optimizer=0.1)
        else:
            table = dataclasses.replace(TABLE, optimizer=0.1)
            make_plan(feature_config=te.FeatureConfig(table=table))


@pytest.mark.parametrize(
    ("num_devices", "vocabulary_size", "fits"),
    [
        (1, MAX_VOCABULARY_SIZE, True),
        (2, MAX_VOCABULARY_SIZE, True),
        (3, MAX_VOCABULARY_SIZE, True),  # divides
        (8, MAX_VOCABULARY_SIZE, False),
        (8, 2**31 - 8, True),
        (8, 2**31 - 7, False),
    ],
)
def test_vocabulary_near_the_largest_row_id(num_devices, vocabulary_size, fits):
    table = te.TableConfig(vocabulary_size=vocabulary_size, dim=1, name="huge")
    config = te.FeatureConfig(table=table)
    mesh = mesh_of(num_devices)
    if not fits:
        with pytest.raises(ValueError, match="vocabulary_size of table 'huge'"):
            te.make_plan(config, mesh)
        return
    (stack,) = te.make_plan(config, mesh).stacks
    # Keys count up to rows_per_shard * num_shards, and must stay below padding.
    assert stack.rows_per_shard * num_devices < te.inputs.PADDING_ROW_ID
    assert stack.rows_per_shard * num_devices >= vocabulary_size


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
@pytest.mark.parametrize("vocabulary_size", [1, 2, 7, 8, 9, 1000])
def test_rows_are_dealt_evenly(vocabulary_size, num_devices):
    table = te.TableConfig(vocabulary_size=vocabulary_size, dim=2)
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(num_devices))
    (stack,) = plan.stacks
    spare = stack.rows_per_shard * num_devices - stack.num_rows
    assert 0 <= spare < num_devices


def test_equal_plans_are_equal_and_hash_alike():
    table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
    feature = te.FeatureConfig(table=table, name="watched")
    plan, same = make_plan(), make_plan(feature_config={"watched": feature})
    assert plan == same
    assert hash(plan) == hash(same)
    assert plan is not same


BIGGER = dataclasses.replace(TABLE, vocabulary_size=11)
CHANGES = {
    "optimizer": lambda: dict(optimizer=SGD),
    "capacity": lambda: dict(capacity=3),
    "hardware": lambda: dict(hardware=te.hardware.hardware_by_name("v5p")),
    "fewer_devices": lambda: dict(mesh=mesh_of(1)),
    "axis_name": lambda: dict(mesh=Mesh(np.asarray(jax.devices()[:2]), ("x",))),
    "other_devices": lambda: dict(
        mesh=Mesh(np.asarray(jax.devices()[2:4]), ("shard",))
    ),
    "nest": lambda: dict(feature_config=[FEATURE]),
    "key": lambda: dict(feature_config={"seen": FEATURE}),
    "table": lambda: dict(
        feature_config={"watched": dataclasses.replace(FEATURE, table=BIGGER)}
    ),
    "feature": lambda: dict(
        feature_config={"watched": dataclasses.replace(FEATURE, max_sequence_length=2)}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_makes_another_plan(change):
    assert make_plan() != make_plan(**change())


def test_equal_plans_share_a_compiled_program():
    traces = []

    def trace(plan, x):
        traces.append(plan)
        return x

    jitted = jax.jit(trace, static_argnums=0)
    for plan in (make_plan(), make_plan(), make_plan(capacity=3)):
        jitted(plan, 1.0)
    assert len(traces) == 2


def test_frozen():
    plan = make_plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.mesh = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.stacks[0].capacity = 3


NESTS = {
    "leaf": (FEATURE, 1),
    "dict": ({"b": FEATURE, "a": dataclasses.replace(FEATURE, name="a")}, 2),
    "tuple": ((FEATURE, [dataclasses.replace(FEATURE, name="a")]), 2),
}


@pytest.mark.parametrize(("config", "num_features"), NESTS.values(), ids=NESTS)
def test_flatten_takes_the_same_nest(config, num_features):
    plan = te.make_plan(config, mesh_of(1))
    assert len(plan.features) == num_features
    leaves = [np.arange(i) for i in range(num_features)]
    nest = jax.tree.unflatten(plan.feature_tree, leaves)
    assert [len(leaf) for leaf in plan.flatten(nest)] == list(range(num_features))


@pytest.mark.parametrize(
    "nest",
    [{"seen": 1}, {"watched": 1, "seen": 1}, {}, [1], 1, None],
    ids=repr,
)
def test_flatten_refuses_another_nest_and_shows_both(nest):
    plan = make_plan()
    with pytest.raises(ValueError, match="structure of feature_config") as error:
        plan.flatten(nest, "cotangents")
    message = str(error.value)
    assert message.startswith("cotangents must")
    assert f"feature_config: {plan.feature_tree}" in message
    assert f"cotangents: {jax.tree.structure(nest)}" in message


def test_features_of_a_stack():
    other = te.TableConfig(vocabulary_size=3, dim=5, name="other")
    config = [te.FeatureConfig(table=t) for t in (TABLE, other, TABLE)]
    plan = te.make_plan(config, mesh_of(1))
    assert [plan.features_of(stack) for stack in plan.stacks] == [(0, 2), (1,)]


def test_printed_plan():
    tables = [
        te.TableConfig(vocabulary_size=1_000_000, dim=16, name="user"),
        te.TableConfig(vocabulary_size=1_500, dim=16, name="movie"),
        te.TableConfig(vocabulary_size=30, dim=200, name="genre"),
    ]
    plan = te.make_plan(
        [te.FeatureConfig(table=t) for t in tables],
        mesh_of(8),
        optimizer=te.optimizers.adagrad(0.1),
        hardware=te.hardware.hardware_by_name("v5p"),
    )
    memory, placements, backends = str(plan).split("\n\n")
    *lines, summary = memory.splitlines()
    cells = [re.split(r"\s{2,}", line) for line in placements.splitlines()]
    assert cells == [
        ["stack", "rows over", "copies", "why", "how copies add gradients"],
        ["stack_0", "shard", "1", "the default", "-"],
        ["stack_1", "shard", "1", "the default", "-"],
    ]
    cells = [re.split(r"\s{2,}", line) for line in backends.splitlines()]
    reason = "the default; make_plan(kernels=...) chooses kernels"
    assert cells == [
        ["stack", "direction", "backend", "why"],
        ["stack_0", "read, pool, spread, update, write", "xla", reason],
        ["stack_1", "read, pool, spread, update, write", "xla", reason],
    ]
    cells = [re.split(r"\s{2,}", line) for line in lines]
    assert cells[0][:6] == ["stack", "table", "rows", "dim", "dtype", "first row"]
    assert cells[0][6:] == ["rows/shard", "packing", "bytes/device"]
    # 1,001,500 rows on 8 shards, 8 in a line, lines of 512 bytes, of which 8 make a
    # tile: 15,656 lines of 512 bytes.
    assert cells[1:] == [
        ["stack_0", "genre", "30", "200", "float32", "0"],
        ["stack_0", "(whole stack)", "30", "200", "float32", "4"]
        + ["1 x 200 of 256", "8.00 KiB + 8.00 KiB slots"],
        ["stack_1", "movie", "1,500", "16", "float32", "0"],
        ["stack_1", "user", "1,000,000", "16", "float32", "1,500"],
        ["stack_1", "(whole stack)", "1,001,500", "16", "float32", "125,188"]
        + ["8 x 16 of 128", "7.64 MiB + 7.64 MiB slots"],
    ]
    assert all(len(line) < 120 for line in lines)
    assert summary == (
        "8 devices, v5p; per device: tables 7.65 MiB, slots 7.65 MiB, "
        "0.0 % of 95 GiB HBM"
    )


def test_printed_plan_off_tpu_knows_no_memory_size():
    lines = str(make_plan()).splitlines()
    summary = lines[lines.index("") - 1]
    assert summary == "2 devices, cpu; per device: tables 80 B, slots 0 B"
