"""Keys, gains and scales of features, sample by sample as one would write them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.lookup.stages import PADDING, plan_of
from tests.tiers import matrix, quick_cases, with_ids
from tpu_embedding.lookup._forward import FeatureInput, flatten
from tpu_embedding.optimizers.row_optimizer import InSequence, RowOptimizer, Touched
from tpu_embedding.plan.features import FeaturePlan

VOCABULARY_SIZE = 7
NUM_SHARDS = 3
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
    policy="error", validates=True, combiner="sum", row_offset=0, default_id=None
):
    size = VOCABULARY_SIZE
    table = te.TableConfig(vocabulary_size=size, dim=2, combiner=combiner, name="t")
    config = te.FeatureConfig(
        table=table,
        out_of_range_ids=policy,
        validate_weights_and_indices=validates,
        default_id=default_id,
        name="f",
    )
    return FeaturePlan(
        name="f", config=config, stack_index=0, row_offset=row_offset, num_rows=size
    )


def stack_of(num_shards, keeps_duplicates=False):
    stack = dataclasses.replace(plan_of(1, 11).stacks[0], num_shards=num_shards)
    optimizer = RowOptimizer(
        transformation=optax.identity(),
        driver=InSequence() if keeps_duplicates else Touched(),
    )
    return dataclasses.replace(stack, trained_by=optimizer)


def samples_of(given):
    if given.sample_ids is None:
        return [i % given.num_samples for i in range(len(given.ids))]
    return np.asarray(given.sample_ids).tolist()


def reference(given, feature):
    """Returns keys, gains, scales and the count of ids outside the table."""
    config, combiner, samples = feature.config, feature.combiner, samples_of(given)
    rows, gains, outside = [], [], 0
    for i, row in enumerate(np.asarray(given.ids).tolist()):
        is_used = 0 <= row < VOCABULARY_SIZE
        outside += row != PADDING and not is_used
        if config.out_of_range_ids == "clip" and row != PADDING:
            row, is_used = min(max(row, 0), VOCABULARY_SIZE - 1), True
        weight = 1.0 if given.weights is None else float(given.weights[i])
        if config.validate_weights_and_indices and combiner != "sum":
            is_used = is_used and weight > 0
        rows.append(row if is_used else None)
        gains.append(weight if is_used else 0.0)
    for sample in range(given.num_samples):
        places = [i for i, of_id in enumerate(samples) if of_id == sample]
        is_empty = places and all(rows[i] is None for i in places)
        if is_empty and config.default_id is not None:
            # The first place of an empty sample, and nothing else.
            rows[places[0]], gains[places[0]] = config.default_id, 1.0
    keys, totals = [], np.zeros(given.num_samples + 1)
    for row, gain, sample in zip(rows, gains, samples, strict=True):
        stack_row = 0 if row is None else row + feature.row_offset
        key = stack_row % NUM_SHARDS * 11 + stack_row // NUM_SHARDS
        keys.append(PADDING if row is None else key)
        totals[sample] += gain if combiner == "mean" else gain**2
    totals = np.sqrt(totals) if combiner == "sqrtn" else totals
    scales = [1 / total if total else 0.0 for total in totals[:-1]]
    return np.array(keys), np.array(gains), scales, outside


CASES = matrix(
    ["one", "many", "ragged"],
    with_ids({"1": None, "any": WEIGHTS, "cancel": CANCEL}),
    with_ids({"sums": False, "keeps": True}),
)
QUICK = "one-any-sums", "many-1-keeps", "many-cancel-sums", "ragged-any-keeps"


@pytest.mark.parametrize(
    ("form", "weights", "keeps_duplicates"), quick_cases(CASES, *QUICK, every_case=True)
)
def test_equals_reference(form, weights, keeps_duplicates):
    options = itertools.product(
        *(["error", "drop", "clip"], [True, False], ["sum", "mean", "sqrtn"]),
        *([0, 4], [None, 6]),
    )
    features = [feature_plan(*option) for option in options]
    given = feature_input(form, weights)
    order = np.arange(len(IDS))
    if form == "many" and keeps_duplicates:
        order = np.argsort(samples_of(given), kind="stable")
    stack = stack_of(NUM_SHARDS, keeps_duplicates)
    keys, poolings, out_of_range = flatten([given] * len(features), features, stack)
    keys = np.asarray(keys).reshape(len(features), -1)
    for i, feature in enumerate(features):
        expected, gains, scales, outside = reference(given, feature)
        np.testing.assert_array_equal(keys[i], expected[order])
        assert out_of_range[i] == outside
        pooling, combiner = poolings[i], feature.combiner
        if weights is None:
            assert pooling.gains is None
        else:
            np.testing.assert_array_equal(pooling.gains, gains[order])
        if combiner == "sum" or (weights is None and form == "one"):
            assert pooling.scales is None
        else:
            # One rounding each of the sum, the root and the quotient.
            np.testing.assert_allclose(pooling.scales, scales, rtol=3e-7)
        assert pooling.num_samples == given.num_samples
        if not keeps_duplicates:
            assert pooling.valence == given.valence
            assert (pooling.sample_ids is None) == (form != "ragged")


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
