"""The least traffic of lookup and update, recomputed by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.lookup.placements import mesh_of_shape
from tpu_embedding.tools import compile_report

DIM = 8
ROW = 4 * DIM


def plan_of(features, num_devices, optimizer=None):
    return te.make_plan(features, mesh_of(num_devices), optimizer=optimizer)


def table(vocabulary_size, name="table"):
    return te.TableConfig(
        vocabulary_size=vocabulary_size, dim=DIM, combiner="sum", name=name
    )


def ids(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def test_one_hot_by_hand():
    features = {"f": te.FeatureConfig(table=table(1000))}
    plan = plan_of(features, 4, te.optimizers.adagrad(0.1))
    floor = compile_report.embedding_floor(plan, {"f": ids(64)})
    n = 16  # ids per device
    assert floor.forward_hbm_bytes == 4 * n + ROW * n + ROW * n
    assert floor.backward_hbm_bytes == ROW * n + 2 * n * (ROW + ROW)
    assert floor.hbm_bytes == floor.forward_hbm_bytes + floor.backward_hbm_bytes
    assert floor.ici_bytes == 3 / 4 * n * (4 + 2 * ROW)
    assert floor.dcn_bytes == 0


def test_ids_of_a_dynamic_table_have_two_words():
    features = {"f": te.FeatureConfig(table=table(te.Dynamic(capacity=1000)))}
    plan = plan_of(features, 4, te.optimizers.adagrad(0.1))
    words = jax.ShapeDtypeStruct((64,), jnp.uint32)
    wide = {"f": te.functional.Ids64(high=words, low=words)}
    floor = compile_report.embedding_floor(plan, wide)
    n = 16  # ids per device
    assert floor.forward_hbm_bytes == 8 * n + ROW * n + ROW * n
    assert floor.backward_hbm_bytes == ROW * n + 2 * n * (ROW + ROW)


def test_rows_are_no_more_than_the_table_has():
    features = {"f": te.FeatureConfig(table=table(40))}
    plan = plan_of(features, 4, te.optimizers.sgd(0.1))
    floor = compile_report.embedding_floor(plan, {"f": ids(64, 3)})
    n, samples = 48, 16
    # 192 ids ask for 40 rows, of which each device owns 10 and needs all.
    assert floor.forward_hbm_bytes == 4 * n + ROW * 10 + ROW * samples
    assert floor.backward_hbm_bytes == ROW * samples + 2 * 10 * ROW
    assert floor.ici_bytes == 3 / 4 * 40 * (4 + 2 * ROW)


@pytest.mark.parametrize(
    ("placement", "shards", "copies"),
    [(te.Sharded(axes=("model",)), 2, 4), (te.Replicated(), 1, 8)],
)
def test_copies_of_rows_by_hand(placement, shards, copies):
    features = {"f": te.FeatureConfig(table=table(40))}
    plan = te.make_plan(
        features, mesh_of_shape("4x2"), optimizer="sgd", placement=placement
    )
    floor = compile_report.embedding_floor(plan, {"f": ids(64)})
    n = 8  # ids per device
    owned = min(shards * n, 40) / shards
    updated = 40 / shards  # all copies update what any device looked up
    assert floor.forward_hbm_bytes == 4 * n + ROW * owned + ROW * n
    assert floor.backward_hbm_bytes == ROW * n + 2 * updated * ROW
    exchanged = (shards - 1) / shards * n * (4 + 2 * ROW)
    added_up = (copies - 1) / copies * (owned + updated) * ROW
    assert floor.ici_bytes == exchanged + added_up
    assert floor.dcn_bytes == 0


def test_features_that_share_a_table_share_its_rows():
    shared = table(40)
    features = {name: te.FeatureConfig(table=shared) for name in "ab"}
    plan = plan_of(features, 1, te.optimizers.sgd(0.1))
    floor = compile_report.embedding_floor(plan, {"a": ids(32), "b": ids(32)})
    assert floor.forward_hbm_bytes == 4 * 64 + ROW * 40 + ROW * 64
    apart = {n: te.FeatureConfig(table=table(40, n)) for n in "ab"}
    plan = plan_of(apart, 1, te.optimizers.sgd(0.1))
    floor = compile_report.embedding_floor(plan, {"a": ids(32), "b": ids(32)})
    assert floor.forward_hbm_bytes == 4 * 64 + ROW * 64 + ROW * 64


def test_one_device_sends_nothing():
    features = {"f": te.FeatureConfig(table=table(1000))}
    floor = compile_report.embedding_floor(plan_of(features, 1), {"f": ids(64)})
    assert (floor.ici_bytes, floor.dcn_bytes) == (0, 0)


def test_tables_that_are_not_trained_are_read_only():
    features = {"f": te.FeatureConfig(table=table(1000))}
    floor = compile_report.embedding_floor(plan_of(features, 4), {"f": ids(64)})
    assert floor.backward_hbm_bytes == 0
    assert floor.ici_bytes == 3 / 4 * 16 * (4 + ROW)


@pytest.mark.parametrize(
    ("optimizer", "slot_bytes"),
    [
        (te.optimizers.sgd(0.1), 0),
        (te.optimizers.adagrad(0.1), ROW),
        (te.optimizers.rowwise_adagrad(0.1), 4),
        (te.optimizers.adam(0.1), 2 * ROW),
    ],
    ids=["sgd", "adagrad", "rowwise", "adam"],
)
def test_slots(optimizer, slot_bytes):
    features = {"f": te.FeatureConfig(table=table(1000))}
    floor = compile_report.embedding_floor(
        plan_of(features, 2, optimizer), {"f": ids(64)}
    )
    assert floor.backward_hbm_bytes == 32 * ROW + 2 * 32 * (ROW + slot_bytes)


def test_narrow_rows_cross_the_network_as_they_are_stored():
    """Slots, gradients and activations stay float32."""
    narrow = te.TableConfig(vocabulary_size=1000, dim=DIM, name="t", dtype="bfloat16")
    plan = plan_of({"f": te.FeatureConfig(table=narrow)}, 4, te.optimizers.adagrad(0.1))
    floor = compile_report.embedding_floor(plan, {"f": ids(64)})
    n, stored = 16, ROW / 2
    assert floor.forward_hbm_bytes == 4 * n + stored * n + ROW * n
    assert floor.backward_hbm_bytes == ROW * n + 2 * n * (stored + ROW)
    assert floor.ici_bytes == 3 / 4 * n * (4 + stored + ROW)


def test_tables_of_one_feature_read_its_ids_once():
    linear = te.TableConfig(vocabulary_size=1000, dim=1, combiner="sum", name="linear")
    both = {"f": te.FeatureConfig(table=(table(1000), linear))}
    floor = compile_report.embedding_floor(plan_of(both, 1), {"f": ids(64)})
    assert floor.forward_hbm_bytes == 64 * (4 + 2 * ROW + 2 * 4)


def test_only_features_of_the_batch_count():
    config = {"a": te.FeatureConfig(table=table(1000, "a"))}
    config["b"] = te.FeatureConfig(table=(table(1000, "b"), table(1000, "a")))
    optimizer = te.optimizers.every_row(te.optimizers.sgd(0.1))
    alone = plan_of({"a": config["a"]}, 4, te.optimizers.sgd(0.1))
    plan = plan_of(config, 4, te.optimizers.sgd(0.1))
    batch = {"a": ids(64)}
    assert compile_report.embedding_floor(
        plan, batch
    ) == compile_report.embedding_floor(alone, batch)
    wide = te.TableConfig(
        vocabulary_size=1000, dim=2 * DIM, name="wide", optimizer=optimizer
    )
    plan = plan_of(
        config | {"wide": te.FeatureConfig(table=wide)}, 4, te.optimizers.sgd(0.1)
    )
    # A rule for every row moves a table that the batch does not use, too.
    moved = 2 * 1000 / 4 * 2 * ROW
    floor = compile_report.embedding_floor(alone, batch)
    assert compile_report.embedding_floor(plan, batch) == dataclasses.replace(
        floor, backward_hbm_bytes=floor.backward_hbm_bytes + moved
    )


def test_activations_count_as_they_are_rounded():
    features = {"f": te.FeatureConfig(table=table(1000))}
    plan = te.make_plan(features, mesh_of(1), activation_dtype=jnp.bfloat16)
    floor = compile_report.embedding_floor(plan, {"f": ids(64)})
    assert floor.forward_hbm_bytes == 64 * (4 + ROW + ROW / 2)


def test_rules_of_every_row_move_all_rows():
    features = {"f": te.FeatureConfig(table=table(1000))}
    optimizer = te.optimizers.every_row(te.optimizers.sgd(0.1))
    floor = compile_report.embedding_floor(
        plan_of(features, 4, optimizer), {"f": ids(64)}
    )
    assert floor.backward_hbm_bytes == 16 * ROW + 2 * 250 * ROW


def test_weights_and_ragged_features_count_as_they_come():
    features = {
        "weighted": te.FeatureConfig(table=table(1000, "a")),
        "ragged": te.FeatureConfig(table=table(1000, "b"), expected_valence=2),
    }
    plan = plan_of(features, 2)
    batch = {
        "weighted": te.DenseIds(
            ids=np.zeros((8, 2), np.int32), weights=np.ones((8, 2), np.float32)
        ),
        "ragged": te.RaggedIds(
            values=[1, 2, 3], row_splits=[0, 1, 1, 3, 3, 3, 3, 3, 3]
        ),
    }
    floor = compile_report.embedding_floor(
        plan, te.inputs.prepare_features(batch, plan)
    )
    weighted = 8 * 4 + 8 * 4  # ids and weights of 4 samples
    ragged = 8 * 4 + 5 * 4  # room for 4 * 2 ids; splits of 4 samples
    rows, activations = (8 + 8) * ROW, (4 + 4) * ROW
    assert floor.forward_hbm_bytes == weighted + ragged + rows + activations


@pytest.mark.tpu_compiler
def test_slices_split_what_goes_over_the_links():
    features = {"f": te.FeatureConfig(table=table(10_000))}
    mesh = compile_report.topology_mesh("v5e:2x2", num_slices=2)
    plan = te.make_plan(features, mesh)
    floor = compile_report.embedding_floor(plan, {"f": ids(64)})
    assert floor.ici_bytes == 3 / 8 * 8 * (4 + ROW)
    assert floor.dcn_bytes == 4 / 8 * 8 * (4 + ROW)
