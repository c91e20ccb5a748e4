"""Keys, gains and scales of features, sample by sample as one would write them."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.lookup.stages import PADDING, plan_of
from tpu_embedding.lookup._flatten_to_owners import (
    FeatureInput,
    PoolingSpec,
    flatten,
    max_unique_ids,
)
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.plan.backends import FeatureBatch
from tpu_embedding.plan.features import FeaturePlan

VOCABULARY_SIZE = 7
IDS = [0, 6, 7, -1, PADDING, PADDING - 1, -(2**31), 3, 3, 5, PADDING, PADDING]
WEIGHTS = [1, -1, 2, 0.5, 1, 1, 1, 0, 0.25, -2, 0, 0]
CANCEL = [1, -1, 2, -2, 4, -4, 1, -1, 1, -1, 0, 0]
# The third sample is empty, and the last two places are unused.
SAMPLE_IDS = [0, 0, 1, 1, 1, 3, 3, 3, 3, 4, 5, 5]


def array(values, dtype=jnp.float32):
    return None if values is None else jnp.array(values, dtype)


def feature_input(form, weights=None):
    num_samples, valence = {"one": (12, 1), "many": (4, 3), "ragged": (5, 1)}[form]
    return FeatureInput(
        ids=array(IDS, jnp.int32),
        weights=array(weights),
        sample_ids=array(SAMPLE_IDS if form == "ragged" else None, jnp.int32),
        num_samples=num_samples,
        valence=valence,
    )


def feature_plan(
    policy="error", validates=True, combiner="sum", row_offset=0, size=VOCABULARY_SIZE
):
    table = te.TableConfig(vocabulary_size=size, dim=2, combiner=combiner, name="t")
    config = te.FeatureConfig(
        table=table,
        out_of_range_ids=policy,
        validate_weights_and_indices=validates,
        name="f",
    )
    return FeaturePlan(
        name="f", config=config, stack_index=0, row_offset=row_offset, num_rows=size
    )


def stack_of(num_shards, keeps_duplicates=False):
    stack = dataclasses.replace(plan_of(1, 11).stacks[0], num_shards=num_shards)
    optimizer = RowOptimizer(
        transformation=optax.identity(),
        duplicates="sequence" if keeps_duplicates else "sum",
    )
    return dataclasses.replace(stack, optimizer=optimizer)


def reference(given, feature, num_shards):
    """Returns keys, gains, scales and the count of ids outside the table."""
    config, combiner = feature.config, feature.config.table.combiner
    keys, gains, totals, outside = [], [], [0.0] * given.num_samples, 0
    for i, row in enumerate(np.asarray(given.ids).tolist()):
        is_used = 0 <= row < VOCABULARY_SIZE
        outside += row != PADDING and not is_used
        if config.out_of_range_ids == "clip" and row != PADDING:
            row, is_used = min(max(row, 0), VOCABULARY_SIZE - 1), True
        weight = 1.0 if given.weights is None else float(given.weights[i])
        if config.validate_weights_and_indices and combiner != "sum":
            is_used = is_used and weight > 0
        gain = weight if is_used else 0.0
        gains.append(gain)
        stack_row = row + feature.row_offset
        key = stack_row % num_shards * 11 + stack_row // num_shards
        keys.append(key if is_used else PADDING)
        sample = i % given.num_samples
        if given.sample_ids is not None:
            sample = int(given.sample_ids[i])
        if sample < given.num_samples:
            totals[sample] += gain if combiner == "mean" else gain**2
    if combiner == "sqrtn":
        totals = [math.sqrt(total) for total in totals]
    scales = [1 / total if total else 0.0 for total in totals]
    return keys, gains, scales, outside


@pytest.mark.parametrize("weights", [None, WEIGHTS, CANCEL], ids=["1", "any", "cancel"])
@pytest.mark.parametrize("form", ["one", "many", "ragged"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_equals_reference(num_shards, form, weights):
    options = itertools.product(
        ["error", "drop", "clip"], [True, False], ["sum", "mean", "sqrtn"], [0, 4]
    )
    features = [feature_plan(*option) for option in options]
    given = feature_input(form, weights)
    inputs = [given] * len(features)
    keys, poolings, out_of_range = flatten(inputs, features, stack_of(num_shards))
    keys = np.asarray(keys).reshape(len(features), -1)
    for i, feature in enumerate(features):
        expected, gains, scales, outside = reference(given, feature, num_shards)
        np.testing.assert_array_equal(keys[i], expected)
        assert out_of_range[i] == outside
        pooling, combiner = poolings[i], feature.config.table.combiner
        if weights is None:
            assert pooling.gains is None
        else:
            np.testing.assert_array_equal(pooling.gains, gains)
        if combiner == "sum" or (weights is None and form == "one"):
            assert pooling.scales is None
        else:
            # One rounding each of the sum, the root and the quotient.
            np.testing.assert_allclose(pooling.scales, scales, rtol=3e-7)
        assert pooling.num_samples == given.num_samples
        assert pooling.valence == given.valence
        assert (pooling.sample_ids is None) == (form != "ragged")


def test_features_follow_each_other():
    features = [feature_plan(), feature_plan(row_offset=4)]
    inputs = [feature_input("one"), feature_input("many")]
    keys, poolings, _ = flatten(inputs, features, stack_of(3))
    first, second = (
        reference(given, feature, 3)[0]
        for given, feature in zip(inputs, features, strict=True)
    )
    assert keys.tolist() == first + second
    assert [pooling.valence for pooling in poolings] == [1, 3]


@pytest.mark.parametrize("form", ["one", "many", "ragged"])
def test_occurrences_lie_in_the_order_of_samples(form):
    given = feature_input(form, WEIGHTS)
    keys, (pooling,), (outside,) = flatten(
        [given], [feature_plan()], stack_of(3, keeps_duplicates=True)
    )
    expected, gains, _, num_outside = reference(given, feature_plan(), 3)
    sample_ids = SAMPLE_IDS if form == "ragged" else None
    if form == "many":
        # Sample 0 has places 0, 4 and 8, and so on.
        order = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
        expected, gains = [expected[i] for i in order], [gains[i] for i in order]
        sample_ids = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert keys.tolist() == expected
    assert pooling.gains.tolist() == gains
    assert outside == num_outside
    if sample_ids is None:
        assert pooling.sample_ids is None
    else:
        assert pooling.sample_ids.tolist() == sample_ids
    assert pooling.num_samples == given.num_samples
    assert pooling.valence == 1


def test_occurrences_without_weights():
    _, (pooling,), _ = flatten(
        [feature_input("many")], [feature_plan()], stack_of(3, keeps_duplicates=True)
    )
    assert pooling.gains is None
    assert pooling.num_ids == 12


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ([(0, 100)], 12),
        ([(0, 12)], 12),
        ([(0, 11)], 11),
        ([(0, 13), (0, 13)], 13),
        ([(0, 24), (0, 24)], 24),
        ([(0, 100), (100, 5)], 17),
        ([(0, 100), (100, 5), (0, 100), (100, 5)], 29),
        ([(0, 3), (3, 3), (6, 100)], 18),
    ],
)
def test_bound_on_unique_ids(tables, expected):
    """Each feature has 12 ids; features of one table share its rows."""
    features = [feature_plan(row_offset=first, size=size) for first, size in tables]
    inputs = [feature_input("one")] * len(features)
    assert max_unique_ids(inputs, features, stack_of(3)) == expected
    stack = stack_of(3, keeps_duplicates=True)
    assert max_unique_ids(inputs, features, stack) == 12 * len(features)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_facts_for_the_choice_of_backends(is_ragged, is_weighted):
    pooling = PoolingSpec(
        gains=jnp.ones(12) if is_weighted else None,
        scales=None,
        sample_ids=array(SAMPLE_IDS, jnp.int32) if is_ragged else None,
        num_samples=4,
        valence=5,
    )
    assert pooling.num_ids == (12 if is_ragged else 20)
    assert pooling.batch_facts == FeatureBatch(
        num_ids=pooling.num_ids,
        num_samples=4,
        valence=5,
        is_ragged=is_ragged,
        is_weighted=is_weighted,
    )


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_of_zero_have_a_gradient_of_zero(combiner):
    """The root of their sum is not differentiated at 0."""
    feature = feature_plan("error", False, combiner, 0)

    def total(weights):
        given = feature_input("many", weights)
        _, (pooling,), _ = flatten([given], [feature], stack_of(1))
        return jnp.sum(pooling.scales)

    gradient = jax.grad(total)(jnp.zeros(len(WEIGHTS)))
    np.testing.assert_array_equal(gradient, np.zeros(len(WEIGHTS)))
