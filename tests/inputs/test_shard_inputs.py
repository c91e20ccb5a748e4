"""Ids passed to a lookup, prepared or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.inputs.prepare_cases import (
    PADDING,
    RAGGED,
    SPARSE,
    VOCABULARY_SIZE,
    dense,
    plan_of,
    prepare,
    ragged,
)
from tests.rejections import rejects
from tests.tiers import quick_cases

MATRIX, DEEP = np.zeros((6, 2), int), np.zeros((2, 3, 5), int)


@pytest.mark.parametrize(
    ("ids", "options", "expected"),
    [
        (np.zeros(7, int), {}, (7, 4)),
        (np.zeros((1, 3), int), {}, (1, 4)),
        (np.zeros((7, 0), int), {}, (7, 4)),
        (np.zeros((7, 3), int), dict(max_sequence_length=5), (7, 5, 4)),
        (MATRIX, dict(output_shape=(2, 3)), (2, 3, 4)),
        (MATRIX, dict(output_shape=(12,)), (12, 4)),
        (MATRIX, dict(output_shape=(6, 5)), (6, 5, 4)),
        (DEEP, dict(output_shape=(6,)), (6, 4)),
        (DEEP, dict(output_shape=(30,)), (30, 4)),
        (prepare(RAGGED), {}, (3, 4)),
        (prepare(RAGGED), dict(max_sequence_length=5), (3, 5, 4)),
        (prepare(RAGGED), dict(output_shape=(3, 2)), (3, 2, 4)),
    ],
)
def test_shapes_of_activations(ids, options, expected):
    shapes = te.functional.activation_shapes({"the_feature": ids}, plan_of(**options))
    assert shapes["the_feature"].shape == expected


# Ids, type and field of the error, code that it shows.
REFUSED_BY_SHAPE = {
    "RaggedIds": (RAGGED, TypeError, "Feature", "te.inputs.prepare_features"),
    "SparseIds": (SPARSE, TypeError, "Feature", "te.inputs.prepare_features"),
    "other shards": (prepare(RAGGED, num_devices=3), ValueError, "Feature", "2"),
    "masked": (np.ma.masked_array([1], [1]), TypeError, "Ids", ".filled("),
    "strings": (np.array(["a"]), TypeError, "Ids", "te.inputs.hash_ids"),
    "list of weights": (dense([1], [1.0]), TypeError, "Weights", "prepare"),
}


@pytest.mark.parametrize(
    ("ids", "kind", "part", "fix"), REFUSED_BY_SHAPE.values(), ids=REFUSED_BY_SHAPE
)
def test_shapes_that_a_step_refuses(ids, kind, part, fix):
    with rejects(kind, field="'the_feature'", fix=fix) as error:
        te.functional.activation_shapes({"the_feature": ids}, plan_of())
    assert error.value.field.startswith(part)


WIDE = [2**32 + 3, 2**31, 3 - 2**32, 2**62, -(2**63), -1, 3, PADDING - 1, PADDING, 9]
UNSIGNED = [2**32 + 3, 2**31, 2**64 - 1, 3, PADDING - 1, PADDING, 9]
INTEGERS = {
    "int8": np.array([3, 5, -1, -128], np.int8),
    "uint8": np.array([3, 255], np.uint8),
    "int32": np.array([3, -1, PADDING, PADDING - 1], np.int32),
    "int64": np.array(WIDE),
    "uint64": np.array(UNSIGNED, np.uint64),
    "jax-int16": jnp.array([-1, 7], jnp.int16),
    "jax-uint32": jnp.array([3, PADDING, 2**31, 2**32 - 1], jnp.uint32),
}


@pytest.mark.parametrize(
    "form", quick_cases(["raw", "dense", "ragged"], "raw", "dense")
)
@pytest.mark.parametrize("policy", ["drop", "clip"])
@pytest.mark.parametrize("ids", INTEGERS.values(), ids=INTEGERS)
def test_ids_of_any_integer_type_read_no_other_row(ids, policy, form):
    plan, features = plan_of(out_of_range_ids=policy), ids
    if form != "raw":
        one_each = ragged(ids, np.arange(len(ids) + 1))
        given = one_each if form == "ragged" else ids
        features = prepare(given, out_of_range_ids=policy)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    result = te.functional.lookup(tables, {"the_feature": features}, plan)
    rows = te.functional.unstack_tables(tables, plan)["table"]
    expected, num_outside = np.zeros((len(ids), 4), np.float32), 0
    for i, number in enumerate(ids.tolist()):
        # Ragged ids of 64 bits need no padding, so the number is outside the table.
        may_pad = form != "ragged" or ids.dtype == np.int32
        if number == PADDING and may_pad:
            continue
        is_outside = not 0 <= number < VOCABULARY_SIZE
        num_outside += is_outside
        if policy == "clip" or not is_outside:
            expected[i] = rows[np.clip(number, 0, VOCABULARY_SIZE - 1)]
    np.testing.assert_array_equal(result.activations["the_feature"], expected)
    assert result.stats.out_of_range["the_feature"] == num_outside


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros((3, 0), int),
        te.DenseIds(ids=np.zeros((3, 0), int), weights=np.zeros((3, 0))),
        te.inputs.ShardedRaggedIds(
            values=np.zeros((2, 0), np.int32),
            row_splits=np.zeros((2, 3), np.int32),
            weights=np.zeros((2, 0), np.float32),
            batch_size=3,
        ),
    ],
    ids=["array", "weighted", "ragged"],
)
def test_samples_without_places_are_zero(ids):
    plan = plan_of()
    tables = te.functional.init_tables(plan, jax.random.key(0))
    activations = te.functional.lookup(tables, {"the_feature": ids}, plan).activations
    np.testing.assert_array_equal(activations["the_feature"], np.zeros((3, 4)))
