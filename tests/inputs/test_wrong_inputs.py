"""Wrong batches: one error each, which names the feature and shows the value."""

import dataclasses
import re
import types

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.inputs.prepare_cases import (
    PADDING,
    TABLE,
    VOCABULARY_SIZE,
    dense,
    prepare,
    ragged,
    sparse,
)

MASKED = np.ma.masked_array([1.5, 2.0], [False, True])
INFINITY = np.array([np.inf, 1])

# Name: ids, error, a part of the message that shows the value.
WRONG_IDS = {
    "none": (None, ValueError, "is None"),
    "string": (
        "movie",
        TypeError,
        "dtype <U5; turn strings into ids with te.inputs.hash_ids",
    ),
    "float in a list": ([1, 2.5], TypeError, "dtype float64"),
    "booleans": (np.array([True, False]), TypeError, "dtype bool"),
    "none in a list": ([1, None], TypeError, "they hold None"),
    "dict": ({"ids": [1]}, TypeError, "got dict"),
    "generator": ((i for i in [1]), TypeError, "got generator"),
    "csr": (scipy.sparse.csr_array(np.eye(3)), TypeError, "got csr_array"),
    "jagged": (
        types.SimpleNamespace(values=[1], offsets=[0, 1]),
        TypeError,
        "got SimpleNamespace",
    ),
    "scalar": (np.int64(3), ValueError, "a scalar"),
    "no samples": (np.zeros(0, int), ValueError, "a batch of shape (0,)"),
    "too large": ([1, 10], ValueError, "got 10 at position (1,)"),
    "negative": ([[1], [-1]], ValueError, "got -1 at position (1, 0)"),
    "a mark of another library": ([[1, -1]], ValueError, "te.inputs.PADDING_ROW_ID"),
    "64 bits": ([2**32 + 3], ValueError, f"got {2**32 + 3}"),
    "unsigned 64 bits": (np.array([2**63], np.uint64), ValueError, f"got {2**63}"),
    "lists beside ids": ([[1, 2], 3], ValueError, "got 3 among lists"),
    "uneven outer lists": ([[[1]], [[1], [2]]], ValueError, "within these lists"),
    "masked": (MASKED, TypeError, "got a masked array; write .filled(2147483647)"),
    "DenseIds of lists": (
        te.DenseIds(ids=[[1], [2, 3]]),
        TypeError,
        "DenseIds.ids must be an array, got list",
    ),
    "ragged strings": (ragged(["a"], [0, 1]), TypeError, "te.inputs.hash_ids"),
    "row_splits of floats": (ragged([1], [0, 1.0]), TypeError, "dtype float64"),
    "row_splits end early": (ragged([1, 2], [0, 1]), ValueError, "got 0 and 1"),
    "row_splits fall": (
        ragged([1, 2], [0, 2, 1, 2]),
        ValueError,
        "got 2 and then 1 at sample 1",
    ),
    "row_splits of 64 bits": (
        ragged([1], np.array([0, 2**63, 1], np.uint64)),
        ValueError,
        f"got {2**63} and then 1",
    ),
    "sparse, beyond the batch": (sparse([[3, 0]], [1]), ValueError, "got [3, 0]"),
    "sparse, beyond the positions": (sparse([[0, 4]], [1]), ValueError, "got [0, 4]"),
    "sparse, indices of floats": (sparse([[0, 0.5]], [1]), TypeError, "dtype float64"),
    "sparse of 8 TiB": (
        sparse([[0, 0]], [1], dense_shape=(2**40, 4)),
        ValueError,
        f"got [{2**40}, 4]",
    ),
}


@pytest.mark.parametrize(("ids", "kind", "text"), WRONG_IDS.values(), ids=WRONG_IDS)
def test_wrong_ids(ids, kind, text):
    with pytest.raises((ValueError, TypeError), match=re.escape(text)) as error:
        prepare(ids)
    assert type(error.value) is kind
    assert "eature 'the_feature'" in str(error.value)


RAGGED = ragged([1, 2, 3], [0, 1, 3])
SPARSE = sparse([[0, 0], [1, 1], [2, 0]], [1, 2, 3])

