"""Wrong batches: one error each, which names the feature and shows the value."""

import dataclasses
import types

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import scipy.sparse

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.inputs.prepare_cases import (
    PADDING,
    TABLE,
    VOCABULARY_SIZE,
    bags_of,
    dense,
    plan_of,
    prepare,
    ragged,
    sparse,
)
from tests.rejections import ANY, rejects
from tests.tiers import quick_cases

UNEVEN = [[1], [2, 3]]
MASKED = np.ma.masked_array([1.5, 2.0], [False, True])


class Hostile:
    def __array__(self, *args, **kwargs):
        raise RuntimeError("no")


def cyclic():
    items = []
    items.append(items)
    return items


def ragged_of(inner):
    """Returns an object with the fields of a `tf.RaggedTensor` of two ragged axes."""
    return types.SimpleNamespace(values=inner, row_splits=np.array([0, 2]))


# Name: ids, type and field of the error, its value or code that it shows.
WRONG_IDS = {
    "none": (None, ValueError, "Ids", ""),
    "string": ("movie", TypeError, "Ids", "te.inputs.hash_ids"),
    "float in a list": ([1, 2.5], TypeError, "Ids", ".astype(int)"),
    "booleans": (np.array([True, False]), TypeError, "Ids", ""),
    "none in a list": ([1, None], TypeError, "Ids", "None"),
    "generator": ((i for i in [1]), TypeError, "Ids", ""),
    "hostile": (Hostile(), TypeError, "Ids", "Hostile"),
    "cyclic list": (cyclic(), ValueError, "Ids", "te.SparseIds"),
    "coo": (scipy.sparse.coo_array([[0, 1]]), TypeError, "Ids", "row_splits=m.indptr"),
    "jagged": (types.SimpleNamespace(values=[1], offsets=[0, 1]), TypeError, "Ids", ""),
    "scalar": (np.int64(3), ValueError, "Ids", ""),
    "no samples": (np.zeros(0, int), ValueError, "Ids", "[0]"),
    "too large": ([1, 10], ValueError, None, "10 at position (1,)"),
    "negative": ([[1], [-1]], ValueError, None, "-1 at position (1, 0)"),
    "padding of others": ([[1, -1]], ValueError, None, "te.inputs.PADDING_ROW_ID"),
    "padding in lists": ([[PADDING], [1, 2]], ValueError, None, f"{PADDING}"),
    "64 bits": ([2**32 + 3], ValueError, None, f"{2**32 + 3}"),
    "unsigned 64 bits": (np.array([2**63], np.uint64), ValueError, None, f"{2**63}"),
    "lists beside ids": ([[1, 2], 3], ValueError, "Ids", "got 3"),
    "uneven outer lists": ([[[1]], [[1], [2]]], ValueError, "Ids", "te.SparseIds"),
    "masked": (MASKED, TypeError, "Ids", ".filled(2147483647)"),
    "masked in a list": ([MASKED], TypeError, "Ids", ".filled(2147483647)"),
    "nested ragged": (ragged_of(ragged([1, 2], [0, 1, 2])), ValueError, "Ids", ""),
    "DenseIds of lists": (te.DenseIds(ids=UNEVEN), TypeError, "DenseIds.ids", ""),
    "ragged strings": (ragged(["a"], [0, 1]), TypeError, "Ids", "te.inputs.hash_ids"),
    "splits of floats": (ragged([1], [0, 1.0]), TypeError, "row_splits", ""),
    "splits end early": (ragged([1, 2], [0, 1]), ValueError, "row_splits", "[0, 1]"),
    "splits end late": (ragged([1, 2, 3], [0, 4]), ValueError, "row_splits", "[0, 4]"),
    "splits start below 0": (ragged([1], [-1, 1]), ValueError, "row_splits", "[-1, 1]"),
    "splits fall": (ragged([1, 2], [0, 5, 2]), ValueError, "row_splits", "[5, 2]"),
    "splits of no sample": (ragged([], [0]), ValueError, "row_splits", "(1,)"),
    "splits of 64 bits": (
        ragged([1], np.array([0, 2**63, 1], np.uint64)), ValueError, "row_splits",
        f"[{2**63}, 1]",
    ),
    "beyond the batch": (sparse([[3, 0]], [1]), ValueError, "indices", "[3, 0]"),
    "beyond the positions": (sparse([[0, 4]], [1]), ValueError, "indices", "[0, 4]"),
    "below the batch": (sparse([[-1, 0]], [1]), ValueError, "indices", "[-1, 0]"),
    # As an int64, the first would be -1; as an int32, the second would be 0.
    "64 bits of uint64": (
        sparse(np.array([[2**64 - 1, 0]], np.uint64), [1]), ValueError, "indices",
        f"[{2**64 - 1}, 0]",
    ),
    "64 bits of int64": (sparse([[2**32, 0]], [1]), ValueError, "indices", f"{2**32}"),
    "one axis": (sparse([[0]], [1], dense_shape=(3,)), ValueError, "indices", ""),
    "indices of floats": (sparse([[0, 0.5]], [1]), TypeError, "indices", ""),
    "dense_shape whose product overflows": (
        sparse([[0, 0, 0]], [1], dense_shape=(2**33, 2**31, 2)), ValueError,
        "dense_shape", f"{2**33}",
    ),
    "sparse of 8 TiB": (
        sparse([[0, 0]], [1], dense_shape=(2**40, 4)), ValueError, "dense_shape",
        f"{2**40}",
    ),
    "prepared ragged": (prepare(ragged([1], [0, 1])), TypeError, "Ids", ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "kind", "part", "fix"), WRONG_IDS.values(), ids=WRONG_IDS
)
def test_wrong_ids(ids, kind, part, fix):
    field = part and f"{part} of feature 'the_feature'"
    with rejects(kind, field=field, fix=fix) as error:
        prepare(ids)
    assert "eature 'the_feature'" in str(error.value)


