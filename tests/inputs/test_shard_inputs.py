"""From ids in any form to the input of the stages, shard by shard."""

import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.inputs import shard_inputs
from tpu_embedding.inputs.shard_inputs import (
    FeatureShape,
    feature_shape,
    fill_up,
    to_feature_input,
)

P = te.inputs.PADDING_ROW_ID
TABLE = te.TableConfig(vocabulary_size=10, dim=4, combiner="sum", name="table")


def plan_for(num_devices=1, num_features=1, **options):
    config = {
        f"f{i}": te.FeatureConfig(table=TABLE, name=f"f{i}", **options)
        for i in range(num_features)
    }
    return te.make_plan(config, mesh_of(num_devices))


def shape_of(ids, plan):
    return feature_shape(ids, plan.features[0], plan)


def sharded(values, row_splits, batch_size, weights=None):
    return te.inputs.ShardedRaggedIds(
        values=np.array(values, np.int32),
        row_splits=np.array(row_splits, np.int32),
        weights=weights,
        batch_size=batch_size,
    )


RAGGED = sharded([[1, 2, P], [3, P, P]], [[0, 1, 2], [0, 1, 1]], 3)


@pytest.mark.parametrize(
    ("ids", "num_devices", "options", "expected"),
    [
        (np.zeros(7, int), 2, {}, (7, 4, 0, (7, 4))),
        (np.zeros((1, 3), int), 8, {}, (1, 1, 0, (1, 4))),
        (np.zeros((7, 0), int), 2, {}, (7, 4, 0, (7, 4))),
        (np.zeros((7, 3), int), 2, dict(max_sequence_length=5), (7, 4, 5, (7, 5, 4))),
        (np.zeros((6, 2), int), 2, dict(output_shape=(2, 3)), (6, 3, 0, (2, 3, 4))),
        (np.zeros((6, 2), int), 2, dict(output_shape=(12,)), (6, 3, 2, (12, 4))),
        (np.zeros((6, 2), int), 2, dict(output_shape=(6, 5)), (6, 3, 5, (6, 5, 4))),
        (np.zeros((2, 3, 5), int), 2, dict(output_shape=(6,)), (6, 3, 0, (6, 4))),
        (np.zeros((2, 3, 5), int), 2, dict(output_shape=(30,)), (6, 3, 5, (30, 4))),
        (RAGGED, 2, {}, (3, 2, 0, (3, 4))),
        (RAGGED, 2, dict(max_sequence_length=5), (3, 2, 5, (3, 5, 4))),
        (RAGGED, 2, dict(output_shape=(3, 2)), (3, 2, 2, (3, 2, 4))),
    ],
)
def test_sizes_of_a_feature(ids, num_devices, options, expected):
    shape = shape_of(ids, plan_for(num_devices, **options))
    batch_size, samples_per_shard, sequence_length, output_shape = expected
    assert shape == FeatureShape(
        batch_size=batch_size,
        samples_per_shard=samples_per_shard,
        sequence_length=sequence_length,
        output_shape=output_shape,
    )


LOW, HIGH = -1, P - 1  # Ids out of range stay at their end.
INTEGERS = {
    "int8": (np.array([0, 5, -1, -128], np.int8), [0, 5, -1, -128]),
    "uint8": (np.array([0, 255], np.uint8), [0, 255]),
    "int32": (np.array([0, LOW, P, HIGH], np.int32), [0, LOW, P, HIGH]),
    "int64": (
        np.array([1, HIGH, P, 2**31, 2**32 + 3, 2**62, -1, 3 - 2**32, -(2**63)]),
        [1, HIGH, P, HIGH, HIGH, HIGH, LOW, LOW, LOW],
    ),
    "uint64": (
        np.array([0, HIGH, P, 2**31, 2**32 + 3, 2**64 - 1], np.uint64),
        [0, HIGH, P, HIGH, HIGH, HIGH],
    ),
    "jax-int16": (jnp.array([-1, 7], jnp.int16), [-1, 7]),
    "jax-uint32": (
        jnp.array([0, HIGH, P, 2**31, 2**32 - 1], jnp.uint32), [0, HIGH, P, HIGH, HIGH]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), INTEGERS.values(), ids=INTEGERS)
