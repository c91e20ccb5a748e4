"""One batch in many forms is prepared alike."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import tpu_embedding as te
from tests.inputs.prepare_cases import (
    PADDING,
    dense,
    plan_of,
    prepare,
    ragged,
    sparse,
)

LISTS = [[1, 2], [], [3]]
LISTS_OF_WEIGHTS = [[0.5, 1.5], [], [2.5]]
ROW_SPLITS = [0, 2, 2, 3]
FLAT_WEIGHTS = np.array([0.5, 1.5, 2.5])
INDICES = [[0, 0], [0, 1], [2, 3]]

RAGGED_FORMS = {
    "lists": (LISTS, LISTS_OF_WEIGHTS),
    "list of arrays": (
        [np.array(x, int) for x in LISTS],
        [np.array([0.5, 1.5]), [], [2.5]],
    ),
    "from_lists": (
        te.RaggedIds.from_lists(LISTS),
        te.RaggedIds.from_lists(LISTS_OF_WEIGHTS),
    ),
    "weights as ids": (ragged([1, 2, 3], ROW_SPLITS), ragged(FLAT_WEIGHTS, ROW_SPLITS)),
    "fields of tf.RaggedTensor": (
        types.SimpleNamespace(
            values=jnp.array([1, 2, 3]), row_splits=np.array(ROW_SPLITS)
        ),
        types.SimpleNamespace(values=FLAT_WEIGHTS, row_splits=np.array(ROW_SPLITS)),
    ),
    "sparse, unsorted": (
        sparse(INDICES[::-1], [3, 2, 1]),
        sparse(INDICES[::-1], FLAT_WEIGHTS[::-1]),
    ),
    "sparse, weights within": (
        dataclasses.replace(sparse(INDICES, [1, 2, 3]), weights=FLAT_WEIGHTS),
        None,
    ),
    "matrix of interactions": (
        te.RaggedIds.from_scipy(
            scipy.sparse.csr_array([[0, 0.5, 1.5, 0], [0, 0, 0, 0], [0, 0, 0, 2.5]])
        ),
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
    "lists": ([[1, 2], [3, PADDING]], [[0.5, 1], [2, 0]]),
    "jax": (jnp.array([[1, 2], [3, PADDING]]), jnp.array([[0.5, 1], [2, 0]])),
    "half": (np.array([[1, 2], [3, PADDING]]), np.float16([[0.5, 1], [2, 0]])),
    "bfloat16": (
        np.array([[1, 2], [3, PADDING]]),
        jnp.array([[0.5, 1], [2, 0]], jnp.bfloat16),
    ),
    "masked": (
        np.ma.masked_array([[1, 2], [3, 4]], [[0, 0], [0, 1]]),
        [[0.5, 1], [2, 0]],
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


NESTED = [[[1, 2], []], [[], [3]], [[4], [5, 6]]]


@pytest.mark.parametrize("form", ["lists", "ragged tensor", "sparse"])
def test_ids_of_three_axes_are_combined_into_an_output_shape(form):
    flat = [sample for row in NESTED for sample in row]
    expected = te.RaggedIds.from_lists(flat)
    match form:
        case "lists":
            ids = NESTED
        case "ragged tensor":
            inner = types.SimpleNamespace(
                values=expected.values, row_splits=expected.row_splits
            )
            ids = types.SimpleNamespace(values=inner, row_splits=np.array([0, 2, 4, 6]))
        case "sparse":
            places = [
                [i, j, k]
                for i, row in enumerate(NESTED)
                for j, sample in enumerate(row)
                for k in range(len(sample))
            ]
            ids = sparse(places, expected.values, (3, 2, 4))
    prepared = prepare(ids, output_shape=(3, 2))
    of_samples = prepare(expected, output_shape=(3, 2))
    jax.tree.map(np.testing.assert_array_equal, prepared, of_samples)
    shapes = te.functional.activation_shapes(
        {"the_feature": prepared}, plan_of(output_shape=(3, 2))
    )
    assert shapes["the_feature"].shape == (3, 2, 4)


@pytest.mark.parametrize("form", ["coo", "csr", "dok"])
def test_scipy_matrices_of_any_format(form):
    places = ([0, 0, 1], [3, 3, 0])
    matrix = scipy.sparse.coo_array((np.array([0.5, 1, 2]), places), shape=(2, 4))
    ids = te.RaggedIds.from_scipy(matrix.asformat(form))
    # Equal places of a COO matrix are summed.
    assert ids.values.tolist() == [3, 0]
    assert ids.row_splits.tolist() == [0, 1, 2]
    assert ids.weights.tolist() == [1.5, 2]
    assert te.RaggedIds.from_scipy(matrix.astype(bool)).weights is None


@pytest.mark.parametrize("kind", [te.RaggedIds, te.SparseIds])
def test_from_scipy_takes_sparse_matrices(kind):
    with pytest.raises(TypeError, match="two axes, got"):
        kind.from_scipy(np.eye(2))