RAGGED = ragged([1, 2, 3], [0, 1, 3])
SPARSE = sparse([[0, 0], [1, 1], [2, 0]], [1, 2, 3])
OTHER_PLACES = sparse([[0, 0], [1, 2], [2, 0]], [1.0, 2.0, 3.0])
OTHER_SHAPE = sparse([[0, 0], [1, 1], [2, 0]], [1.0, 2.0, 3.0], dense_shape=(4, 4))
OWN_WEIGHTS = ragged([1, 2, 3], [0, 1, 3], np.ones(3))

# Name: ids, weights, type of the error, code that it shows.
WRONG_WEIGHTS = {
    "strings": ([1], ["2"], TypeError, ""),
    "infinite": ([1, 2], np.array([np.inf, 1]), ValueError, "(0,)"),
    "too large": ([1], [1e39], ValueError, "(0,)"),
    "masked": ([1, 2], MASKED, TypeError, ".filled(0)"),
    "fewer": ([1, 2], [1.0], ValueError, "(1,)"),
    "ragged for dense": ([1, 2], RAGGED, TypeError, "DenseIds"),
    "ragged, fewer": (RAGGED, [1.0, 2.0], ValueError, "(2,)"),
    "ragged, other lengths": (RAGGED, [[1.0, 2.0], [3.0]], ValueError, "[0, 2, 3]"),
    "ragged with weights of its own": (RAGGED, OWN_WEIGHTS, ValueError, "RaggedIds"),
    "sparse for ragged": (RAGGED, SPARSE, TypeError, "RaggedIds"),
    "sparse, other places": (SPARSE, OTHER_PLACES, ValueError, "indices"),
    "sparse, other shape": (SPARSE, OTHER_SHAPE, ValueError, "[4, 4]"),
}


@pytest.mark.parametrize(
    ("ids", "weights", "kind", "fix"), WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS
)
def test_wrong_weights(ids, weights, kind, fix):
    with rejects(kind, field="Weights of feature 'the_feature'", fix=fix):
        prepare(ids, weights)


# Name: ids, options of the feature, field of the ValueError and its value.
WRONG_SHAPES = {
    "sequence of one axis": (np.array([1, 2]), dict(max_sequence_length=2), "Ids", ANY),
    "sequence with weights": (
        dense([[1]], np.ones((1, 1))), dict(max_sequence_length=2), "Weights", ANY
    ),
    "sparse sequence with weights": (
        sparse([[0, 0]], [1], weights=np.ones(1)), dict(max_sequence_length=2),
        "Weights", ANY,
    ),
    "sequence with two ids at one place": (
        sparse([[1, 1], [1, 1]], [1, 2]), dict(max_sequence_length=2), "indices", [1, 1]
    ),
    "output shape of another batch": (
        [1, 2, 3], dict(output_shape=(2,)), "FeatureConfig.output_shape", [2]
    ),
    "sequence of 2**40 places": (
        sparse([[0, 0]], [1], dense_shape=(2**27, 4)),
        dict(max_sequence_length=2**13), "dense_shape", 2**27,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "options", "part", "value"), WRONG_SHAPES.values(), ids=WRONG_SHAPES
)
def test_shapes_that_do_not_fit_the_feature(ids, options, part, value):
    with rejects(field=f"{part} of feature 'the_feature'", value=value):
        prepare(ids, **options)


@pytest.mark.parametrize("what", ["features", "weights"])
def test_another_structure_shows_both(what):
    plan, features = plan_of(), {"the_feature": 1, "other": 1}
    arguments = [{"the_feature": np.arange(3)}, plan, features]
    if what == "features":
        arguments = [features, plan]
    with rejects(ValueError, fix="['the_feature', 'other']"):
        te.inputs.prepare_features(*arguments)


def two_features(**options):
    config = {
        "user": te.FeatureConfig(table=TABLE, name="user"),
        "movie": te.FeatureConfig(table=TABLE, name="movie", **options),
    }
    return te.make_plan(config, mesh_of(1))


