"""One batch in many forms is prepared alike."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_ids_of_three_axes_are_combined_into_an_output_shape():
    flat = [sample for row in NESTED for sample in row]
    expected = te.RaggedIds.from_lists(flat)
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
