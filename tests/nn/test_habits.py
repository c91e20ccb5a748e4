"""Habits of Flax that hold here: averages, norms, arithmetic on state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.nn.test_dense_optimizer import Model
from tests.rejections import rejects
from tests.tiers import each_once, quick_cases, with_ids
from tpu_embedding.inputs.shard_inputs import parse_batch
from tpu_embedding.nn.embedding import warn_of_pooled_ids

MATRIX = np.array([[1, 2, 2], [3, 4, 5]])
TABLE = te.TableConfig(vocabulary_size=9, dim=2, name="t")
TABLES = te.nn.EmbeddingTables
two_meshes = pytest.mark.parametrize("num_devices", quick_cases([1, 8]))


def loss_fn(model, ids):
    return jnp.sum(model(ids) ** 2)


@pytest.mark.full
def test_a_model_without_an_optimizer_is_traced_once():
    traces = []
    model = Model(None, 2)
    te.nn.put_on_mesh(model)

    @nnx.jit
    def forward(model, ids):
        traces.append(ids)
        return model(ids)

    for _ in range(3):
        forward(model, np.arange(4))
    assert len(traces) == 1


def values_of(model):
    return {**model.embedding.embedding_tables(), "kernel": model.dense.kernel[...]}


@two_meshes
def test_averages_of_the_parameters(num_devices):
    rule = te.optimizers.with_ema(te.optimizers.adagrad(0.5), momentum=0.5)
    tx = te.optimizers.with_ema(optax.sgd(0.1), momentum=0.5)
    model = Model(rule, num_devices)
    optimizer, expected = te.Optimizer(model, tx), None
    for step in range(3):
        loss, gradients = te.value_and_grad(loss_fn)(model, np.arange(step, step + 4))
        optimizer.update(model, gradients)
        new = values_of(model)
        expected = expected or new
        expected = jax.tree.map(lambda old, x: 0.5 * old + 0.5 * x, expected, new)
    averaged = nnx.clone(model)
    nnx.clone(optimizer).finalize_variable_values(averaged)
    jax.tree.map(np.testing.assert_array_equal, values_of(model), new)
    found = values_of(averaged)
    # Powers of one half, added in another order.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5), found, expected)


@pytest.fixture(scope="module")
def gradients():
    """Returns the gradients of a model with one table."""
    model = Model("adagrad", 2)
    return model, te.value_and_grad(loss_fn)(model, np.arange(4))[1]


ON_GRADIENTS = {
    "norm": optax.global_norm,
    "largest": lambda x: optax.tree.norm(x, ord="inf"),
    "clip": lambda x: optax.clip_by_global_norm(1.0).update(x, optax.EmptyState()),
    "squares": lambda x: sum(jnp.sum(y**2) for y in jax.tree.leaves(x)),
    "sums": lambda x: sum(y.sum() for y in jax.tree.leaves(x)),
    "add leaves": lambda x: jax.tree.map(jnp.add, x, x),
    "divide leaves": lambda x: jax.tree.map(lambda y: y / 2, x),
    "ravel": jax.flatten_util.ravel_pytree,
    "add": lambda x: x + x,
    "scale": lambda x: np.float32(0.5) * x,
    "negative": lambda x: -x,
    "a part": lambda x: x["embedding"] / 2,
}


@pytest.mark.parametrize(
    ("function", "run"),
    each_once(with_ids(ON_GRADIENTS), with_ids({"eager": lambda x: x, "jit": jax.jit})),
)
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_arithmetic_on_gradients_names_what_to_call(gradients, run, function):
    with pytest.raises((TypeError, ValueError), match="te.gradients.global_norm"):
        run(function)(gradients[1])


@pytest.mark.full
def test_what_else_is_done_with_gradients(gradients):
    model, gradients = gradients
    assert te.gradients.global_norm(gradients) > 0
    for run in (lambda x: x, jax.jit):
        zeros = run(lambda x: jax.tree.map(jnp.zeros_like, x))(gradients)
        assert te.gradients.global_norm(zeros) == 0
        same = run(te.gradients.add)(gradients, zeros)
        norms = map(te.gradients.global_norm, (same, gradients))
        np.testing.assert_allclose(*norms, rtol=1e-6)
        assert jax.tree.structure(gradients) == jax.tree.structure(zeros)
    assert all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(gradients))
    jax.block_until_ready(jax.device_put(gradients))
    parts = jax.lax.scan(lambda _, __: (None, gradients), None, length=2)[1]
    first, second = (jax.tree.map(lambda x, i=i: x[i], parts) for i in range(2))
    for part in (first, second):
        assert te.gradients.global_norm(part) == te.gradients.global_norm(gradients)
    dense = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with rejects(TypeError, fix="te.Optimizer(model, tx)"):
        dense.update(model, gradients)


def test_ids_that_are_pooled_by_default_are_warned_of():
    layer = te.TPUEmbedding(te.FeatureConfig(table=TABLE), rngs=nnx.Rngs(0))

    def look_up(ids, **options):
        config = te.FeatureConfig(table=TABLE, **options)
        nnx.eval_shape(lambda layer, ids: layer(ids, None, config), layer, ids)

    with pytest.warns(UserWarning, match="max_sequence_length=3") as w:
        look_up(MATRIX)
    assert {warning.filename for warning in w} == {__file__}
    look_up(MATRIX[:, :1])  # Warnings are errors here.
    look_up(MATRIX, combiner="sum")
    look_up(MATRIX, max_sequence_length=3)
    jax.eval_shape(jax.vmap(layer), np.stack([MATRIX, MATRIX]))
    padded = np.where(MATRIX == MATRIX[0, 0], -1, MATRIX)
    warn_of_pooled_ids(parse_batch(padded, layer.plan), stacklevel=1)


def test_a_feature_may_have_a_combiner_of_its_own():
    features = {
        name: te.FeatureConfig(table=TABLE, combiner=combiner)
        for name, combiner in {"sum": "sum", "mean": "mean"}.items()
    }
    layer = te.TPUEmbedding(features, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    assert len(layer.plan.stacks[0].tables) == 1
    found = layer(dict.fromkeys(features, MATRIX))
    rows = layer.embedding_tables()["t"][MATRIX]
    np.testing.assert_allclose(found["sum"], rows.sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(found["mean"], rows.mean(axis=1), rtol=1e-6)


def average_of(state):
    halves = jax.tree.map(lambda x: 0.5 * x.astype(jnp.float32), state)
    return jax.tree.map(lambda x, y: (x + x).astype(y.dtype), halves, state)


ON_TABLES = {
    "average": average_of,
    "optax average": lambda x: optax.incremental_update(x, x, 0.5),
    "norm": optax.tree.norm,
    "float32 penalty": lambda x: sum(
        jnp.sum(y.astype(jnp.float32) ** 2) for y in jax.tree.leaves(x)
    ),
}


@pytest.mark.parametrize(
    ("function", "dtype", "where"),
    each_once(with_ids(ON_TABLES), ["bfloat16", "int8"], ["eager", "jit", "loss"]),
)
def test_arithmetic_on_packed_tables_raises(function, dtype, where):
    """Several values share a word, so a number would mean nothing."""
    table = te.TableConfig(vocabulary_size=9, dim=2, name="t", dtype=dtype)
    feature = te.FeatureConfig(table=table)
    rule = "adagrad" if dtype == "bfloat16" else None
    layer = te.TPUEmbedding(feature, rule, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    tables = nnx.state(layer, TABLES)

    def loss_fn(layer):
        return jnp.sum(layer(np.arange(4))) + function(nnx.state(layer, TABLES))

    runs = {
        "eager": lambda: function(tables),
        "jit": lambda: jax.jit(function)(tables),
        "loss": lambda: te.value_and_grad(loss_fn)(layer),
    }
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        runs[where]()
