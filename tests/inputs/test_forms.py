"""Containers of ids: read if their meaning is clear, else refused with a way out."""

import collections
import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse as jax_sparse

import tpu_embedding as te
from tpu_embedding.inputs.forms import MAX_SAMPLES, is_integer, is_real, read_ids

PADDING = te.inputs.PADDING_ROW_ID


def read(ids, what="Ids"):
    return read_ids(ids, "feature 'f'", what)


def shown(ids):
    """Returns a container as lists, with its batch shape."""
    result = read(ids)
    parts = [
        np.asarray(getattr(result.ids, field.name)).tolist()
        for field in dataclasses.fields(result.ids)
        if field.name != "weights"
    ]
    return type(result.ids).__name__, *parts, result.batch_shape


def tf_ragged(values, row_splits):
    """An object with the fields of `tf.RaggedTensor`."""
    return types.SimpleNamespace(values=values, row_splits=np.array(row_splits))


def tf_sparse(indices, values, dense_shape):
    """An object with the fields of `tf.SparseTensor`."""
    return types.SimpleNamespace(
        indices=np.array(indices),
        values=np.array(values),
        dense_shape=np.array(dense_shape),
    )


def objects(*items):
    return np.fromiter(items, object, len(items))


NESTED = tf_ragged(tf_ragged(np.array([7, 8, 9]), [0, 1, 1, 3, 3]), [0, 2, 4])

READ = {
    "array": (np.arange(3), ("DenseIds", [0, 1, 2], (3,))),
    "matrix": (np.ones((2, 1), int), ("DenseIds", [[1], [1]], (2,))),
    "three axes": (np.ones((1, 2, 1), int), ("DenseIds", [[[1], [1]]], (1, 2))),
    "scalar": (np.int64(3), ("DenseIds", 3, ())),
    "jax": (jnp.arange(2), ("DenseIds", [0, 1], (2,))),
    "range": (range(2), ("DenseIds", [0, 1], (2,))),
    "DenseIds of a list": (te.DenseIds(ids=[1, 2]), ("DenseIds", [1, 2], (2,))),
    "list": ([1, np.int64(2)], ("DenseIds", [1, 2], (2,))),
    "tuple": ((1, 2), ("DenseIds", [1, 2], (2,))),
    "lists": ([[1, 2], [3, 4]], ("DenseIds", [[1, 2], [3, 4]], (2,))),
    "empty list": ([], ("DenseIds", [], (0,))),
    "empty lists": ([[], []], ("DenseIds", [[], []], (2,))),
    "list of arrays": ([np.arange(2), np.arange(2)], ("DenseIds", [[0, 1]] * 2, (2,))),
    "uneven lists": ([[1, 2], [], [3]], ("RaggedIds", [1, 2, 3], [0, 2, 2, 3], (3,))),
    "uneven tuples": (((1,), (2, 3)), ("RaggedIds", [1, 2, 3], [0, 1, 3], (2,))),
    "uneven arrays": (
        [np.arange(2), jnp.arange(1)],
        ("RaggedIds", [0, 1, 0], [0, 2, 3], (2,)),
    ),
    "uneven, three deep": (
        [[[1], []], [[2, 3], [4]]],
        ("RaggedIds", [1, 2, 3, 4], [0, 1, 1, 3, 4], (2, 2)),
    ),
    "even, four deep": (
        [[[[1], [2]]], [[[3], [4]]]],
        ("DenseIds", [[[[1], [2]]], [[[3], [4]]]], (2, 1, 2)),
    ),
    "column of lists": (
        objects([1, 2], [3]),
        ("RaggedIds", [1, 2, 3], [0, 2, 3], (2,)),
    ),
    "column of integers": (objects(1, 2), ("DenseIds", [1, 2], (2,))),
    "masked": (
        np.ma.masked_array(np.array([[1, 2], [3, 4]], np.int8), [[0, 1], [0, 0]]),
        ("DenseIds", [[1, PADDING], [3, 4]], (2,)),
    ),
    "masked nowhere": (np.ma.masked_array([1, 2]), ("DenseIds", [1, 2], (2,))),
    "ragged": (
        te.RaggedIds(values=[1, 2], row_splits=[0, 2]),
        ("RaggedIds", [1, 2], [0, 2], (1,)),
    ),
    "ragged tensor": (
        tf_ragged(np.array([1, 2]), [0, 0, 2]),
        ("RaggedIds", [1, 2], [0, 0, 2], (2,)),
    ),
    "nested ragged tensor": (
        NESTED,
        ("RaggedIds", [7, 8, 9], [0, 1, 1, 3, 3], (2, 2)),
    ),
    "nested twice": (
        tf_ragged(NESTED, [0, 1, 2]),
        ("RaggedIds", [7, 8, 9], [0, 1, 1, 3, 3], (2, 1, 2)),
    ),
    "sparse tensor": (
        tf_sparse([[0, 1], [2, 0]], [5, 6], [3, 2]),
        ("SparseIds", [[0, 1], [2, 0]], [5, 6], [3, 2], (3,)),
    ),
    "sparse without ids": (
        te.SparseIds(indices=[], values=[], dense_shape=[2, 3, 4]),
        ("SparseIds", [], [], [2, 3, 4], (2, 3)),
    ),
    "strings": (["a", "b"], ("DenseIds", ["a", "b"], (2,))),
    "uneven strings": (
        [["a"], [], [b"b", "c"]],
        ("RaggedIds", ["a", b"b", "c"], [0, 1, 1, 3], (3,)),
    ),
}


