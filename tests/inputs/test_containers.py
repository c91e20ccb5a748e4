"""Containers of ids: read if their meaning is clear, else refused with a way out."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tpu_embedding.inputs.containers import read_ids
from tpu_embedding.types import batch_shape_of


def read(ids, what="Ids"):
    return read_ids(ids, "feature 'f'", what)


def shown(ids):
    """Returns a container as lists, with its batch shape."""
    result = read(ids)
    parts = [
        np.asarray(getattr(result, field.name)).tolist()
        for field in dataclasses.fields(result)
        if field.name != "weights"
    ]
    return type(result).__name__, *parts, batch_shape_of(result)


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


READ = {
    "array": (np.arange(3), ("DenseIds", [0, 1, 2], (3,))),
    "matrix": (np.ones((2, 1), int), ("DenseIds", [[1], [1]], (2,))),
    "list": ([1, np.int64(2)], ("DenseIds", [1, 2], (2,))),
    "lists": ([[1, 2], [3, 4]], ("DenseIds", [[1, 2], [3, 4]], (2,))),
    "empty list": ([], ("DenseIds", [], (0,))),
    "uneven lists": ([[1, 2], [], [3]], ("RaggedIds", [1, 2, 3], [0, 2, 2, 3], (3,))),
    "uneven arrays": (
        [np.arange(2), jnp.arange(1)],
        ("RaggedIds", [0, 1, 0], [0, 2, 3], (2,)),
    ),
    "column of lists": (
        objects([1, 2], [3]),
        ("RaggedIds", [1, 2, 3], [0, 2, 3], (2,)),
    ),
    "ragged": (
        te.RaggedIds(values=[1, 2], row_splits=[0, 2]),
        ("RaggedIds", [1, 2], [0, 2], (1,)),
    ),
    "ragged tensor": (
        tf_ragged(np.array([1, 2]), [0, 0, 2]),
        ("RaggedIds", [1, 2], [0, 0, 2], (2,)),
    ),
    "sparse tensor": (
        tf_sparse([[0, 1], [2, 0]], [5, 6], [3, 2]),
        ("SparseIds", [[0, 1], [2, 0]], [5, 6], [3, 2], (3,)),
    ),
    "uneven strings": (
        [["a"], [], [b"b", "c"]],
        ("RaggedIds", ["a", b"b", "c"], [0, 1, 1, 3], (3,)),
    ),
}


@pytest.mark.parametrize(("ids", "expected"), READ.values(), ids=READ)
def test_containers_of_clear_meaning(ids, expected):
    assert shown(ids) == expected


def test_traced_ids():
    with rejects(TypeError, field="'f'", fix="outside jit"):
        jax.jit(lambda ids: read(ids).ids)(jnp.arange(3))


@pytest.mark.parametrize(
    "ids",
    [
        te.RaggedIds(values=[1], row_splits=[0, 1], weights=[2.5]),
        te.DenseIds(ids=[1], weights=[2.5]),
        te.SparseIds(indices=[[0, 0]], values=[1], dense_shape=[1, 1], weights=[2.5]),
    ],
    ids=["ragged", "dense", "sparse"],
)
def test_weights_come_with_their_container(ids):
    assert read(ids).weights == [2.5]


def test_ragged_ids_from_lengths():
    weights = np.array([1.0, 2.0, 3.0], np.float32)
    ids = te.RaggedIds.from_lengths(np.array([2**40, 7, 7]), [2, 0, 1], weights)
    assert ids.values.tolist() == [2**40, 7, 7] and ids.weights is weights
    assert ids.row_splits.tolist() == [0, 2, 2, 3]
    assert te.RaggedIds.from_lengths([], []).row_splits.tolist() == [0]
    for wrong in (([2, 2], None), ([4, -1], None), ([[1, 2]], None), ([2, 1], [1.0])):
        with rejects(fix="RaggedIds.from_lengths: lengths"):
            te.RaggedIds.from_lengths([1, 2, 3], *wrong)
    with rejects(TypeError, fix="RaggedIds.from_lengths: lengths"):
        te.RaggedIds.from_lengths([1, 2, 3], [1.5, 1.5])
