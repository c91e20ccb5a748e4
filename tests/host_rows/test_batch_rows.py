"""The rows that the host finds for a batch are the rows that the devices read."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.random_configurations import ABSENT, Example, features_of, tables_on
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.host_rows.batch_rows import rows_of_batch
from tpu_embedding.inputs.shard_inputs import (
    fill_up,
    parse_batch,
    to_feature_input,
)
from tpu_embedding.lookup._forward import rows_and_poolings
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.types import PADDING_ROW_ID as P

BATCHES = 5  # per example; compiling takes longer than running


def rows_on_devices(batch, plan):
    """Returns the rows that the stages read, sorted, by stack; without 64 bits."""
    parsed = parse_batch(batch, plan)
    plan = parsed.plan
    filled = [fill_up(ids, plan.num_shards) for ids in parsed.row_numbers()]
    rows = [np.unique(array) for array in read_rows(filled, parsed.shapes, plan)]
    found = {stack.name: [] for stack in plan.stacks}
    for array, feature in zip(rows, plan.features, strict=True):
        name = plan.stacks[feature.stack_index].name
        found[name] += (array[array != P] + feature.row_offset).tolist()
    return {name: sorted(set(rows)) for name, rows in found.items()}


@functools.partial(jax.jit, static_argnames=("shapes", "plan"))
def read_rows(filled, shapes, plan):
    def read_shard(filled):
        inputs = [
            to_feature_input(ids, shape, plan.sample_axes)
            for ids, shape in zip(filled, shapes, strict=True)
        ]
        rows = []
        for feature_input, feature in zip(inputs, plan.features, strict=True):
            rows.append(rows_and_poolings([feature_input], [feature])[0])
        return rows

    return on_shards(
        read_shard, plan, in_specs=plan.sample_spec, out_specs=plan.sample_spec
    )(filled)


def rows_on_host(batch, plan):
    """Returns the rows that the host finds, sorted, by stack."""
    found = rows_of_batch(batch, plan, {stack.name for stack in plan.stacks})
    for stack in plan.stacks:
        by_shard, found[stack.name] = found[stack.name], []
        assert len(by_shard) == stack.num_shards
        for shard, local in enumerate(by_shard):
            assert local.dtype == np.int32 and local.ndim == 1
            assert local.tolist() == sorted(set(local.tolist()))
            found[stack.name] += (local * stack.num_shards + shard).tolist()
        assert all(0 <= row < stack.num_rows for row in found[stack.name])
        found[stack.name].sort()
    return found


@st.composite
def examples(draw):
    """Draws a layer, its batches, and the arrays that unprepared ids are held in."""
    is_prepared = draw(st.sampled_from([True, True, False]))
    tables = draw(tables_on(st.none()))
    feature = features_of(tables, draw(st.integers(1, 20)), is_prepared)
    features = draw(st.lists(feature, min_size=1, max_size=4))
    form = draw(st.sampled_from(["numpy", "jax", "64 bits"]))
    if form == "64 bits" and not is_prepared:
        features = [dataclasses.replace(f, has_foreign_ids=True) for f in features]
    if not any(f.is_given for f in features):
        features[0] = dataclasses.replace(features[0], is_given=True)
    example = Example(
        mesh="", options={}, nest="deep", is_prepared=is_prepared, features=features
    )
    return example, form


def check_example(drawn, num_devices):
    example, form = drawn
    config = example.nested([feature.config for feature in example.features])
    plan = te.make_plan(config, mesh_of(num_devices))
    for batch_number in range(BATCHES):
        batch, weights = zip(
            *(
                feature.inputs(feature.rows(batch_number))
                if feature.is_given
                else (ABSENT, ABSENT)
                for feature in example.features
            ),
            strict=True,
        )
        batch = example.nested(batch)
        if example.is_prepared:
            batch = te.inputs.prepare_features(batch, plan, example.nested(weights))
        if form == "jax":
            batch = jax.tree.map(jnp.asarray, batch)
        assert rows_on_host(batch, plan) == rows_on_devices(batch, plan)


@pytest.mark.parametrize("num_devices", quick_cases([1, 2, 3, 8]))
def test_random_batches(num_devices):
    @hypothesis.settings(max_examples=12)
    @hypothesis.given(drawn=examples())
    def check(drawn):
        check_example(drawn, num_devices)

    check()


def dense(ids, weights):
    return te.DenseIds(ids=np.array(ids), weights=np.array(weights))


WEIGHTED = dict(combiner="mean", validate_weights_and_indices=True)
DROP = dict(out_of_range_ids="drop")
EMPTY_OR_ONE = [[P, P], [1, 12]]
RAGGED = te.RaggedIds.from_lists(
    [[1, 2, 3], [], [12], [4, 5], [6]], [[1, 0, -1], [], [1], [1, 2], [0]]
)
CASES = {
    "no position, default": (
        dict(default_id=4),
        np.zeros((5, 0), np.int32),
        [4],
    ),
    "samples that fill up": (dict(default_id=4), np.full(9, 1, np.uint8), [1]),
    "outside": ({}, np.array([-1, 10, 9, P]), [9]),
    "clip": (dict(out_of_range_ids="clip"), np.array([-1, 10, 5, P]), [0, 5, 9]),
    "clip 64 bits": (
        dict(out_of_range_ids="clip"),
        np.array([-(2**40), 2**40, 5, P]),
        [0, 5, 9],
    ),
    "drop unsigned": ({}, np.array([2**64 - 1, 2**32 + 3, 5], np.uint64), [5]),
    "int4": (
        dict(out_of_range_ids="clip"),
        jnp.array([-1, 7, 5], jnp.int4),
        [0, 5, 7],
    ),
    "default": (dict(default_id=4), np.array(EMPTY_OR_ONE), [1, 4]),
    "default outside": (
        DROP | dict(default_id=4),
        np.array([[11, -1], [1, 12]]),
        [1, 4],
    ),
    "default and clip": (
        dict(default_id=4, out_of_range_ids="clip"),
        np.array([[11, -1], [1, 12]]),
        [0, 1, 9],
    ),
    "weights": (WEIGHTED, dense([1, 2, 3, 4], [0.5, 0, -1, np.nan]), [1, 4]),
    "weights of sum": (
        WEIGHTED | dict(combiner="sum"),
        dense([1, 2, 3, 4], [0.5, 0, -1, np.nan]),
        [1, 2, 3, 4],
    ),
    "weights that float32 rounds to zero": (WEIGHTED, dense([1, 2], [1e-60, 1]), [2]),
    "infinite weights": (WEIGHTED, dense([1, 2], [1e300, -1e300]), [1]),
    "weights make a sample empty": (
        WEIGHTED | dict(default_id=4),
        dense([[1, 2], [3, P]], [[1, 0], [0, 1]]),
        [1, 4],
    ),
    "sequence": (
        dict(max_sequence_length=2),
        np.array([[1, P, 3], [P, 2, 4]]),
        [1, 2],
    ),
    "samples on two axes": (
        dict(output_shape=(2, 3), default_id=8),
        np.array([[[1, P], [2, 3], [P, P]], [[4, 5], [6, 7], [0, 1]]]),
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
    ),
    "each id": (dict(output_shape=(1, 2, 3)), np.arange(6).reshape(1, 2, 3), range(6)),
    "weights of a sequence by shape": (
        WEIGHTED | dict(output_shape=(2, 2)),
        dense([[1, 2, 3], [4, 5, 6]], np.zeros((2, 3))),
        [1, 2, 4, 5],
    ),
    "ragged": (DROP | dict(combiner="sum"), RAGGED, [1, 2, 3, 4, 5, 6]),
    "ragged weights": (DROP | WEIGHTED, RAGGED, [1, 4, 5]),
    "ragged, default": (DROP | WEIGHTED | dict(default_id=0), RAGGED, [0, 1, 4, 5]),
    "ragged, clip": (WEIGHTED | dict(out_of_range_ids="clip"), RAGGED, [1, 4, 5, 9]),
    "ragged sequence": (DROP | dict(output_shape=(5, 2)), RAGGED, [1, 2, 4, 5, 6]),
    # Samples that fill up read no default.
    "ragged that fills up": (
        dict(default_id=4),
        te.RaggedIds.from_lists([[1], [2, 3], [1], [5]]),
        [1, 2, 3, 5],
    ),
}


@pytest.mark.parametrize("num_devices", quick_cases([1, 2, 3, 8], "2"))
@pytest.mark.parametrize("case", CASES)
def test_case(case, num_devices):
    options, ids, expected = CASES[case]
    # The second table of its stack.
    config = {
        f"f{i}": te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=10, dim=4, name=f"t{i}"), **options
        )
        for i in range(2)
    }
    plan = te.make_plan(config, mesh_of(num_devices))
    offset = plan.features[1].row_offset
    batch = {"f1": ids}
    if isinstance(ids, te.RaggedIds):
        batch = te.inputs.prepare_features(batch, plan)
    with np.errstate(over="ignore"):  # as the weights become float32
        assert rows_on_devices(batch, plan) == {
            "stack_0": [offset + i for i in expected]
        }
    assert rows_on_host(batch, plan) == {"stack_0": [offset + i for i in expected]}


@pytest.mark.parametrize("weight", [1e-40, -1e-40])
def test_weights_below_the_smallest_normal_float(weight):
    """Some devices flush them to zero, so both possible rows are found."""
    table = te.TableConfig(vocabulary_size=10, dim=4, name="t", combiner="mean")
    feature = te.FeatureConfig(
        table=table, default_id=4, validate_weights_and_indices=True
    )
    plan = te.make_plan(feature, mesh_of(1))
    batch = dense([1], [weight])
    found = rows_on_host(batch, plan)["stack_0"]
    assert set(rows_on_devices(batch, plan)["stack_0"]) <= set(found)
    assert found == ([1, 4] if weight > 0 else [4])


def two_stacks():
    tables = [te.TableConfig(vocabulary_size=10, dim=d, name=f"t{d}") for d in (4, 8)]
    config = {table.name: te.FeatureConfig(table=table) for table in tables}
    return te.make_plan(config, mesh_of(2))


def test_only_the_named_stacks_are_read():
    plan = two_stacks()
    names = [plan.stacks[plan.features[i].stack_index].name for i in range(2)]
    batch = {"t4": np.array([1, 2]), "t8": "no ids"}
    found = rows_of_batch(batch, plan, [names[0]])
    assert {name: [rows.tolist() for rows in found[name]] for name in found} == {
        names[0]: [[1], [0]]
    }
    (nothing,) = rows_of_batch({"t4": batch["t4"]}, plan, [names[1]]).values()
    assert [len(rows) for rows in nothing] == [0, 0]


def test_stacks_of_all_32_bits():
    """Numbers of rows and shards together take 32 bits."""
    table = te.TableConfig(vocabulary_size=2**31 - 2, dim=4, name="t")
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(3))
    last = 2**31 - 3
    ids = np.array([0, 1, 2, last - 2, last - 1, last, last])
    (rows,) = rows_of_batch(ids, plan, ["stack_0"]).values()
    assert [local.tolist() for local in rows] == [[0, last // 3]] * 3


def test_rows_are_not_a_view_of_the_batch():
    plan = two_stacks()
    ids = np.array([1, 2], np.int32)
    for arrays in rows_of_batch({"t4": ids}, plan, ["stack_0", "stack_1"]).values():
        assert not any(np.shares_memory(array, ids) for array in arrays)


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (te.RaggedIds.from_lists([[1]]), TypeError),
        (
            te.SparseIds(
                indices=np.array([[0, 0]]),
                values=np.array([1]),
                dense_shape=np.array([1, 1]),
            ),
            TypeError,
        ),
        ([1, 2], TypeError),
        (np.array([1.0]), TypeError),
        (np.ma.masked_array([1], [True]), TypeError),
        (np.zeros((2, 3, 4), int), ValueError),
    ],
)
def test_rejects_what_the_step_rejects(ids, error):
    plan = two_stacks()
    with rejects(error):
        te.functional.activation_shapes({"t4": ids}, plan)
    with rejects(error):
        rows_of_batch({"t4": ids}, plan, ["stack_0", "stack_1"])