def looked_up(features):
    plan = two_features()
    tables = te.functional.init_tables(plan, jax.random.key(0))
    return te.functional.lookup(tables, features, plan).activations


def prepared(features):
    return te.inputs.prepare_features(features, two_features())


@pytest.mark.parametrize(
    ("function", "movie"),
    [
        (prepared, np.zeros(3, int)),
        (prepared, [[1, 2], [], [3]]),
        (looked_up, np.zeros(3, int)),
        (jax.jit(looked_up), np.zeros(3, int)),
    ],
    ids=["dense", "ragged", "lookup", "jit"],
)
def test_unequal_batches_name_both_features(function, movie):
    features = {"user": np.zeros(2, int), "movie": movie}
    with rejects(field="'user'", value=2, fix="feature 'movie'"):
        function(features)


# Ids, of which the first sample has two, and weights of which the last one is NaN.
NAN_WEIGHTS = {
    "dense": dense(np.int32([[1, 2], [3, 4]]), np.float32([[1, 1], [1, np.nan]])),
    "one id": dense(np.int32([1, 3]), np.float32([1, np.nan])),
}


@pytest.mark.parametrize("combiner", quick_cases(["sum", "mean", "sqrtn"], "mean"))
@pytest.mark.parametrize("ids", NAN_WEIGHTS.values(), ids=NAN_WEIGHTS)
def test_a_weight_of_nan_that_no_step_can_refuse_is_seen(ids, combiner):
    table = dataclasses.replace(TABLE, combiner=combiner)
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    activations = jax.jit(lambda x: te.functional.lookup(tables, x, plan).activations)(
        ids
    )
    assert np.isfinite(activations[0]).all()
    assert np.isnan(activations[1]).all()
    with rejects(field="Weights of feature 'feature'"):
        te.inputs.prepare_features(ids, plan)


# Anything else: an error that names the feature, or a batch with the very same ids.

SCALARS = st.one_of(
    st.integers(-2, VOCABULARY_SIZE),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.booleans(),
    st.text(max_size=2),
    st.binary(max_size=2),
    st.none(),
)
DTYPES = st.one_of(
    hnp.scalar_dtypes(),
    hnp.unicode_string_dtypes(max_len=2),
    hnp.byte_string_dtypes(max_len=2),
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)
    )
)
SMALL_ARRAYS = hnp.arrays(
    np.int64,
    hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4),
    elements=st.integers(-1, VOCABULARY_SIZE),
)
LISTS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=8)
ID_LISTS = st.lists(
    st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=3), max_size=4
)
PARTS = st.one_of(ARRAYS, SMALL_ARRAYS, LISTS)
BATCHES = st.one_of(
    PARTS,
    ID_LISTS,
    st.builds(te.DenseIds, ids=PARTS, weights=st.none() | PARTS),
    st.builds(te.RaggedIds, values=PARTS, row_splits=PARTS, weights=st.none() | PARTS),
    st.builds(
        te.SparseIds,
        indices=PARTS,
        values=PARTS,
        dense_shape=PARTS,
        weights=st.none() | PARTS,
    ),
    ID_LISTS.map(te.RaggedIds.from_lists),
    st.builds(
        te.RaggedIds,
        values=SMALL_ARRAYS,
        row_splits=st.lists(st.integers(-1, 4), max_size=4),
    ),
    st.integers(0, 4).flatmap(
        lambda n: st.builds(
            te.SparseIds,
            indices=hnp.arrays(np.int64, (n, 2), elements=st.integers(-1, 3)),
            values=hnp.arrays(np.int64, n, elements=st.integers(-1, VOCABULARY_SIZE)),
            dense_shape=st.just([3, 3]),
        )
    ),
)


def expected_bags(ids):
    """Reads the ids one by one, as slowly as they can be read."""
    if isinstance(ids, te.DenseIds):
        ids = ids.ids
    if isinstance(ids, te.RaggedIds):
        splits, values = list(ids.row_splits), list(ids.values)
        bags = [values[a:b] for a, b in zip(splits[:-1], splits[1:], strict=True)]
    elif isinstance(ids, te.SparseIds):
        bags = [[] for _ in range(int(np.asarray(ids.dense_shape)[0]))]
        for index, value in zip(ids.indices, ids.values, strict=True):
            bags[int(index[0])].append(value)
    else:
        bags = [bag if np.ndim(bag) else [bag] for bag in ids]
    return [sorted(int(i) for i in bag if i != PADDING) for bag in bags]


@hypothesis.settings(
    max_examples=100, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(ids=BATCHES, weights=st.none() | st.none() | BATCHES)
def test_any_batch_is_read_rightly_or_refused_by_name(ids, weights):
    try:
        prepared = prepare(ids, weights)
    except (ValueError, TypeError) as error:
        assert "'the_feature'" in str(error)
        return
    expected = expected_bags(ids)
    assert bags_of(prepared, len(expected)) == expected
