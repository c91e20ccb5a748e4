"""What the host-side preparation accepts, and what the step makes of it."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

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

# What is accepted.

BEYOND = {
    "int64": (
        np.array([2**32 + 3, 2**31, 10, -1, -(2**40), PADDING, 5]),
        [9, 9, 9, 0, 0, PADDING, 5],
    ),
    "uint64": (np.array([2**63 + 3, 10, PADDING, 5], np.uint64), [9, 9, PADDING, 5]),
    "uint32": (np.array([2**32 - 1, 10, PADDING, 5], np.uint32), [9, 9, PADDING, 5]),
    "int32": (np.array([10, -1, PADDING - 1, PADDING]), [9, 0, 9, PADDING]),
    "int8": (np.array([10, -1, 5], np.int8), [9, 0, 5]),
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
        # Ragged ids need no padding, so the number is an id beyond the table.
        clipped = np.where(np.equal(clipped, PADDING), VOCABULARY_SIZE - 1, clipped)
    assert prepared.dtype == np.int32
    if policy == "clip":
        # The rest of clipping happens in the step, which counts.
        padding = prepared == PADDING
        prepared = np.where(padding, PADDING, np.clip(prepared, 0, 9))
        np.testing.assert_array_equal(prepared, clipped)
        return
    is_padding = (ids == PADDING) & (container == "dense")
    is_inside = ids < VOCABULARY_SIZE
    if np.issubdtype(ids.dtype, np.signedinteger):
        is_inside &= ids >= 0
    np.testing.assert_array_equal(prepared == PADDING, is_padding)
    np.testing.assert_array_equal(
        (prepared >= 0) & (prepared < VOCABULARY_SIZE), is_inside
    )
    np.testing.assert_array_equal(prepared[is_inside], ids[is_inside])


def test_weights_of_the_nest_win():
    prepared = prepare(dense([1], np.array([2.0])), np.array([3.0]))
    assert prepared.weights.tolist() == [3]


def test_arguments_are_not_changed():
    ids = ragged([1, 2**40], [0, 1, 2], np.ones(2))
    before = jax.tree.map(np.copy, ids)
    prepare(ids, out_of_range_ids="clip")
    jax.tree.map(np.testing.assert_array_equal, ids, before)


# The prepared batch and the step.


def init(plan):
    return te.functional.init_tables(plan, jax.random.key(0))


# Ids, options of the feature, type and field of the error, code that it shows.
REFUSED_BY_SHAPE = {
    "RaggedIds": (RAGGED, {}, TypeError, "Feature", "te.inputs.prepare_features"),
    "SparseIds": (SPARSE, {}, TypeError, "Feature", "te.inputs.prepare_features"),
    "other shards": (prepare(RAGGED, num_devices=3), {}, ValueError, "Feature", "2"),
    "masked": (np.ma.masked_array([1], [1]), {}, TypeError, "Ids", ".filled("),
    "strings": (np.array(["a"]), {}, TypeError, "Ids", "te.inputs.hash_ids"),
    "list of weights": (dense([1], [1.0]), {}, TypeError, "Weights", "prepare"),
}


@pytest.mark.parametrize(
    ("ids", "options", "kind", "part", "fix"),
    REFUSED_BY_SHAPE.values(),
    ids=REFUSED_BY_SHAPE,
)
def test_shapes_that_a_step_refuses(ids, options, kind, part, fix):
    plan = plan_of(**options)
    with rejects(kind, field="'the_feature'", fix=fix) as error:
        te.functional.activation_shapes({"the_feature": ids}, plan)
    assert error.value.field.startswith(part)


def test_samples_without_places_are_zero():
    plan = plan_of()
    ids = {"the_feature": prepare(np.zeros((4, 0), int))}
    activations = te.functional.lookup(init(plan), ids, plan).activations["the_feature"]
    np.testing.assert_array_equal(activations, np.zeros((4, 4)))


def test_wide_ids_outside_jit_read_no_other_row():
    plan = plan_of(2)
    tables = init(plan)
    ids = np.array([2**32 + 3, 2**31, -(2**32) + 3, 2**62, -1, 3, PADDING, 9])
    result = te.functional.lookup(tables, {"the_feature": ids}, plan)
    assert result.stats.out_of_range["the_feature"] == 5
    expected = np.zeros((8, 4), np.float32)
    table = te.functional.unstack_tables(tables, plan)["table"]
    expected[5], expected[7] = table[3], table[9]
    np.testing.assert_array_equal(result.activations["the_feature"], expected)
    unsigned = np.where(ids < 0, 2**64 - 1, ids.astype(np.uint64)).astype(np.uint64)
    result = te.functional.lookup(tables, {"the_feature": unsigned}, plan)
    assert result.stats.out_of_range["the_feature"] == 5
    np.testing.assert_array_equal(result.activations["the_feature"], expected)


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