# Name: ids, weights, error, a part of the message.
WRONG_WEIGHTS = {
    "strings": ([1], ["2"], TypeError, "real numbers, got dtype object"),
    "infinite": ([1, 2], INFINITY, ValueError, "got inf at (0,)"),
    "too large": ([1], [1e39], ValueError, "got inf at (0,)"),
    "masked": ([1, 2], MASKED, TypeError, "got a masked array"),
    "fewer": ([1, 2], [1.0], ValueError, "(2,), got (1,)"),
    "ragged for dense": ([1, 2], RAGGED, TypeError, "DenseIds, like its ids, got R"),
    "ragged, fewer": (RAGGED, [1.0, 2.0], ValueError, "(3,), got (2,)"),
    "ragged, other lengths": (
        RAGGED,
        [[1.0, 2.0], [3.0]],
        ValueError,
        "weights: [0, 2, 3]",
    ),
    "ragged with weights of its own": (
        RAGGED,
        ragged([1, 2, 3], [0, 1, 3], np.ones(3)),
        ValueError,
        "a RaggedIds that has weights of its own",
    ),
    "sparse for ragged": (
        RAGGED,
        SPARSE,
        TypeError,
        "RaggedIds, like its ids, got S",
    ),
    "sparse, other places": (
        SPARSE,
        sparse([[0, 0], [1, 2], [2, 0]], [1.0, 2.0, 3.0]),
        ValueError,
        "the same indices as its ids",
    ),
    "sparse, other shape": (
        SPARSE,
        sparse([[0, 0], [1, 1], [2, 0]], [1.0, 2.0, 3.0], dense_shape=(4, 4)),
        ValueError,
        "weights: [4, 4]",
    ),
}


@pytest.mark.parametrize(
    ("ids", "weights", "kind", "text"), WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS
)
def test_wrong_weights(ids, weights, kind, text):
    with pytest.raises((ValueError, TypeError), match=re.escape(text)) as error:
        prepare(ids, weights)
    assert type(error.value) is kind
    assert "Weights of feature 'the_feature'" in str(error.value)


# Name: ids, options of the feature, a part of the message; all are ValueErrors.
WRONG_SHAPES = {
    "sequence of one axis": ([1, 2], dict(max_sequence_length=2), "got shape (2,)"),
    "sequence with weights": (
        dense([[1]], np.ones((1, 2))),
        dict(max_sequence_length=2),
        "max_sequence_length=2: a sequence is not combined",
    ),
    "sequence with two ids at one place": (
        sparse([[1, 1], [1, 1]], [1, 2]),
        dict(max_sequence_length=2),
        "got sample 1 and position 1 2 times",
    ),
    "output shape of another batch": ([1, 2, 3], dict(output_shape=(2,)), "got (2,)"),
    "sequence of 2**40 places": (
        sparse([[0, 0]], [1], dense_shape=(2**27, 4)),
        dict(max_sequence_length=2**13),
        "at most 16384 samples, got 134217728",
    ),
}


@pytest.mark.parametrize(
    ("ids", "options", "text"), WRONG_SHAPES.values(), ids=WRONG_SHAPES
)
def test_shapes_that_do_not_fit_the_feature(ids, options, text):
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        prepare(ids, **options)
    assert "'the_feature'" in str(error.value)


def two_features(**options):
    config = {
        "user": te.FeatureConfig(table=TABLE, name="user"),
        "movie": te.FeatureConfig(table=TABLE, name="movie", **options),
    }
    return te.make_plan(config, mesh_of(1))


@pytest.mark.parametrize("movie", [[1, 2, 3], [[1, 2], [], [3]]])
def test_unequal_batches_name_both_features(movie):
    with pytest.raises(
        ValueError, match="got 3 for feature 'movie' and 2 for feature 'user'"
    ):
        te.inputs.prepare_features({"user": [1, 2], "movie": movie}, two_features())


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit])
def test_a_lookup_refuses_unequal_batches(wrap):
    """Also without `prepare`."""
    plan = two_features()
    tables = te.functional.init_tables(plan, jax.random.key(0))
    features = {"user": jnp.zeros(2, jnp.int32), "movie": jnp.zeros(3, jnp.int32)}
    with pytest.raises(
        ValueError, match="got 3 for feature 'movie' and 2 for feature 'user'"
    ):
        wrap(lambda x: te.functional.lookup(tables, x, plan).activations)(features)


# Ids, of which the first sample has two, and weights of which the last one is NaN.
NAN_WEIGHTS = {
    "dense": dense(np.int32([[1, 2], [3, 4]]), np.float32([[1, 1], [1, np.nan]])),
    "one id": dense(np.int32([1, 3]), np.float32([1, np.nan])),
}


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
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
    with pytest.raises(ValueError, match="must be finite"):
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
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.boolean_dtypes(),
    hnp.unicode_string_dtypes(max_len=2),
    hnp.byte_string_dtypes(max_len=2),
    hnp.datetime64_dtypes(),
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


def bags_of(prepared, num_samples):
    """Returns the ids of each sample of a prepared batch, sorted."""
    if isinstance(prepared, te.inputs.ShardedRaggedIds):
        bags = [
            values[begin:end].tolist()
            for values, splits in zip(prepared.values, prepared.row_splits, strict=True)
            for begin, end in zip(splits[:-1], splits[1:], strict=True)
        ]
        assert not any(bags[num_samples:])
        bags = bags[:num_samples]
    else:
        ids = prepared.ids if isinstance(prepared, te.DenseIds) else prepared
        bags = ids.reshape(num_samples, -1).tolist()
    return [sorted(i for i in bag if i != PADDING) for bag in bags]


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
    max_examples=150, suppress_health_check=list(hypothesis.HealthCheck)
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
