"""Habits of Flax that hold here: printing, counting, names of an optimizer."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.export.serving_program import make_program
from tpu_embedding.nn.embedding import warn_of_pooled_ids

NUM_FEATURES = 26
ADAM = optax.adam(1e-3)
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


class Small(nnx.Module):
    """A model whose table has padding on most numbers of devices."""

    def __init__(self, optimizer, num_devices):
        self.embedding = te.TPUEmbedding(
            te.FeatureConfig(table=TABLE),
            optimizer,
            mesh=mesh_of(num_devices),
            rngs=nnx.Rngs(0),
        )
        self.linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.linear(self.embedding(ids))


def values_of(model):
    return {**model.embedding.embedding_tables(), "kernel": model.linear.kernel[...]}


TABLES = te.nn.EmbeddingTables


@pytest.mark.parametrize("num_devices", [1, 8])
def test_averages_of_the_parameters(num_devices):
    rule = te.optimizers.with_ema(te.optimizers.adagrad(0.5), momentum=0.5)
    tx = te.optimizers.with_ema(optax.sgd(0.1), momentum=0.5)
    model = Small(rule, num_devices)
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


def test_a_checkpoint_of_the_parameters(tmp_path):
    model, other = Small("adagrad", 2), Small("adagrad", 2)
    other.embedding.set_embedding_tables({"t": np.zeros((9, 2))})
    te.save(tmp_path / "step", (model, te.Optimizer(model, optax.sgd(0.1))))
    te.restore(tmp_path / "step", (other, te.Optimizer(other, optax.sgd(0.1))))
    jax.tree.map(np.testing.assert_array_equal, values_of(other), values_of(model))


@pytest.mark.parametrize("num_devices", [1, 8])
def test_norm_and_number_of_the_parameters(num_devices):
    model = Small("adagrad", num_devices)
    norm = optax.tree.norm(nnx.state(model, (nnx.Param, TABLES)))
    squares = [np.sum(np.square(x)) for x in values_of(model).values()]  # the bias is 0
    np.testing.assert_allclose(norm, np.sqrt(sum(squares)), rtol=1e-6)
    dense = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    tables = [x.config for s in model.embedding.plan.stacks for x in s.tables]
    num_numbers = dense + sum(x.vocabulary_size * x.dim for x in tables)
    assert num_numbers == 3 + 9 * 2


@pytest.fixture(scope="module")
def gradients():
    """Returns the gradients of a model with one table."""
    model = Small("adagrad", 2)
    return model, te.value_and_grad(loss_fn)(model, np.arange(4))[1]


def clipped(gradients):
    return optax.clip_by_global_norm(1.0).update(gradients, optax.EmptyState())


@pytest.mark.parametrize(
    "function",
    [
        optax.global_norm,
        optax.tree.norm,
        lambda x: optax.tree.norm(x, ord=1),
        lambda x: optax.tree.norm(x, ord="inf"),
        optax.tree.sum,
        clipped,
        # A norm of Optax 0.2.4, and one of your own.
        lambda x: sum(jnp.sum((y.conj() * y).real) for y in jax.tree.leaves(x)),
        lambda x: sum(jnp.sum(y**2) for y in jax.tree.leaves(x)),
        lambda x: sum(y.sum() for y in jax.tree.leaves(x)),
        lambda x: jax.tree.map(jnp.square, x),
        lambda x: jax.tree.map(jnp.add, x, x),
        lambda x: jax.tree.map(lambda y: 2 * y, x),
        lambda x: jax.tree.map(lambda y: y / 2, x),
        lambda x: jax.tree.map(lambda y: -y, x),
        lambda x: x + x,
        lambda x: 0.5 * x,
        lambda x: np.float32(0.5) * x,
        lambda x: x["embedding"] / 2,
        lambda x: -x,
    ],
)
@pytest.mark.parametrize("run", [lambda x: x, jax.jit], ids=["eager", "jit"])
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_arithmetic_on_gradients_names_what_to_call(gradients, run, function):
    with pytest.raises(
        TypeError, match=r"te\.gradients\.global_norm.*gradients\.scale"
    ):
        run(function)(gradients[1])


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
    with pytest.raises(TypeError, match=r"te\.Optimizer\(model, tx\)"):
        dense.update(model, gradients)


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


def test_a_property_of_tensorflow_is_a_method_here(trained):
    model, *_ = trained
    for habit in (lambda x: x["t0"], list, lambda x: "t0" in x):
        with pytest.raises(TypeError, match=r"write|Write layer\.embedding_tables\(\)"):
            habit(model.embedding.embedding_tables)
    assert te.TPUEmbedding.embedding_tables.__doc__


def average_of(state):
    halves = jax.tree.map(lambda x: 0.5 * x.astype(jnp.float32), state)
    return jax.tree.map(lambda x, y: (x + x).astype(y.dtype), halves, state)


ARITHMETIC = {
    "average": average_of,
    "optax average": lambda x: optax.incremental_update(x, x, 0.5),
    "norm": optax.tree.norm,
    "penalty": lambda x: sum(jnp.sum(y**2) for y in jax.tree.leaves(x)),
    "float32 penalty": lambda x: sum(
        jnp.sum(y.astype(jnp.float32) ** 2) for y in jax.tree.leaves(x)
    ),
}


def narrow_layer(dtype="bfloat16"):
    table = te.TableConfig(vocabulary_size=9, dim=2, name="t", dtype=dtype)
    optimizer = "adagrad" if dtype == "bfloat16" else None
    return te.TPUEmbedding(
        te.FeatureConfig(table=table), optimizer, mesh=mesh_of(2), rngs=nnx.Rngs(0)
    )


@pytest.mark.parametrize("where", ["eager", "jit", "loss"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("function", ARITHMETIC.values(), ids=ARITHMETIC)
def test_arithmetic_on_packed_tables_raises(function, dtype, where):
    """Several values share a word, so a number would mean nothing."""
    layer = narrow_layer(dtype)
    tables = nnx.state(layer, TABLES)

    def loss_fn(layer):
        return jnp.sum(layer(np.arange(4))) + function(nnx.state(layer, TABLES))

    runs = {
        "eager": lambda: function(tables),
        "jit": lambda: jax.jit(function)(tables),
        "loss": lambda: te.value_and_grad(loss_fn)(layer),
    }
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        runs[where]()
    assert "abstract method" in str(raised.value) or "with_ema" in str(raised.value)


def test_what_else_is_done_with_packed_tables(tmp_path):
    layer = narrow_layer()
    optimizer, before = te.Optimizer(layer, ADAM), layer.embedding_tables()["t"]
    tables = nnx.state(layer, TABLES)
    copy = jax.jit(lambda x: jax.tree.map(jnp.copy, x))(tables)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(layer(np.arange(4))))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", copy)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "orbax", copy)
    te.save(tmp_path / "te", (layer, optimizer))
    layer.set_embedding_tables({"t": np.zeros((9, 2))})
    for restore in (
        lambda: nnx.update(layer, restored),
        lambda: te.restore(tmp_path / "te", (layer, optimizer)),
    ):
        restore()
        np.testing.assert_array_equal(layer.embedding_tables()["t"], before)
        layer.set_embedding_tables({"t": np.zeros((9, 2))})
    nnx.update(layer, jax.device_put(tables))
    _, gradients = te.value_and_grad(loss_fn)(layer, np.arange(4))
    optimizer.update(layer, gradients)
    with pytest.raises(TypeError, match="with_ema"):
        average_of(nnx.state(layer, TABLES))
