"""What the host-side preparation refuses. Each error names the feature."""

import dataclasses

import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.inputs.prepare_cases import (
    RAGGED,
    SPARSE,
    TABLE,
    plan_of,
    prepare,
)


def test_weights_of_a_sparse_sequence_have_no_effect_and_are_refused():
    ids = dataclasses.replace(SPARSE, weights=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="'the_feature' has weights and max_sequence"):
        prepared = prepare(ids, max_sequence_length=2)
        te.functional.activation_shapes(
            {"the_feature": prepared}, plan_of(max_sequence_length=2)
        )


@pytest.mark.parametrize("what", ["features", "weights"])
def test_another_structure_shows_both(what):
    plan, features = plan_of(), {"the_feature": 1, "other": 1}
    arguments = [{"the_feature": np.arange(3)}, plan, features]
    if what == "features":
        arguments = [features, plan]
    with pytest.raises(ValueError, match=f"{what} must have the structure") as error:
        te.inputs.prepare_features(*arguments)
    assert "dict with the keys ['the_feature', 'other']" in str(error.value)


@pytest.mark.parametrize("ids", [RAGGED, SPARSE], ids=["ragged", "sparse"])
def test_already_prepared(ids):
    with pytest.raises(TypeError, match="'the_feature' has been prepared already"):
        prepare(prepare(ids))


def test_the_first_wrong_feature_is_named():
    config = [te.FeatureConfig(table=TABLE, name=name) for name in ("a", "b")]
    plan = te.make_plan(config, mesh_of(1))
    with pytest.raises(ValueError, match="'b'"):
        te.inputs.prepare_features([np.array([9]), np.array([10])], plan)
