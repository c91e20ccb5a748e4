"""Habits of Flax that hold here: printing, counting, names of an optimizer."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.export.serving_program import make_program
from tpu_embedding.nn.embedding import warn_of_pooled_ids

NUM_FEATURES = 26
MATRIX = np.array([[1, 2, 2], [3, 4, 5]])
TABLE = te.TableConfig(vocabulary_size=9, dim=2, name="t")


class Model(nnx.Module):
    """A model with a table per feature."""

    def __init__(self):
        features = {
            f"f{i}": te.FeatureConfig(
                table=te.TableConfig(vocabulary_size=50 + i, dim=2, name=f"t{i}")
            )
            for i in range(NUM_FEATURES)
        }
        self.embedding = te.TPUEmbedding(
            features, "adagrad", mesh=mesh_of(2), rngs=nnx.Rngs(0)
        )
        self.linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.linear(sum(self.embedding(ids).values()))


IDS = {f"f{i}": np.arange(4) for i in range(NUM_FEATURES)}


def loss_fn(model, ids):
    return jnp.sum(model(ids) ** 2)


@pytest.fixture(scope="module")
def trained():
    """Returns model, optimizer and shapes of gradients; no test changes them."""
    model = Model()
    compute = te.grad(lambda model, ids: (loss_fn(model, ids), ids), has_aux=True)
    gradients, _ = nnx.eval_shape(compute, model, IDS)
    return model, te.Optimizer(model, optax.adam(1e-3)), gradients


def test_prints_are_short(trained):
    model, optimizer, gradients = trained
    plan = model.embedding.plan
    for value in (model.embedding, plan, plan.for_loaders(), optimizer, gradients):
        text = repr(value)
        assert len(text) < 450 and text.count("\n") < 5, text
        assert str(NUM_FEATURES) in text
    assert len(repr(model)) < 1500
    assert "26 tables of 1,625 rows, 1 stack, 26 features, 2 devices" in repr(model)
    assert "1 array" in repr(te.gradients.Gradients(dense=jnp.ones(2), tables={}))


def test_dense_parameters_are_the_only_ones(trained):
    model, _, gradients = trained
    paths = nnx.to_flat_state(nnx.state(model, nnx.Param)).paths
    assert paths == (("linear", "bias"), ("linear", "kernel"))
    assert jax.tree.structure(gradients.dense) == jax.tree.structure(
        nnx.state(model, nnx.Param)
    )


def test_parts_of_gradients_and_of_the_optimizer(trained):
    _, optimizer, gradients = trained
    assert set(gradients["linear"]) == {"bias", "kernel"}
    assert gradients["embedding"] is gradients.tables["embedding"]
    assert int(optimizer.step[...]) == 0
    assert optimizer.opt_state is optimizer.dense.opt_state
    assert optimizer.tx is optimizer.dense.tx


def test_tables_alone_are_trained_with_an_empty_filter(trained):
    model, _, gradients = trained
    alone = nnx.eval_shape(te.grad(loss_fn, wrt=False), model, IDS)
    assert jax.tree.leaves(alone.dense) == []
    assert jax.tree.leaves(alone.tables) == jax.tree.leaves(gradients.tables)


@pytest.mark.parametrize("of_model", [True, False], ids=["model", "layer"])
def test_a_model_without_an_optimizer_is_traced_once(of_model):
    traces = []
    layer = te.TPUEmbedding(
        te.FeatureConfig(table=TABLE), mesh=mesh_of(2), rngs=nnx.Rngs(0)
    )
    model = layer
    if of_model:
        model = nnx.Sequential(layer, nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
        te.nn.put_on_mesh(model)

    @nnx.jit
    def forward(model, ids):
        traces.append(ids)
        return model(ids)

    for _ in range(3):
        forward(model, np.arange(4))
    assert len(traces) == 1


def pooled(rows, combiner):
    return {"sum": np.sum, "mean": np.mean}[combiner](rows, axis=1)


def test_ids_that_are_pooled_by_default_are_warned_of():
    layer = te.TPUEmbedding(te.FeatureConfig(table=TABLE), rngs=nnx.Rngs(0))

    def look_up(ids, **options):
        config = te.FeatureConfig(table=TABLE, **options)
        nnx.eval_shape(lambda layer, ids: layer(ids, None, config), layer, ids)

    with pytest.warns(UserWarning, match=r"shape \[2, 3\].*max_sequence_length=3") as w:
        look_up(MATRIX)
    assert {warning.filename for warning in w} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_up(MATRIX[:, :1])
        look_up(MATRIX, combiner="sum")
        look_up(MATRIX, max_sequence_length=3)
        jax.eval_shape(jax.vmap(layer), np.stack([MATRIX, MATRIX]))
        padded = np.where(MATRIX == MATRIX[0, 0], -1, MATRIX)
        warn_of_pooled_ids(padded, layer.plan, stacklevel=1)
        make_program(
            layer,
            (MATRIX,),
            method="__call__",
            row_format="float32",
            batch_size=None,
        )


def test_a_feature_may_have_a_combiner_of_its_own():
    features = {
        name: te.FeatureConfig(table=TABLE, combiner=combiner)
        for name, combiner in {"sum": "sum", "mean": "mean"}.items()
    }
    layer = te.TPUEmbedding(features, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    assert len(layer.plan.stacks[0].tables) == 1
    found = layer(dict.fromkeys(features, MATRIX))
    rows = layer.embedding_tables()["t"][MATRIX]
    for combiner, activations in found.items():
        np.testing.assert_allclose(activations, pooled(rows, combiner), rtol=1e-6)
