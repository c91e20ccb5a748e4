"""Random layers and batches: exports against the layer itself, on meshes of any shape.

`tests/test_random_configurations.py` compares the layer with the dense reference.
"""

import itertools

import hypothesis
import jax
import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.lookup.placements import mesh_of_shape
from tests.random_configurations import ABSENT, examples
from tests.test_random_configurations import TOLERANCE, tables_with_values


def check_export(example, directory):
    """Exports a layer; its program must give what the layer gives."""
    config = example.nested([feature.config for feature in example.features])
    plan = te.make_plan(config, mesh_of_shape(example.mesh), **example.options)
    layer = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
    layer.tables.set_value(tables_with_values(plan))
    given = [feature for feature in example.features if feature.is_given]
    batch_size = None
    if any(feature.config.output_shape is not None for feature in given):
        batch_size = given[0].num_samples
    batch = batch_of(example, 0)
    te.export.save(layer, directory, layer.prepare(batch), batch_size=batch_size)
    served = te.export.load(directory)
    for number in range(2):
        batch = batch_of(example, number)
        expected, _ = jax.tree.flatten(layer(layer.prepare(batch)))
        found = served(batch)
        found = list(found.values()) if isinstance(found, dict) else [found]
        assert len(found) == len(expected)
        for array, values in zip(found, expected, strict=True):
            np.testing.assert_allclose(array, values, **TOLERANCE)


def batch_of(example, number):
    inputs = [
        feature.inputs(feature.rows(number))[0] if feature.is_given else ABSENT
        for feature in example.features
    ]
    return example.nested(inputs)


def may_be_exported(example):
    """Returns True if the batch is checked, and holds no lists or nested sparse ids."""
    return example.is_prepared and not any(
        x.form == "lists" or (x.form == "sparse" and x.config.output_shape)
        for x in example.features
    )


@pytest.mark.full
@pytest.mark.parametrize("number", [6, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_exports_of_random_layers(number, tmp_path):
    directories = (tmp_path / str(i) for i in itertools.count())

    def check(example):
        check_export(example, next(directories))

    hypothesis.settings(
        max_examples=number,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )(hypothesis.given(examples().filter(may_be_exported))(check))()
