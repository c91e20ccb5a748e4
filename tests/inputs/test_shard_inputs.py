"""From ids in any form to the input of the stages, shard by shard."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.lookup.stages import PADDING
from tpu_embedding.inputs import shard_inputs
from tpu_embedding.inputs.shard_inputs import (
    FeatureShape,
    ShardableInput,
    as_dense_ids,
    attach_weights,
    feature_shape,
    to_feature_input,
    to_shardable,
)

P = PADDING
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


def test_only_plain_arrays_are_wrapped():
    plain = np.arange(3)
    assert as_dense_ids(plain).ids is plain
    assert as_dense_ids(plain).weights is None
    for ids in (
        te.DenseIds(ids=plain),
        te.RaggedIds(values=plain, row_splits=np.array([0, 3])),
        te.SparseIds(indices=plain, values=plain, dense_shape=plain),
        sharded([[1]], [[0, 1]], 1),
    ):
        assert as_dense_ids(ids) is ids


def test_weights_are_attached_where_there_are_some():
    plan = plan_for(num_features=3)
    ids = [np.arange(2), te.DenseIds(ids=np.ones(2, int)), np.arange(3)]
    weights = [np.ones(2), np.zeros(2), None]
    features = dict(zip(("f0", "f1", "f2"), ids, strict=True))
    nest = dict(zip(("f0", "f1", "f2"), weights, strict=True))
    joined = attach_weights(features, nest, plan)
    assert (joined["f0"].ids is ids[0]) and (joined["f0"].weights is weights[0])
    assert (joined["f1"].ids is ids[1].ids) and (joined["f1"].weights is weights[1])
    assert joined["f2"] is ids[2]


@pytest.mark.parametrize(
    "ids",
    [
        te.RaggedIds(values=np.arange(2), row_splits=np.array([0, 2])),
        te.SparseIds(indices=np.zeros((1, 2)), values=[1], dense_shape=[1, 1]),
        sharded([[1]], [[0, 1]], 1),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_ragged_features_take_no_weights_later(ids):
    plan = plan_for()
    with pytest.raises(TypeError, match="ragged feature 'f0' must be given to prepare"):
        attach_weights({"f0": ids}, {"f0": np.ones(2)}, plan)
    assert attach_weights({"f0": ids}, {"f0": None}, plan)["f0"] is ids


RAGGED = sharded([[1, 2, P], [3, P, P]], [[0, 1, 2], [0, 1, 1]], 3)


@pytest.mark.parametrize(
    ("ids", "num_devices", "options", "expected"),
    [
        (np.zeros(6, int), 1, {}, (6, 6, 0, (6, 4))),
        (np.zeros(6, int), 2, {}, (6, 3, 0, (6, 4))),
        (np.zeros(7, int), 2, {}, (7, 4, 0, (7, 4))),
        (np.zeros((1, 3), int), 8, {}, (1, 1, 0, (1, 4))),
        (np.zeros((7, 3), int), 2, {}, (7, 4, 0, (7, 4))),
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


REFUSED = {
    "list": (te.DenseIds(ids=[1, 2]), {}, TypeError, "must be an array, got [1, 2]"),
    "float": (np.ones(2), {}, TypeError, "must be integers, got dtype float64"),
    "scalar": (np.array(1), {}, ValueError, "a batch axis"),
    "no sample": (np.zeros((0, 2), int), {}, ValueError, "got ids of shape (0, 2)"),
    "three axes": (np.zeros((2, 1, 1), int), {}, ValueError, "got (2, 1, 1); set"),
    "weights": (
        te.DenseIds(ids=np.zeros((2, 2), int), weights=np.ones(2)),
        {},
        ValueError,
        "its ids, (2, 2), got (2,)",
    ),
    "sequence of one axis": (
        np.zeros(3, int),
        dict(max_sequence_length=2),
        ValueError,
        "got shape (3,)",
    ),
    "no multiple": (
        np.zeros((4, 2), int),
        dict(output_shape=(6,)),
        ValueError,
        "the 4 samples of its ids, or a multiple of them, got (6,) for ids",
    ),
    "deep, but not each id": (
        np.zeros((2, 2, 3), int),
        dict(output_shape=(8,)),
        ValueError,
        "got (8,) for ids of shape (2, 2, 3)",
    ),
}


@pytest.mark.parametrize(
    ("ids", "options", "error", "shown"), REFUSED.values(), ids=REFUSED
)
def test_shapes_that_do_not_fit(ids, options, error, shown):
    with pytest.raises(error, match=re.escape(shown)) as raised:
        shape_of(ids, plan_for(**options))
    assert "'f0'" in str(raised.value)


def test_ragged_ids_of_other_shards():
    with pytest.raises(ValueError, match="prepared for 2 shards, but its layer has 3"):
        shape_of(RAGGED, plan_for(3))


def _first(valence, rows):
    del valence
    return rows[0]


def _of_at_most(max_valence):
    combiner = te.CustomCombiner(function=_first, max_valence=max_valence)
    return te.TableConfig(vocabulary_size=10, dim=4, combiner=combiner, name="table")


ANY_VALENCE = te.FeatureConfig(table=TABLE, name="f")
WITH_DEFAULT = te.FeatureConfig(table=TABLE, default_id=3, name="f")
AT_MOST_2 = te.FeatureConfig(table=_of_at_most(2), name="f")
AT_MOST_3 = te.FeatureConfig(table=_of_at_most(3), name="f")


@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.parametrize(
    ("prepared_for", "looked_up_as", "shown"),
    [
        (
            ANY_VALENCE,
            WITH_DEFAULT,
            "'f' has default_id=3, but .* without one, .* no p",
        ),
        (ANY_VALENCE, AT_MOST_2, "'f' .* max_valence=2 .* prepared for max_valence=N"),
        (AT_MOST_3, AT_MOST_2, "'f' .* max_valence=2 .* prepared for max_valence=3"),
        (WITH_DEFAULT, ANY_VALENCE, None),
        (AT_MOST_2, AT_MOST_3, None),
    ],
)
def test_ragged_ids_prepared_by_another_plan(prepared_for, looked_up_as, shown, form):
    """The empty sample would be zero, and ids beyond the maximum would be cut."""
    ids = te.RaggedIds(values=np.array([1, 2, 3]), row_splits=np.array([0, 0, 2, 3]))
    if form == "sparse":
        places = np.array([[1, 0], [1, 5], [2, 0]])
        ids = te.SparseIds(indices=places, values=ids.values, dense_shape=[3, 6])
    prepared = te.inputs.prepare_features(ids, te.make_plan(prepared_for, mesh_of(1)))
    plan = te.make_plan(looked_up_as, mesh_of(1))
    if shown is None:
        assert te.functional.activation_shapes(prepared, plan).shape == (3, 4)
        return
    with pytest.raises(ValueError, match=shown + ".*pass the raw ids through prepare"):
        te.functional.activation_shapes(prepared, plan)


@pytest.mark.parametrize(
    "values",
    [
        np.array([0, 5, -1, -128], np.int8),
        np.array([0, 255], np.uint8),
        np.array([0, 2**15 - 1, -(2**15)], np.int16),
        np.array([0, -1, P, P - 1, -(2**31)], np.int32),
        np.array([0, 1, P - 1, P], np.int64),
        np.array([0, P - 1, P], np.uint32),
        np.array([0, P - 1, P], np.uint64),
        jnp.array([0, -1, P, -(2**31)], jnp.int32),
        jnp.array([0, P - 1, P], jnp.uint32),
        jnp.array([-1, 7], jnp.int16),
    ],
    ids=lambda values: f"{type(values).__name__}-{values.dtype}",
)
def test_integers_that_an_int32_holds_stay(values):
    converted = shard_inputs._to_int32(values)
    assert converted.dtype == jnp.int32
    is_wide = np.dtype(values.dtype).itemsize >= 4 and values.dtype != np.int32
    expected = np.asarray(values).astype(np.int64)
    if is_wide:
        expected = np.where(expected < 0, -1, expected)
    np.testing.assert_array_equal(converted, expected)


@pytest.mark.parametrize(
    "values",
    [
        np.array([2**31, 2**32 + 3, 2**62, -1, -(2**32) + 3, -(2**63)]),
        np.array([2**31, 2**32 + 3, 2**64 - 1], np.uint64),
        np.array([2**31, 2**32 - 1], np.uint32),
        jnp.array([2**31, 2**32 - 1], jnp.uint32),
    ],
    ids=lambda values: f"{type(values).__name__}-{values.dtype}",
)
def test_other_integers_stay_too_large_or_too_small(values):
    converted = shard_inputs._to_int32(values)
    assert converted.dtype == jnp.int32
    expected = [P - 1 if value > 0 else -1 for value in np.asarray(values).tolist()]
    assert converted.tolist() == expected


def test_dense_batches_are_filled_up():
    plan = plan_for(3)
    ids = np.arange(10).reshape(5, 2)
    weights = np.arange(10.0).reshape(5, 2)
    given = te.DenseIds(ids=ids, weights=weights)
    shardable = to_shardable(given, shape_of(given, plan), plan)
    assert shardable.ids.dtype == jnp.int32
    assert shardable.ids.tolist() == [*ids.tolist(), [P, P]]
    assert shardable.weights.dtype == jnp.float32
    assert shardable.weights.tolist() == [*weights.tolist(), [0, 0]]
    assert shardable.row_splits is None


@pytest.mark.parametrize(("num_devices", "missing"), [(1, 0), (2, 1), (3, 1), (8, 3)])
def test_batches_of_one_id_per_sample(num_devices, missing):
    plan = plan_for(num_devices)
    ids = np.arange(5)
    shardable = to_shardable(ids, shape_of(ids, plan), plan)
    assert shardable.ids.tolist() == [[0], [1], [2], [3], [4]] + [[P]] * missing
    assert shardable.weights is None


def test_ids_of_several_axes_keep_their_order():
    plan = plan_for(2, output_shape=(2, 2))
    ids = np.arange(12).reshape(2, 2, 3) % 10
    given = te.DenseIds(ids=ids, weights=ids / 4)
    shardable = to_shardable(given, shape_of(given, plan), plan)
    np.testing.assert_array_equal(shardable.ids, ids.reshape(4, 3))
    np.testing.assert_array_equal(shardable.weights, ids.reshape(4, 3) / 4)


def test_batches_without_a_place_for_ids_get_one():
    plan = plan_for(2)
    empty = np.zeros((3, 0), int)
    for given in (empty, te.DenseIds(ids=empty, weights=np.zeros((3, 0)))):
        shardable = to_shardable(given, shape_of(given, plan), plan)
        assert shardable.ids.tolist() == [[P]] * 4
        assert shardable.weights is None
    none = sharded(np.zeros((2, 0)), np.zeros((2, 3)), 3, np.zeros((2, 0)))
    shardable = to_shardable(none, shape_of(none, plan), plan)
    assert shardable.ids.tolist() == [[P], [P]]
    assert shardable.weights is None


def test_ragged_batches_stay():
    plan = plan_for(2)
    given = sharded(RAGGED.values, RAGGED.row_splits, 3, np.full((2, 3), 0.5))
    shardable = to_shardable(given, shape_of(given, plan), plan)
    np.testing.assert_array_equal(shardable.ids, RAGGED.values)
    np.testing.assert_array_equal(shardable.row_splits, RAGGED.row_splits)
    np.testing.assert_array_equal(shardable.weights, np.full((2, 3), 0.5))
    assert shardable.weights.dtype == jnp.float32


def stage_input(ids, row_splits=None, weights=None, samples=2, length=0):
    shardable = ShardableInput(
        ids=jnp.array(ids, jnp.int32),
        weights=None if weights is None else jnp.array(weights, jnp.float32),
        row_splits=None if row_splits is None else jnp.array([row_splits], jnp.int32),
    )
    shape = FeatureShape(
        batch_size=0, samples_per_shard=samples, sequence_length=length, output_shape=()
    )
    return to_feature_input(shardable, shape)


def as_lists(given):
    return [
        None if x is None else x.tolist()
        for x in (given.ids, given.weights, given.sample_ids)
    ]


@pytest.mark.parametrize("weights", [None, [[1, 2, 3], [4, 5, 6]]])
def test_dense_ids_come_place_by_place(weights):
    given = stage_input([[1, 2, 3], [4, 5, P]], weights=weights)
    by_place = None if weights is None else [1, 4, 2, 5, 3, 6]
    assert as_lists(given) == [[1, 4, 2, 5, 3, P], by_place, None]
    assert (given.num_samples, given.valence) == (2, 3)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, [1, 4]), (2, [1, 2, 4, 5]), (3, [1, 2, P, 4, 5, P])],
)
def test_dense_sequences_are_cut_or_filled(length, expected):
    given = stage_input([[1, 2], [4, 5]], length=length)
    assert as_lists(given) == [expected, None, None]
    assert (given.num_samples, given.valence) == (2 * length, 1)


@pytest.mark.parametrize("weights", [None, [[1, 2, 3, 4, 5]]])
def test_ragged_ids_know_their_samples(weights):
    # What lies behind the last id is no id, whatever it holds.
    given = stage_input([[7, 8, 9, 6, 5]], [0, 2, 2, 3], weights, samples=3)
    expected = None if weights is None else weights[0]
    assert as_lists(given) == [[7, 8, 9, P, P], expected, [0, 0, 2, 3, 3]]
    assert (given.num_samples, given.valence) == (3, 1)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, [7, P, 9]), (2, [7, 8, P, P, 9, P]), (3, [7, 8, P, P, P, P, 9, P, P])],
)
def test_ragged_sequences_are_cut_or_filled(length, expected):
    given = stage_input([[7, 8, 9, 6]], [0, 2, 2, 3], samples=3, length=length)
    assert as_lists(given) == [expected, None, None]
    assert (given.num_samples, given.valence) == (3 * length, 1)


def test_ragged_sequences_longer_than_asked():
    given = stage_input([[0, 1, 2, 3, 4, 5, 6]], [0, 4, 7], length=2)
    assert as_lists(given) == [[0, 1, 4, 5], None, None]


@pytest.mark.parametrize(
    ("row_splits", "num_values", "expected"),
    [
        ([0, 3], 3, [0, 0, 0]),
        ([0, 1], 3, [0, 1, 1]),
        ([0, 0, 0, 2], 3, [2, 2, 3]),
        ([0, 2, 2, 2], 2, [0, 0]),
        ([0, 0], 2, [1, 1]),
    ],
)
def test_samples_of_values(row_splits, num_values, expected):
    result = shard_inputs.sample_ids_of(jnp.array(row_splits, jnp.int32), num_values)
    assert result.tolist() == expected


def test_stages_get_arrays_of_jax():
    leaves = jax.tree.leaves(stage_input([[1, 2]], weights=[[1, 2]], samples=1))
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
