"""Making, comparing and printing plans."""

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


@pytest.mark.parametrize(
    ("num_rows", "dtype", "warns"),
    [
        (2**25, "float32", False),
        (2**25 + 1, "float32", True),
        (2**26, "bfloat16", True),
    ],
)
def test_a_warning_of_arrays_above_the_limit_of_a_sparse_core(num_rows, dtype, warns):
    # 16 GiB of dim 128. The slots of a bfloat16 table are float32.
    table = te.TableConfig(vocabulary_size=num_rows, dim=128, name="t", dtype=dtype)
    v5p = te.hardware.hardware_by_name("v5p")
    plan = te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(1),
        optimizer=te.optimizers.adagrad(0.1),
        hardware=v5p,
    )
    assert ("warning: the largest array of stack_0 takes" in str(plan)) == warns