@pytest.mark.parametrize(("ids", "expected"), READ.values(), ids=READ)
def test_containers_of_clear_meaning(ids, expected):
    assert shown(ids) == expected


def test_strings_in_lists_are_not_padded_to_the_longest():
    result = read(["a", "b" * 1000])
    assert result.values.dtype == object


class Hostile:
    def __array__(self, *args, **kwargs):
        raise RuntimeError("no")


class Batches:
    element_spec = None


Jagged = collections.namedtuple("Jagged", ["values", "offsets"])


def cyclic():
    items = []
    items.append(items)
    return items


UNCLEAR = {
    "csr": (scipy.sparse.csr_matrix([[0, 1]]), TypeError, "te.RaggedIds.from_scipy"),
    "coo": (scipy.sparse.coo_array([[0, 1]]), TypeError, "te.SparseIds.from_scipy"),
    "bcoo": (
        jax_sparse.BCOO.fromdense(jnp.ones((2, 2))),
        TypeError,
        "BCOO is a sparse matrix",
    ),
    "jagged": (Jagged([1, 2], [0, 2]), TypeError, "Jagged is a jagged array"),
    "dict": ({"ids": [1]}, TypeError, "dict is a mapping; write te.DenseIds"),
    "generator": ((i for i in [1]), TypeError, "next(iter(data))"),
    "iterator": (iter([1]), TypeError, "next(iter(data))"),
    "dataset": (Batches(), TypeError, "Batches is no batch"),
    "set": ({1, 2}, TypeError, "set is a set"),
    "hostile": (Hostile(), TypeError, "Hostile, which NumPy cannot read: no"),
    "key": (jax.random.key(0), TypeError, "which NumPy cannot read"),
    "lists beside ids": ([[1], 2], ValueError, "got 2 beside lists"),
    "uneven outer lists": ([[[1]], [[2], [3]]], ValueError, "got 1 and 2 lists of ids"),
    "cyclic list": (cyclic(), ValueError, "fewer than 32 axes"),
    "dense of ragged": (
        te.DenseIds(ids=[[1], [2, 3]]),
        TypeError,
        "DenseIds.ids must be an array",
    ),
    "masked floats": (
        np.ma.masked_array([1.5, 2], [0, 1]),
        TypeError,
        "must have no masked places, got a masked array of dtype float64",
    ),
    "ragged of matrix": (
        tf_ragged(np.ones((2, 2), int), [0, 2]),
        ValueError,
        "values of feature 'f' must have one axis, got shape (2, 2)",
    ),
    "nested ragged, uneven": (
        tf_ragged(NESTED.values, [0, 1, 4]),
        ValueError,
        "got 1 and 3 lists of ids at 0 and 1",
    ),
    "nested ragged, too short": (
        tf_ragged(NESTED.values, [0, 2, 3]),
        ValueError,
        "end with the number of values, 4, got 0 and 3",
    ),
    "dense_shape of floats": (
        tf_sparse([[0, 0]], [1], [1.5, 2]),
        TypeError,
        "dense_shape of feature 'f' must be a list of integers, got array([1.5, 2. ])",
    ),
    "dense_shape below 0": (
        tf_sparse([[0, 0]], [1], [-1, 2]),
        ValueError,
        "dense_shape of feature 'f' must be [batch, positions]",
    ),
    "dense_shape of 8 TiB": (
        tf_sparse([[0, 0]], [1], [10**12, 2]),
        ValueError,
        f"at most {MAX_SAMPLES} samples, got [1000000000000, 2]",
    ),
    "dense_shape whose product overflows": (
        tf_sparse([[0, 0, 0]], [1], [2**33, 2**31, 2]),
        ValueError,
        f"got [{2**33}, {2**31}, 2]",
    ),
    "indices of floats": (
        tf_sparse([[0.0, 0.0]], [1], [1, 2]),
        TypeError,
        "indices of feature 'f' must be integers, got dtype float64",
    ),
    "sparse values of two axes": (
        tf_sparse([[0, 0]], [[1]], [1, 2]),
        ValueError,
        "values of feature 'f' must have one axis, got shape (1, 1)",
    ),
}


