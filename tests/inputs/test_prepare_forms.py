"""One batch in many forms is prepared alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.inputs.prepare_cases import (
    PADDING,
    dense,
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