def test_integers_of_any_type(values, expected):
    converted = shard_inputs._to_int32(values)
    assert converted.dtype == jnp.int32
    assert converted.tolist() == expected


def test_batches_without_a_place_for_ids_get_one():
    plan = plan_for(2)
    empty = np.zeros((3, 0), int)
    for given in (empty, te.DenseIds(ids=empty, weights=np.zeros((3, 0)))):
        filled = fill_up(given, shape_of(given, plan), 2)
        assert filled.ids.tolist() == [[P]] * 4
        assert filled.weights is None
    none = sharded(np.zeros((2, 0)), np.zeros((2, 3)), 3, np.zeros((2, 0)))
    filled = fill_up(none, shape_of(none, plan), 2)
    assert filled.values.tolist() == [[P], [P]]
    assert filled.weights is None


def test_a_batch_is_filled_up_once():
    plan = plan_for(2)
    ids = te.DenseIds(ids=np.array([[1, 2], [3, 4], [5, 6]]), weights=np.ones((3, 2)))
    shape = shape_of(ids, plan)
    filled = fill_up(ids, shape, 2)
    assert filled.ids.tolist() == [[1, 2], [3, 4], [5, 6], [P, P]]
    again = fill_up(filled, shape, 2)
    np.testing.assert_array_equal(again.ids, filled.ids)
    np.testing.assert_array_equal(again.weights, filled.weights)


def stage_input(ids, row_splits=None, weights=None, samples=2, length=0, **options):
    ids = jnp.array(ids, jnp.int32)
    weights = None if weights is None else jnp.array(weights, jnp.float32)
    filled = te.DenseIds(ids=ids, weights=weights)
    if row_splits is not None:
        filled = te.inputs.ShardedRaggedIds(
            values=ids,
            row_splits=jnp.array([row_splits], jnp.int32),
            weights=weights,
            batch_size=samples,
        )
    shape = FeatureShape(
        batch_size=samples,
        samples_per_shard=samples,
        sequence_length=length,
        output_shape=(),
        **options,
    )
    return to_feature_input(filled, shape)


def as_lists(given):
    return [
        None if x is None else x.tolist()
        for x in (given.ids, given.weights, given.sample_ids)
    ]


@pytest.mark.parametrize(
    ("length", "dense", "ragged"),
    [
        (1, [1, 4], [7, P, 9]),
        (2, [1, 2, 4, 5], [7, 8, P, P, 9, P]),
        (3, [1, 2, P, 4, 5, P], [7, 8, P, P, P, P, 9, P, P]),
    ],
)
def test_sequences_are_cut_or_filled(length, dense, ragged):
    given = stage_input([[1, 2], [4, 5]], length=length)
    assert as_lists(given) == [dense, None, None]
    assert (given.num_samples, given.valence) == (2 * length, 1)
    given = stage_input([[7, 8, 9, 6]], [0, 2, 2, 3], samples=3, length=length)
    assert as_lists(given) == [ragged, None, None]
    assert (given.num_samples, given.valence) == (3 * length, 1)


def test_a_default_id_gets_a_place_in_each_ragged_sample():
    given = stage_input([[7, 8, 9, 6]], [0, 2, 2, 3], [[1, 2, 3, 4]], 3, default_id=5)
    ids, weights, sample_ids = as_lists(given)
    assert ids == [7, 8, P, P, 9, P, P]
    assert sample_ids == [0, 0, 0, 1, 2, 2, 3]
    assert weights == [1, 2, 0, 0, 3, 0, 4]


def test_samples_of_values():
    for row_splits, expected in (([0, 1], [0, 1, 1]), ([0, 0, 0, 2], [2, 2, 3])):
        row_splits = jnp.array(row_splits, jnp.int32)
        assert shard_inputs.sample_ids_of(row_splits, 3).tolist() == expected