@pytest.mark.parametrize(("ids", "kind", "text"), UNCLEAR.values(), ids=UNCLEAR)
def test_containers_without_a_clear_meaning(ids, kind, text):
    with pytest.raises(kind, match=re.escape(text)) as error:
        read(ids)
    assert "feature 'f'" in str(error.value)


def test_traced_ids():
    with pytest.raises(TypeError, match="'f' must be on the host.*outside jit"):
        jax.jit(lambda ids: read(ids).values)(jnp.arange(3))


def test_masked_weights():
    masked = np.ma.masked_array([1, 2], [0, 1])
    with pytest.raises(TypeError, match="Weights of feature 'f' must have no masked"):
        read(masked, "Weights")


def test_weights_come_with_their_container():
    ids = te.RaggedIds(values=[1], row_splits=[0, 1], weights=[2.5])
    assert read(ids).ids.weights == [2.5]
    dense = te.DenseIds(ids=[1], weights=[2.5])
    assert read(dense).ids.weights == [2.5]
    sparse = te.SparseIds(
        indices=[[0, 0]], values=[1], dense_shape=[1, 1], weights=[2.5]
    )
    assert read(sparse).ids.weights == [2.5]


@pytest.mark.parametrize(
    ("dtype", "integer", "real"),
    [
        (np.int8, True, True),
        (np.uint64, True, True),
        (ml_dtypes.int4, True, True),
        (np.float16, False, True),
        (ml_dtypes.bfloat16, False, True),
        (np.bool_, False, True),
        (np.complex64, False, False),
        (np.dtype("m8[s]"), False, False),
        (np.dtype("M8[s]"), False, False),
        (np.dtype("U3"), False, False),
        (np.dtype(object), False, False),
    ],
)
def test_kinds_of_numbers(dtype, integer, real):
    assert bool(is_integer(np.dtype(dtype))) == integer
    assert bool(is_real(np.dtype(dtype))) == real
