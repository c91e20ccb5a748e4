"""Batches in many forms are prepared alike, and placed on devices."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tpu_embedding as te
from tests.inputs.prepare_cases import (
    PADDING,
    RAGGED,
    bags_of,
    dense,
    plan_of,
    prepare,
    ragged,
    sparse,
)
from tests.rejections import rejects

# Name: ids, and the ids of each sample.
CONTAINERS = {
    "array": (np.arange(3), [[0], [1], [2]]),
    "matrix": (np.ones((2, 1), int), [[1], [1]]),
    "list": ([1, np.int64(2)], [[1], [2]]),
    "lists": ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    "uneven arrays": ([np.arange(2), jnp.arange(1)], [[0, 1], [0]]),
    "column of lists": (np.fromiter([[1, 2], [3]], object, 2), [[1, 2], [3]]),
    "lists as fields": (te.RaggedIds(values=[1, 2], row_splits=[0, 2]), [[1, 2]]),
    "tf.RaggedTensor": (
        types.SimpleNamespace(values=np.array([1, 2]), row_splits=np.array([0, 0, 2])),
        [[], [1, 2]],
    ),
    "tf.SparseTensor": (
        types.SimpleNamespace(
            indices=np.array([[0, 1], [2, 0]]),
            values=np.array([5, 6]),
            dense_shape=np.array([3, 2]),
        ),
        [[5], [], [6]],
    ),
}


@pytest.mark.parametrize(("ids", "expected"), CONTAINERS.values(), ids=CONTAINERS)
def test_containers_of_clear_meaning(ids, expected):
    assert bags_of(prepare(ids), len(expected)) == expected


def test_traced_ids():
    with rejects(TypeError, field="'the_feature'", fix="outside jit"):
        jax.jit(prepare)(jnp.arange(3))


LISTS = [[1, 2], [], [3]]
LISTS_OF_WEIGHTS = [[0.5, 1.5], [], [2.5]]
ROW_SPLITS = [0, 2, 2, 3]
FLAT_WEIGHTS = np.array([0.5, 1.5, 2.5])
INDICES = [[0, 0], [0, 1], [2, 3]]

RAGGED_FORMS = {
    "lists": (LISTS, LISTS_OF_WEIGHTS),
    "weights as ids": (ragged([1, 2, 3], ROW_SPLITS), ragged(FLAT_WEIGHTS, ROW_SPLITS)),
    "sparse, unsorted": (
        sparse(INDICES[::-1], [3, 2, 1]),
        sparse(INDICES[::-1], FLAT_WEIGHTS[::-1]),
    ),
    "sparse, weights within": (
        dataclasses.replace(sparse(INDICES, [1, 2, 3]), weights=FLAT_WEIGHTS),
        None,
    ),
}


@pytest.mark.parametrize("form", RAGGED_FORMS)
def test_forms_of_one_ragged_batch(form):
    ids, weights = RAGGED_FORMS[form]
    prepared = prepare(ids, weights)
    expected = prepare(ragged([1, 2, 3], ROW_SPLITS, FLAT_WEIGHTS))
    assert jax.tree.structure(prepared) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, prepared, expected)


DENSE_FORMS = {
    "weights within": (
        dense([[1, 2], [3, PADDING]], np.array([[0.5, 1], [2, 0]])),
        None,
    ),
    "lists": ([[1, 2], [3, PADDING]], [[0.5, 1], [2, 0]]),
    "jax": (jnp.array([[1, 2], [3, PADDING]]), jnp.array([[0.5, 1], [2, 0]])),
    "half": (np.array([[1, 2], [3, PADDING]]), np.float16([[0.5, 1], [2, 0]])),
    "bfloat16": (
        np.array([[1, 2], [3, PADDING]]),
        jnp.array([[0.5, 1], [2, 0]], jnp.bfloat16),
    ),
    "weights as ids": (
        dense([[1, 2], [3, PADDING]]),
        te.DenseIds(ids=[[0.5, 1], [2, 0]]),
    ),
}


@pytest.mark.parametrize("form", DENSE_FORMS)
def test_forms_of_one_dense_batch(form):
    prepared = prepare(*DENSE_FORMS[form])
    assert (prepared.ids.dtype, prepared.weights.dtype) == (np.int32, np.float32)
    assert prepared.ids.tolist() == [[1, 2], [3, PADDING]]
    assert prepared.weights.tolist() == [[0.5, 1], [2, 0]]


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


def test_lists_of_weights_for_ragged_ids_of_equal_lengths():
    """As lists alone, they would be a matrix of dense weights."""
    ids, lists = ragged([1, 2, 3, 4], [0, 2, 4]), [[0.5, 1.5], [2.5, 3.5]]
    expected = prepare(ragged([1, 2, 3, 4], [0, 2, 4], np.ravel(lists)))
    for weights in (lists, np.array(lists)):
        prepared = prepare(ids, weights)
        assert jax.tree.structure(prepared) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, prepared, expected)
    with rejects(field="Weights of feature 'the_feature'"):
        prepare(ids, [[1.0], [2.0]])


def test_weights_of_the_nest_win():
    prepared = prepare(dense([1], np.array([2.0])), np.array([3.0]))
    assert prepared.weights.tolist() == [3]


def test_arguments_are_not_changed():
    ids = ragged([1, 2**40], [0, 1, 2], np.ones(2))
    before = jax.tree.map(np.copy, ids)
    prepare(ids, out_of_range_ids="clip")
    jax.tree.map(np.testing.assert_array_equal, ids, before)


def test_shard_batch():
    plan, divides = plan_of(8), np.arange(16) % 10
    split, whole = PartitionSpec(("shard",)), PartitionSpec()
    batch = {
        "divides": (divides, split),
        "does_not": (np.arange(9), whole),
        "matrix": (np.zeros((8, 3)), split),
        "by_second_axis": (np.zeros((3, 8)), whole),
        "scalar": (np.float32(3), whole),
        "none": (None, None),
        "weighted": (dense(divides, np.ones(16, np.float32)), split),
        "ragged": (prepare(RAGGED, num_devices=8), split),
    }
    given = {name: value for name, (value, _) in batch.items()}
    placed = te.inputs.shard_batch(given, plan)
    assert jax.tree.structure(placed) == jax.tree.structure(given)
    jax.tree.map(np.testing.assert_array_equal, placed, given)
    for name, (_, spec) in batch.items():
        for leaf in jax.tree.leaves(placed[name]):
            assert leaf.sharding == NamedSharding(plan.mesh, spec)
    with rejects(field="shard_batch: batch", value=[0, 2**40]):
        te.inputs.shard_batch(np.array([0, 2**40]), plan)
