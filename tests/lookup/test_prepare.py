"""What the host-side preparation refuses, accepts, and makes of a batch."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import tpu_embedding as te
from tests.conftest import mesh_of

PADDING = te.PADDING_ROW_ID
VOCABULARY_SIZE = 10
TABLE = te.TableConfig(
    vocabulary_size=VOCABULARY_SIZE, dim=4, combiner="sum", name="table"
)


@functools.cache
def plan_of(num_devices=2, **options):
    config = {"the_feature": te.FeatureConfig(table=TABLE, **options)}
    return te.make_plan(config, mesh_of(num_devices))


def prepare(ids, weights=None, num_devices=2, **options):
    """Prepares a batch of one feature, `the_feature`."""
    if weights is not None:
        weights = {"the_feature": weights}
    plan = plan_of(num_devices, **options)
    return te.prepare_features({"the_feature": ids}, plan, weights)["the_feature"]


def dense(ids, weights=None):
    return te.DenseIds(ids=np.asarray(ids), weights=weights)


def ragged(values, row_splits, weights=None):
    return te.RaggedIds(
        values=np.asarray(values), row_splits=np.asarray(row_splits), weights=weights
    )


def sparse(indices, values, dense_shape=(3, 4), weights=None):
    return te.SparseIds(
        indices=np.asarray(indices).reshape(-1, len(dense_shape)),
        values=np.asarray(values),
        dense_shape=np.asarray(dense_shape),
        weights=weights,
    )


SPARSE = sparse([[0, 0], [2, 1], [2, 3]], [1, 2, 3])
RAGGED = ragged([1, 2, 3], [0, 1, 1, 3])
INF, NAN = np.inf, np.nan


# What is refused. Each message names the feature, and shows what follows.

NO_INTEGERS = {
    "float": np.array([1.0, 2.0]),
    "whole_floats": np.array([1.0]),
    "bool": np.array([True]),
    "strings": np.array(["1"]),
    "list_of_floats": [1.5],
    "dense": dense([[1.5]]),
    "ragged": ragged([1.0], [0, 1]),
    "sparse": sparse([[0, 0]], [1.5]),
    "jax": jnp.ones(3),
}


@pytest.mark.parametrize("ids", NO_INTEGERS.values(), ids=NO_INTEGERS)
def test_ids_that_are_no_integers(ids):
    with pytest.raises(TypeError, match="'the_feature' must be integers, got dtype"):
        prepare(ids)


@pytest.mark.parametrize(
    "options", [dict(max_sequence_length=2), dict(output_shape=(12,))], ids=str
)
def test_sparse_sequences_of_floats(options):
    with pytest.raises(TypeError, match="'the_feature' must be integers"):
        prepare(sparse([[0, 0], [1, 0]], [1.5, 2.5]), **options)


OUT_OF_RANGE = {
    "too_large": (np.array([1, 10, 11]), "got 10 at position (1,), and 2 such"),
    "negative": (np.array([-1, 1]), "got -1 at position (0,), and 1 such"),
    "matrix": (np.array([[1, 2], [3, 99]]), "got 99 at position (1, 1), and 1 such"),
    "dense": (dense([[1], [-7]]), "got -7 at position (1, 0), and 1 such"),
    "ragged": (ragged([3, 9, 10], [0, 1, 3]), "got 10 at value (2,), and 1 such"),
    "sparse": (sparse([[0, 0], [1, 1]], [2, 12]), "got 12"),
    "2**32+3": (np.array([2**32 + 3]), f"got {2**32 + 3} at position (0,)"),
    "2**31": (np.array([0, 2**31]), f"got {2**31} at position (1,)"),
    "just_below_padding": (np.array([PADDING - 1]), f"got {PADDING - 1}"),
    "-2**32+3": (np.array([-(2**32) + 3]), f"got {-(2**32) + 3}"),
    "-2**63": (np.array([-(2**63)]), f"got {-(2**63)}"),
    "uint64": (np.array([2**63 + 3], np.uint64), f"got {2**63 + 3}"),
    "uint32": (np.array([2**32 - 1], np.uint32), f"got {2**32 - 1}"),
    "int8": (np.array([-1], np.int8), "got -1"),
}


@pytest.mark.parametrize(("ids", "shown"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_ids_outside_the_table(ids, shown):
    with pytest.raises(ValueError, match=re.escape(shown)) as error:
        prepare(ids)
    message = str(error.value)
    assert "'the_feature'" in message
    assert "[0, 10)" in message
    assert "out_of_range_ids" in message


def test_sparse_sequence_outside_the_table():
    with pytest.raises(ValueError, match="got 12 .*'drop' or 'clip'"):
        prepare(sparse([[0, 0], [1, 1]], [2, 12]), max_sequence_length=3)


ROW_SPLITS = {
    "ends_early": (ragged([1, 2, 3], [0, 1, 2]), "end with the number of values, 3"),
    "ends_late": (ragged([1, 2, 3], [0, 1, 4]), "got 0 and 4"),
    "starts_late": (ragged([1, 2, 3], [1, 2, 3]), "got 1 and 3"),
    "starts_below_0": (ragged([1, 2, 3], [-1, 2, 3]), "begin with 0"),
    "falls": (ragged([1, 2, 3], [0, 2, 1, 3]), "got 2 and then 1 at sample 1"),
    "beyond_and_back": (ragged([1, 2], [0, 5, 2]), "got 5 and then 2 at sample 1"),
    "no_sample": (ragged([], [0]), "at least one sample, got (1,)"),
    "nothing": (ragged([], []), "at least one sample, got (0,)"),
    "matrix": (ragged([1], [[0, 1]]), "got (1, 2)"),
}


@pytest.mark.parametrize(("ids", "shown"), ROW_SPLITS.values(), ids=ROW_SPLITS)
def test_wrong_row_splits(ids, shown):
    with pytest.raises(ValueError, match=re.escape(shown)) as error:
        prepare(ids)
    assert "row_splits of feature 'the_feature'" in str(error.value)


def test_row_splits_that_are_no_integers():
    with pytest.raises(TypeError, match="row_splits of feature 'the_feature'"):
        prepare(ragged([1], [0.0, 1.0]))


def test_values_of_a_ragged_feature_have_one_axis():
    with pytest.raises(ValueError, match="'the_feature' must have one axis"):
        prepare(ragged([[1], [2]], [0, 1, 2]))


WEIGHTS = {
    "nan": (dense([[1, 2]], np.array([[1, NAN]])), "finite, got nan at (0, 1)"),
    "inf": (dense([1, 2], np.array([INF, 1])), "finite, got inf at (0,)"),
    "minus_inf": (ragged([1], [0, 1], np.array([-INF])), "finite, got -inf at (0,)"),
    "sparse_nan": (dataclasses.replace(SPARSE, weights=np.array([1, 1, NAN])), "(2,)"),
    "too_large_for_float32": (dense([1], np.array([1e39])), "finite, got inf"),
    "nan_at_padding": (dense([PADDING], np.array([NAN])), "finite"),
    "fewer": (dense([1, 2], np.ones(1)), "(2,), got (1,)"),
    "more": (dense([1, 2], np.ones(3)), "(2,), got (3,)"),
    "other_rank": (dense([[1], [2]], np.ones(2)), "(2, 1), got (2,)"),
    "scalar": (dense([1, 2], np.ones(())), "(2,), got ()"),
    "ragged_fewer": (ragged([1, 2], [0, 2], np.ones(1)), "(2,), got (1,)"),
    "ragged_per_sample": (ragged([1, 2], [0, 1, 1, 2], np.ones(3)), "got (3,)"),
    "sparse_fewer": (dataclasses.replace(SPARSE, weights=np.ones(2)), "got (2,)"),
    "sparse_more": (dataclasses.replace(SPARSE, weights=np.ones(4)), "got (4,)"),
    "sparse_other_rank": (dataclasses.replace(SPARSE, weights=np.ones((3, 1))), "got"),
}


# A number that no float32 holds is no warning of NumPy's to the user, but our error.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("given", ["in_the_ids", "as_nest"])
@pytest.mark.parametrize(("ids", "shown"), WEIGHTS.values(), ids=WEIGHTS)
def test_wrong_weights(ids, shown, given):
    weights = None
    if given == "as_nest":
        ids, weights = dataclasses.replace(ids, weights=None), ids.weights
    with pytest.raises(ValueError, match=re.escape(shown)) as error:
        prepare(ids, weights)
    assert "Weights of feature 'the_feature'" in str(error.value)


def test_weights_of_a_sparse_sequence_have_no_effect_and_are_refused():
    ids = dataclasses.replace(SPARSE, weights=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="'the_feature' has weights and max_sequence"):
        prepared = prepare(ids, max_sequence_length=2)
        te.activation_shapes({"the_feature": prepared}, plan_of(max_sequence_length=2))


SPARSE_SHAPES = {
    "row_beyond": (sparse([[3, 0]], [1]), "got [3, 0] at value 0"),
    "column_beyond": (sparse([[0, 0], [0, 4]], [1, 2]), "got [0, 4] at value 1"),
    "negative": (sparse([[0, 0], [-1, 0]], [1, 2]), "got [-1, 0] at value 1"),
    "fewer_values": (sparse([[0, 0], [0, 1]], [1]), "(1, 2), got (2, 2)"),
    "rank_1": (sparse([[0]], [1], dense_shape=(3,)), "rank >= 2"),
}


@pytest.mark.parametrize(("ids", "shown"), SPARSE_SHAPES.values(), ids=SPARSE_SHAPES)
def test_sparse_coordinates_that_do_not_fit(ids, shown):
    with pytest.raises(ValueError, match=re.escape(shown)) as error:
        prepare(ids)
    assert "indices of feature 'the_feature'" in str(error.value)


def test_two_ids_at_one_place_of_a_sequence_are_refused():
    # One of them would be lost.
    with pytest.raises(ValueError, match="'the_feature'"):
        prepare(sparse([[0, 0], [0, 0]], [1, 2]), max_sequence_length=2)


def test_two_ids_at_one_place_are_both_combined():
    prepared = prepare(sparse([[0, 0], [0, 0]], [1, 2]), num_devices=1)
    assert sorted(prepared.values[0, :2]) == [1, 2]
    assert prepared.row_splits.tolist() == [[0, 2, 2, 2]]


@pytest.mark.parametrize(
    "features",
    [{"other": 1}, {"the_feature": 1, "other": 1}, {}, [np.arange(3)], None],
    ids=repr,
)
@pytest.mark.parametrize("what", ["features", "weights"])
def test_another_structure_shows_both(features, what):
    plan = plan_of()
    if what == "weights" and features is None:
        return  # that is no weights
    arguments = [{"the_feature": np.arange(3)}, plan, features]
    if what == "features":
        arguments = [features, plan]
    with pytest.raises(ValueError, match=f"{what} must have the structure") as error:
        te.prepare_features(*arguments)
    assert str(plan.feature_tree) in str(error.value)
    assert str(jax.tree.structure(features)) in str(error.value)


def test_none():
    with pytest.raises(ValueError, match="'the_feature' is None"):
        prepare(None)


def test_scalar():
    with pytest.raises(ValueError, match="'the_feature' must have a batch axis"):
        prepare(np.array(3))


@pytest.mark.parametrize("ids", [RAGGED, SPARSE], ids=["ragged", "sparse"])
def test_already_prepared(ids):
    with pytest.raises(TypeError, match="'the_feature' has been prepared already"):
        prepare(prepare(ids))


def test_the_first_wrong_feature_is_named():
    config = [te.FeatureConfig(table=TABLE, name=name) for name in ("a", "b")]
    plan = te.make_plan(config, mesh_of(1))
    with pytest.raises(ValueError, match="'b'"):
        te.prepare_features([np.array([9]), np.array([10])], plan)


# What is accepted.

INTEGERS = [
    np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64
]  # fmt: skip


@pytest.mark.parametrize("policy", ["error", "drop", "clip"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.__name__)
def test_any_integer_type(dtype, policy):
    ids = np.array([0, 9, 3], dtype)
    prepared = prepare(ids, out_of_range_ids=policy)
    assert prepared.dtype == np.int32
    np.testing.assert_array_equal(prepared, [0, 9, 3])
    prepared = prepare(ragged(ids, [0, 3]), out_of_range_ids=policy)
    assert prepared.values.dtype == np.int32
    np.testing.assert_array_equal(prepared.values[0, :3], [0, 9, 3])


def test_unsigned_ids_of_a_table_larger_than_they_count():
    table = te.TableConfig(vocabulary_size=1000, dim=4)
    for policy in ("drop", "clip"):
        feature = te.FeatureConfig(table=table, out_of_range_ids=policy)
        plan = te.make_plan(feature, mesh_of(1))
        prepared = te.prepare_features(np.array([0, 255], np.uint8), plan)
        np.testing.assert_array_equal(prepared, [0, 255])


BEYOND = {
    "int64": (
        np.array([2**32 + 3, 2**31, 10, -1, -(2**40), PADDING, 5]),
        [9, 9, 9, 0, 0, PADDING, 5],
    ),
    "uint64": (np.array([2**63 + 3, 10, PADDING, 5], np.uint64), [9, 9, PADDING, 5]),
    "uint32": (np.array([2**32 - 1, 10, PADDING, 5], np.uint32), [9, 9, PADDING, 5]),
    "int32": (np.array([10, -1, PADDING - 1, PADDING]), [9, 0, 9, PADDING]),
}


@pytest.mark.parametrize("container", ["dense", "ragged"])
@pytest.mark.parametrize("policy", ["drop", "clip"])
@pytest.mark.parametrize(("ids", "clipped"), BEYOND.values(), ids=BEYOND)
def test_ids_beyond_the_table_stay_beyond_or_are_clipped(
    ids, clipped, policy, container
):
    if container == "dense":
        prepared = prepare(ids, out_of_range_ids=policy)
    else:
        in_one_sample = ragged(ids, [0, len(ids)])
        prepared = prepare(in_one_sample, out_of_range_ids=policy).values[0]
        prepared = prepared[: len(ids)]
    assert prepared.dtype == np.int32
    if policy == "clip":
        # The rest of clipping happens in the step, which counts.
        padding = prepared == PADDING
        prepared = np.where(padding, PADDING, np.clip(prepared, 0, 9))
        np.testing.assert_array_equal(prepared, clipped)
        return
    is_padding, is_inside = ids == PADDING, ids < VOCABULARY_SIZE
    if np.issubdtype(ids.dtype, np.signedinteger):
        is_inside &= ids >= 0
    np.testing.assert_array_equal(prepared == PADDING, is_padding)
    np.testing.assert_array_equal(
        (prepared >= 0) & (prepared < VOCABULARY_SIZE), is_inside
    )
    np.testing.assert_array_equal(prepared[is_inside], ids[is_inside])


def test_plain_arrays_stay_plain():
    for ids in (np.array([1, 2]), np.array([[1], [PADDING]]), jnp.arange(3)):
        prepared = prepare(ids)
        assert type(prepared) is np.ndarray
        np.testing.assert_array_equal(prepared, ids)


def test_lists():
    np.testing.assert_array_equal(
        prepare([[1, 2], [3, PADDING]]), [[1, 2], [3, PADDING]]
    )
    prepared = prepare(te.RaggedIds(values=[1, 2], row_splits=[0, 2], weights=[1, 2]))
    np.testing.assert_array_equal(prepared.values[0, :2], [1, 2])
    assert prepared.weights.dtype == np.float32


@pytest.mark.parametrize("given", ["in_the_ids", "as_nest", "as_nest_of_plain_ids"])
def test_dense_weights(given):
    ids, weights = np.array([[1, 2], [3, PADDING]]), np.array([[1, 0], [-2, 5]])
    match given:
        case "in_the_ids":
            prepared = prepare(dense(ids, weights))
        case "as_nest":
            prepared = prepare(dense(ids), weights)
        case _:
            prepared = prepare(ids, weights)
    assert isinstance(prepared, te.DenseIds)
    assert prepared.weights.dtype == np.float32
    np.testing.assert_array_equal(prepared.weights, weights)
    np.testing.assert_array_equal(prepared.ids, ids)


def test_weights_of_the_nest_win():
    prepared = prepare(dense([1], np.array([2.0])), np.array([3.0]))
    assert prepared.weights.tolist() == [3]


def test_weights_of_some_features():
    config = [te.FeatureConfig(table=TABLE, name=name) for name in ("a", "b")]
    plan = te.make_plan(config, mesh_of(1))
    ids = np.array([1, 2])
    a, b = te.prepare_features([ids, ids], plan, [None, np.ones(2)])
    assert type(a) is np.ndarray
    assert b.weights.tolist() == [1, 1]


def test_arguments_are_not_changed():
    ids = ragged([1, 2**40], [0, 1, 2], np.ones(2))
    before = jax.tree.map(np.copy, ids)
    prepare(ids, out_of_range_ids="clip")
    jax.tree.map(np.testing.assert_array_equal, ids, before)


# Ragged features.


@pytest.mark.parametrize(
    ("num_devices", "values", "row_splits"),
    [
        (1, [[1, 2, 3, 4, 5]], [[0, 1, 1, 3, 4, 5]]),
        (2, [[1, 2, 3], [4, 5]], [[0, 1, 1, 3], [0, 1, 2, 2]]),
        (3, [[1], [2, 3, 4], [5]], [[0, 1, 1], [0, 2, 3], [0, 1, 1]]),
        (4, [[1], [2, 3, 4], [5], []], [[0, 1, 1], [0, 2, 3], [0, 1, 1], [0, 0, 0]]),
        (8, [[1], [], [2, 3], [4], [5], [], [], []])
        + ([[0, 1], [0, 0], [0, 2], [0, 1], [0, 1], [0, 0], [0, 0], [0, 0]],),
    ],
)
def test_samples_are_dealt_to_shards_in_order(num_devices, values, row_splits):
    weights = np.arange(5) + 0.5
    ids = ragged([1, 2, 3, 4, 5], [0, 1, 1, 3, 4, 5], weights)
    prepared = prepare(ids, num_devices=num_devices)
    assert isinstance(prepared, te.ShardedRaggedIds)
    assert prepared.batch_size == 5
    assert prepared.row_splits.tolist() == row_splits
    assert prepared.values.shape == prepared.weights.shape == (num_devices, 8)
    for shard, of_shard in enumerate(values):
        end = len(of_shard)
        assert prepared.values[shard, :end].tolist() == of_shard
        assert (prepared.values[shard, end:] == PADDING).all()
        expected = [value - 0.5 for value in of_shard]
        assert prepared.weights[shard, :end].tolist() == expected
        assert not prepared.weights[shard, end:].any()
    for array in (prepared.values, prepared.row_splits):
        assert array.dtype == np.int32
    assert prepared.weights.dtype == np.float32
    assert prepare(RAGGED, num_devices=num_devices).weights is None


@pytest.mark.parametrize(
    ("most", "size"), [(0, 8), (1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (100, 128)]
)
def test_buffers_are_powers_of_two(most, size):
    # The fullest shard decides: here the second of two.
    prepared = prepare(ragged(np.zeros(most, int), [0, 0, 0, most]))
    assert prepared.values.shape == (2, size)


@pytest.mark.parametrize(
    ("expected_valence", "batch", "most", "size"),
    [
        (3, 8, 0, 12),
        (3, 8, 12, 12),
        (3, 8, 13, 24),
        (3, 8, 24, 24),
        (3, 8, 25, 48),
        (3, 7, 12, 12),  # 4 samples a shard
        (2.5, 8, 10, 10),
        (0.25, 8, 0, 1),
        (0.01, 8, 0, 1),
        (0.01, 8, 3, 4),
        (1, 1, 1, 1),
    ],
)
def test_buffers_of_the_expected_valence(expected_valence, batch, most, size):
    splits = [0, *[most] * batch]
    ids = ragged(np.zeros(most, int), splits)
    prepared = prepare(ids, expected_valence=expected_valence)
    assert prepared.values.shape == (2, size)
    # Never an id lost.
    assert (prepared.values != PADDING).sum() == most


def test_batches_of_one_valence_have_one_size():
    sizes = set()
    for seed in range(10):
        counts = np.random.default_rng(seed).integers(0, 3, 20)
        ids = ragged(np.zeros(counts.sum(), int), [0, *np.cumsum(counts)])
        sizes.add(prepare(ids, expected_valence=2).values.shape)
    assert sizes == {(2, 20)}


def test_empty_values_of_any_type():
    prepared = prepare(ragged([], [0, 0, 0]))
    assert prepared.values.dtype == np.int32
    assert (prepared.values == PADDING).all()
    assert prepared.batch_size == 2
    assert prepare(sparse(np.zeros((0, 2), int), [])).batch_size == 3


# Sparse features.


def test_unsorted_sparse_ids_are_sorted():
    order = np.random.default_rng(0).permutation(7)
    indices = np.array([[0, 0], [0, 2], [1, 3], [3, 0], [3, 1], [3, 2], [4, 0]])
    values, weights = np.arange(7), np.arange(7) / 2
    expected = prepare(ragged(values, [0, 2, 3, 3, 6, 7], weights))
    prepared = prepare(
        sparse(indices[order], values[order], (5, 4), weights[order].astype(np.float32))
    )
    jax.tree.map(np.testing.assert_array_equal, prepared, expected)
    assert prepared.batch_size == 5


def test_sparse_ids_of_higher_rank_are_flattened_to_samples():
    ids = sparse([[1, 0, 0], [0, 1, 4], [1, 2, 1]], [7, 8, 9], (2, 3, 5))
    prepared = prepare(ids, num_devices=1, output_shape=(2, 3))
    assert prepared.batch_size == 6
    assert prepared.row_splits.tolist() == [[0, 0, 1, 1, 2, 2, 3]]
    assert prepared.values[0, :3].tolist() == [8, 7, 9]


def test_sparse_sequences_keep_their_places():
    ids = sparse([[2, 3], [0, 1], [2, 0]], [7, 8, 9])
    prepared = prepare(ids, max_sequence_length=2)
    # As wide as the sequence, whatever the batch; column 3 is beyond it.
    expected = np.full((3, 2), PADDING)
    expected[0, 1], expected[2, 0] = 8, 9
    np.testing.assert_array_equal(prepared.ids, expected)
    assert prepared.weights is None


# The prepared batch and the step.


def init(plan):
    return te.init_tables(plan, jax.random.key(0))


@pytest.mark.parametrize("ids", [RAGGED, SPARSE], ids=["RaggedIds", "SparseIds"])
def test_lookup_refuses_what_is_not_prepared(ids):
    plan = plan_of()
    tables = jax.eval_shape(lambda: init(plan))
    with pytest.raises(TypeError, match=f"'the_feature' is a {type(ids).__name__}"):
        te.lookup(tables, {"the_feature": ids}, plan)
    with pytest.raises(TypeError, match="prepare_features"):
        te.activation_shapes({"the_feature": ids}, plan)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_lookup_refuses_what_is_prepared_for_other_shards(num_devices):
    prepared = {"the_feature": prepare(RAGGED, num_devices=num_devices)}
    with pytest.raises(ValueError, match=f"prepared for {num_devices} shards") as error:
        te.activation_shapes(prepared, plan_of())
    assert "its layer has 2" in str(error.value)
    assert "'the_feature'" in str(error.value)


REFUSED_BY_SHAPE = {
    "float": (np.ones(3), {}, TypeError, "must be integers"),
    "scalar": (np.array(1), {}, ValueError, "batch axis"),
    "three_axes": (np.ones((2, 2, 2), int), {}, ValueError, "output_shape"),
    "weights": (dense([1], np.ones(2)), {}, ValueError, "shape of its ids"),
    "one_axis_sequence": (
        np.arange(3),
        dict(max_sequence_length=2),
        ValueError,
        "max_sequence_length=2",
    ),
    "weighted_sequence": (
        dense([[1]], np.ones((1, 1))),
        dict(max_sequence_length=2),
        ValueError,
        "weights and max_sequence_length=2",
    ),
    "output_shape": (
        np.arange(3),
        dict(output_shape=(4,)),
        ValueError,
        "(4,) for ids of shape (3,)",
    ),
    "small_output": (
        np.arange(3),
        dict(output_shape=(2,)),
        ValueError,
        "(2,) for ids of shape (3,)",
    ),
}


@pytest.mark.parametrize(
    ("ids", "options", "kind", "shown"), REFUSED_BY_SHAPE.values(), ids=REFUSED_BY_SHAPE
)
def test_shapes_that_a_step_refuses(ids, options, kind, shown):
    with pytest.raises(kind, match=re.escape(shown)) as error:
        te.activation_shapes({"the_feature": ids}, plan_of(**options))
    assert "'the_feature'" in str(error.value)


@pytest.mark.parametrize(
    ("ids", "options", "shape"),
    [
        (np.arange(5), {}, (5, 4)),
        (np.zeros((5, 3), int), {}, (5, 4)),
        (np.zeros((5, 3), int), dict(max_sequence_length=2), (5, 2, 4)),
        (np.arange(6), dict(output_shape=(2, 3)), (2, 3, 4)),
        (np.zeros((3, 2), int), dict(output_shape=(6,)), (6, 4)),
        (RAGGED, {}, (3, 4)),
        (RAGGED, dict(max_sequence_length=5), (3, 5, 4)),
        (RAGGED, dict(output_shape=(3, 2)), (3, 2, 4)),
        (SPARSE, {}, (3, 4)),
        (SPARSE, dict(max_sequence_length=5), (3, 5, 4)),
    ],
    ids=str,
)
def test_shapes_of_activations(ids, options, shape):
    prepared = {"the_feature": prepare(ids, **options)}
    struct = te.activation_shapes(prepared, plan_of(**options))["the_feature"]
    assert struct == jax.ShapeDtypeStruct(shape, jnp.float32)


def test_batch_without_samples_is_refused_or_looked_up():
    plan = plan_of()
    try:
        prepared = prepare(np.zeros(0, int))
    except ValueError as error:
        assert "'the_feature'" in str(error)
        return
    structs = jax.eval_shape(lambda: init(plan))
    result = jax.eval_shape(
        lambda t: te.lookup(t, {"the_feature": prepared}, plan).activations, structs
    )
    assert result["the_feature"].shape == (0, 4)


def test_samples_without_places_are_zero():
    plan = plan_of()
    ids = {"the_feature": prepare(np.zeros((4, 0), int))}
    activations = te.lookup(init(plan), ids, plan).activations["the_feature"]
    np.testing.assert_array_equal(activations, np.zeros((4, 4)))


@pytest.mark.parametrize("num_devices", [1, 8])
def test_wide_ids_outside_jit_read_no_other_row(num_devices):
    plan = plan_of(num_devices)
    tables = init(plan)
    ids = np.array([2**32 + 3, 2**31, -(2**32) + 3, 2**62, -1, 3, PADDING, 9])
    result = te.lookup(tables, {"the_feature": ids}, plan)
    assert result.stats.out_of_range["the_feature"] == 5
    expected = np.zeros((8, 4), np.float32)
    table = te.unstack_tables(tables, plan)["table"]
    expected[5], expected[7] = table[3], table[9]
    np.testing.assert_array_equal(result.activations["the_feature"], expected)
    unsigned = np.where(ids < 0, 2**64 - 1, ids.astype(np.uint64)).astype(np.uint64)
    result = te.lookup(tables, {"the_feature": unsigned}, plan)
    assert result.stats.out_of_range["the_feature"] == 5
    np.testing.assert_array_equal(result.activations["the_feature"], expected)


def test_shard_batch():
    plan = plan_of(8)
    divides, ragged_ids = np.arange(16) % 10, prepare(RAGGED, num_devices=8)
    batch = {
        "divides": divides,
        "does_not": np.arange(9),
        "matrix": np.zeros((8, 3)),
        "by_second_axis": np.zeros((3, 8)),
        "scalar": np.float32(3),
        "none": None,
        "weighted": dense(divides, np.ones(16, np.float32)),
        "ragged": ragged_ids,
    }
    placed = te.shard_batch(batch, plan)
    assert jax.tree.structure(placed) == jax.tree.structure(batch)
    jax.tree.map(np.testing.assert_array_equal, placed, batch)
    split, whole = PartitionSpec(("shard",)), PartitionSpec()
    expected = {
        "divides": split,
        "does_not": whole,
        "matrix": split,
        "by_second_axis": whole,
        "scalar": whole,
    }
    for name, spec in expected.items():
        assert isinstance(placed[name], jax.Array)
        assert placed[name].sharding.spec == spec
        assert placed[name].sharding.mesh == plan.mesh
    for name in ("weighted", "ragged"):
        for leaf in jax.tree.leaves(placed[name]):
            assert leaf.sharding.spec == split
    assert placed["ragged"].batch_size == ragged_ids.batch_size


@pytest.mark.parametrize("num_devices", [1, 8])
def test_placed_batches_give_the_same(num_devices):
    plan = plan_of(num_devices)
    tables = init(plan)
    look_up = jax.jit(te.lookup, static_argnames="plan")
    batch = {"the_feature": prepare(RAGGED, num_devices=num_devices)}
    table = te.unstack_tables(tables, plan)["table"]
    # One or two terms: the sum is the same in any order.
    expected = [table[1], np.zeros(4), table[2] + table[3]]
    for features in (batch, te.shard_batch(batch, plan)):
        activations = look_up(tables, features, plan).activations["the_feature"]
        np.testing.assert_array_equal(activations, expected)
