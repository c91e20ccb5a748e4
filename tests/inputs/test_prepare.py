"""What the host-side preparation accepts, and how a batch is placed."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tpu_embedding as te
from tests.inputs.prepare_cases import (
    PADDING,
    RAGGED,
    VOCABULARY_SIZE,
    dense,
    plan_of,
    prepare,
    ragged,
)
from tests.rejections import rejects

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
