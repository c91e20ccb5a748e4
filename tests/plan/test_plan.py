"""Making, comparing and printing plans, their memory, and the samples of processes."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tpu_embedding.config import MAX_VOCABULARY_SIZE
from tpu_embedding.plan.features import process_shards

SGD = optax.sgd(0.1)
TABLE = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
FEATURE = te.FeatureConfig(table=TABLE, name="watched")


def make_plan(**options):
    arguments = dict(feature_config={"watched": FEATURE}, mesh=mesh_of(2))
    return te.make_plan(**arguments | options)


@pytest.mark.parametrize("config", [{}, [], {"a": {}}, None], ids=repr)
def test_an_empty_config_is_rejected(config):
    with rejects(field="feature_config", value=config):
        make_plan(feature_config=config)


@pytest.mark.parametrize("leaf", [TABLE, "watched", 3, dict], ids=str)
def test_a_leaf_that_is_not_a_feature_config_is_rejected_by_place(leaf):
    with rejects(field="feature_config", value=leaf, fix="'b/1'"):
        make_plan(feature_config={"a": FEATURE, "b": [FEATURE, leaf]})


def test_an_optimizer_that_is_not_of_optax_is_rejected():
    with rejects(field="optimizer", value=0.1):
        make_plan(optimizer=0.1)
    with rejects(field="TableConfig.optimizer", value=0.1):
        dataclasses.replace(TABLE, optimizer=0.1)


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
        with rejects(fix="'huge'"):
            te.make_plan(config, mesh)
        return
    (stack,) = te.make_plan(config, mesh).stacks
    # Keys count up to rows_per_shard * num_shards, and must stay below padding.
    assert stack.rows_per_shard * num_devices < te.inputs.PADDING_ROW_ID
    assert stack.rows_per_shard * num_devices >= vocabulary_size


BIGGER = dataclasses.replace(TABLE, vocabulary_size=11)
CHANGES = {
    "optimizer": lambda: dict(optimizer=SGD),
    "capacity": lambda: dict(capacity=3),
    "hardware": lambda: dict(hardware=te.hardware.hardware_by_name("v5p")),
    "other_devices": lambda: dict(
        mesh=Mesh(np.asarray(jax.devices()[2:4]), ("shard",))
    ),
    "key": lambda: dict(feature_config={"seen": FEATURE}),
    "table": lambda: dict(
        feature_config={"watched": dataclasses.replace(FEATURE, table=BIGGER)}
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


@pytest.mark.parametrize("nest", [{"watched": 1, "seen": 1}, [1], None], ids=repr)
def test_flatten_rejects_another_nest(nest):
    with rejects(field="cotangents", value=nest, fix="['watched']"):
        make_plan().flatten(nest, "cotangents")


CPU, V5P = te.hardware.hardware_by_name("cpu"), te.hardware.hardware_by_name("v5p")


def plan_of_table(vocabulary_size, dim, hardware, optimizer, dtype="float32"):
    table = te.TableConfig(
        vocabulary_size=vocabulary_size, dim=dim, dtype=dtype, name="t"
    )
    return make_plan(
        feature_config=te.FeatureConfig(table=table),
        hardware=hardware,
        optimizer=optimizer,
    )


OPTIMIZERS = {
    "sgd": (te.optimizers.sgd(0.1), 0),
    "rowwise_adagrad": (te.optimizers.rowwise_adagrad(0.1), 1 / 16),
    "adam": (te.optimizers.adam(0.1), 2),
}


@pytest.mark.parametrize("hardware", [CPU, V5P], ids=["cpu", "v5p"])
def test_slots_in_units_of_the_table(hardware):
    # 16,384 rows of 16 fill lines of 8 and of 128 rows exactly.
    for optimizer, per_table in OPTIMIZERS.values():
        plan = plan_of_table(16_384, 16, hardware, optimizer)
        assert plan.table_bytes_per_device == 8192 * 16 * 4
        assert plan.slot_bytes_per_device == per_table * plan.table_bytes_per_device


@pytest.mark.parametrize("hardware", [CPU, V5P], ids=["cpu", "v5p"])
@pytest.mark.parametrize("dim", [3, 16, 200])
def test_shapes_of_the_arrays_agree(dim, hardware):
    # Each shard has a multiple of 8 lines, so that nothing is added for tiles.
    plan = plan_of_table(42 * 8 * 16, dim, hardware, te.optimizers.adam(0.1))
    tables = jax.eval_shape(te.functional.init_tables, plan, jax.random.key(0))
    slots = jax.eval_shape(te.functional.init_slots, tables, plan)

    def bytes_of(tree):
        return sum(4 * x.size for x in jax.tree.leaves(tree) if x.ndim == 2)

    assert bytes_of(tables) == 2 * plan.table_bytes_per_device
    assert bytes_of(slots) == 2 * plan.slot_bytes_per_device


@pytest.mark.parametrize(
    ("num_rows", "dtype", "warns"),
    [
        (2**25, "float32", False),
        (2**25 + 8, "float32", True),
        (2**26, "bfloat16", True),
    ],
)
def test_a_warning_of_arrays_above_the_limit_of_a_sparse_core(num_rows, dtype, warns):
    # 16 GiB of dim 128 per device. The slots of a bfloat16 table are float32.
    adagrad = te.optimizers.adagrad(0.1)
    plan = plan_of_table(2 * num_rows, 128, V5P, adagrad, dtype)
    assert ("warning: the largest array of stack_0 takes" in str(plan)) == warns


PROCESSES = {
    "one_process": ((0, 0), {0: range(2)}),
    "two_processes": ((0, 0, 1, 1), {0: range(2), 1: range(2, 4)}),
    "not_consecutive": ((0, 1, 0, 1), None),
    "processes_in_another_order": ((1, 1, 0, 0), {1: range(2), 0: range(2, 4)}),
    "uneven_processes": ((0, 1, 1, 1), None),
    "three_devices": ((0, 0, 1), None),
}


@pytest.mark.parametrize(
    ("processes", "expected"), PROCESSES.values(), ids=PROCESSES.keys()
)
def test_shards_of_each_process(processes, expected):
    assert process_shards(processes) == expected


def test_one_process_loads_every_batch_whole(mesh):
    plan = make_plan(mesh=mesh)
    assert plan.num_process_parts == 1
    for batch_size in (mesh.size, 3 * mesh.size, 7):
        assert plan.process_samples(batch_size) == range(batch_size)
