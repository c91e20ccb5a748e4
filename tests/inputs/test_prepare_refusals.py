"""What the host-side preparation refuses. Each error names the feature."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.inputs.prepare_cases import (
    PADDING,
    RAGGED,
    SPARSE,
    TABLE,
    dense,
    plan_of,
    prepare,
    ragged,
    sparse,
)

INF, NAN = np.inf, np.nan


NO_INTEGERS = {
    "float": np.array([1.0, 2.0]),
    "whole_floats": np.array([1.0]),
    "bool": np.array([True]),
    "strings": np.array(["1"]),
    "list_of_floats": [1.5],
    "dense": dense([[1.5]]),
    "ragged": ragged([1.0], [0, 1]),
    "sparse": sparse([[0, 0]], [1.5]),
    "jax": jnp.ones(3),
}


@pytest.mark.parametrize("ids", NO_INTEGERS.values(), ids=NO_INTEGERS)
def test_ids_that_are_no_integers(ids):
    with pytest.raises(TypeError, match="'the_feature' must be integers, got dtype"):
        prepare(ids)


@pytest.mark.parametrize(
    "options", [dict(max_sequence_length=2), dict(output_shape=(12,))], ids=str
)
def test_sparse_sequences_of_floats(options):
    with pytest.raises(TypeError, match="'the_feature' must be integers"):
        prepare(sparse([[0, 0], [1, 0]], [1.5, 2.5]), **options)


OUT_OF_RANGE = {
    "too_large": (np.array([1, 10, 11]), "got 10 at position (1,), and 2 such"),
    "negative": (np.array([-1, 1]), "got -1 at position (0,), and 1 such"),
    "matrix": (np.array([[1, 2], [3, 99]]), "got 99 at position (1, 1), and 1 such"),
    "dense": (dense([[1], [-7]]), "got -7 at position (1, 0), and 1 such"),
    "ragged": (ragged([3, 9, 10], [0, 1, 3]), "got 10 at value (2,), and 1 such"),
    "sparse": (sparse([[0, 0], [1, 1]], [2, 12]), "got 12"),
    "2**32+3": (np.array([2**32 + 3]), f"got {2**32 + 3} at position (0,)"),
    "2**31": (np.array([0, 2**31]), f"got {2**31} at position (1,)"),
    "just_below_padding": (np.array([PADDING - 1]), f"got {PADDING - 1}"),
    "-2**32+3": (np.array([-(2**32) + 3]), f"got {-(2**32) + 3}"),
    "-2**63": (np.array([-(2**63)]), f"got {-(2**63)}"),
    "uint64": (np.array([2**63 + 3], np.uint64), f"got {2**63 + 3}"),
    "uint32": (np.array([2**32 - 1], np.uint32), f"got {2**32 - 1}"),
    "int8": (np.array([-1], np.int8), "got -1"),
}


@pytest.mark.parametrize(("ids", "shown"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_ids_outside_the_table(ids, shown):
    with pytest.raises(ValueError, match=re.escape(shown)) as error:
        prepare(ids)
    message = str(error.value)
    assert "'the_feature'" in message
    assert "[0, 10)" in message
    assert "out_of_range_ids" in message


def test_sparse_sequence_outside_the_table():
    with pytest.raises(ValueError, match="got 12 .*'drop' or 'clip'"):
        prepare(sparse([[0, 0], [1, 1]], [2, 12]), max_sequence_length=3)


WEIGHTS = {
    "nan": (dense([[1, 2]], np.array([[1, NAN]])), "finite, got nan at (0, 1)"),
    "inf": (dense([1, 2], np.array([INF, 1])), "finite, got inf at (0,)"),
    "minus_inf": (ragged([1], [0, 1], np.array([-INF])), "finite, got -inf at (0,)"),
    "sparse_nan": (dataclasses.replace(SPARSE, weights=np.array([1, 1, NAN])), "(2,)"),
    "too_large_for_float32": (dense([1], np.array([1e39])), "finite, got inf"),
    "nan_at_padding": (dense([PADDING], np.array([NAN])), "finite"),
    "fewer": (dense([1, 2], np.ones(1)), "(2,), got (1,)"),
    "more": (dense([1, 2], np.ones(3)), "(2,), got (3,)"),
    "other_rank": (dense([[1], [2]], np.ones(2)), "(2, 1), got (2,)"),
    "scalar": (dense([1, 2], np.ones(())), "(2,), got ()"),
    "ragged_fewer": (ragged([1, 2], [0, 2], np.ones(1)), "(2,), got (1,)"),
    "ragged_per_sample": (ragged([1, 2], [0, 1, 1, 2], np.ones(3)), "got (3,)"),
    "sparse_fewer": (dataclasses.replace(SPARSE, weights=np.ones(2)), "got (2,)"),
    "sparse_more": (dataclasses.replace(SPARSE, weights=np.ones(4)), "got (4,)"),
    "sparse_other_rank": (dataclasses.replace(SPARSE, weights=np.ones((3, 1))), "got"),
}


# A number that no float32 holds is no warning of NumPy's to the user, but our error.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("given", ["in_the_ids", "as_nest"])
@pytest.mark.parametrize(("ids", "shown"), WEIGHTS.values(), ids=WEIGHTS)
def test_wrong_weights(ids, shown, given):
    weights = None
    if given == "as_nest":
        ids, weights = dataclasses.replace(ids, weights=None), ids.weights
    with pytest.raises(ValueError, match=re.escape(shown)) as error:
        prepare(ids, weights)
    assert "Weights of feature 'the_feature'" in str(error.value)


def test_weights_of_a_sparse_sequence_have_no_effect_and_are_refused():
    ids = dataclasses.replace(SPARSE, weights=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="'the_feature' has weights and max_sequence"):
        prepared = prepare(ids, max_sequence_length=2)
        te.functional.activation_shapes(
            {"the_feature": prepared}, plan_of(max_sequence_length=2)
        )


@pytest.mark.parametrize(
    "features",
    [{"other": 1}, {"the_feature": 1, "other": 1}, {}, [np.arange(3)], None],
    ids=repr,
)
@pytest.mark.parametrize("what", ["features", "weights"])
def test_another_structure_shows_both(features, what):
    plan = plan_of()
    if what == "weights" and features is None:
        return  # that is no weights
    arguments = [{"the_feature": np.arange(3)}, plan, features]
    if what == "features":
        arguments = [features, plan]
    with pytest.raises(ValueError, match=f"{what} must have the structure") as error:
        te.inputs.prepare_features(*arguments)
    assert str(plan.feature_tree) in str(error.value)
    assert str(jax.tree.structure(features)) in str(error.value)


def test_none():
    with pytest.raises(ValueError, match="'the_feature' is None"):
        prepare(None)


def test_scalar():
    with pytest.raises(ValueError, match="'the_feature' must have a batch axis"):
        prepare(np.array(3))


@pytest.mark.parametrize("ids", [RAGGED, SPARSE], ids=["ragged", "sparse"])
def test_already_prepared(ids):
    with pytest.raises(TypeError, match="'the_feature' has been prepared already"):
        prepare(prepare(ids))


def test_the_first_wrong_feature_is_named():
    config = [te.FeatureConfig(table=TABLE, name=name) for name in ("a", "b")]
    plan = te.make_plan(config, mesh_of(1))
    with pytest.raises(ValueError, match="'b'"):
        te.inputs.prepare_features([np.array([9]), np.array([10])], plan)
