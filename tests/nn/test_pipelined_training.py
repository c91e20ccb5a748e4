"""The pipelined train step against plain loops: exact, or stale by one update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import quick_cases, with_ids

BATCH = 12
VOCABULARY_SIZE, DIM = 20, 4


def test_statistics_are_those_of_the_batch_that_was_trained():
    table = te.TableConfig(vocabulary_size=9, dim=2, name="t")
    features = {"f": te.FeatureConfig(table=table)}
    layer = te.TPUEmbedding(features, te.optimizers.sgd(0.1), rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    pipeline = te.PipelinedTrainStep(lambda model, ids: jnp.sum(model(ids)["f"]))
    found = []
    for outside in (1, 2, 3):
        ids = np.where(np.arange(8) < outside, 99, 0)
        pipeline(layer, optimizer, {"f": ids})
        found.append(int(layer.stats.get_value().out_of_range["f"]))
    pipeline.drain(layer, optimizer)
    assert found[1:] == [1, 2]
    assert layer.stats.get_value().out_of_range["f"] == 3


def feature_config(name):
    table = te.TableConfig(
        vocabulary_size=VOCABULARY_SIZE, dim=DIM, combiner="mean", name=name
    )
    return {"one": te.FeatureConfig(table=table), "bag": te.FeatureConfig(table=table)}


def values_of(model, optimizer):
    state = nnx.state((model, optimizer))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves if not is_key(x)
    }


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def run_pipeline(pipeline, model, optimizer, batches):
    results = [pipeline(model, optimizer, *batch) for batch in batches]
    return [*results, pipeline.drain(model, optimizer)]


class DenseReference:
    """Trains a table and a linear layer as TensorFlow's pipeline does.

    Step t looks up in the table after update t - 2, and changes that after t - 1.
    """

    def __init__(self, table, kernel, bias):
        self.tables = [table, table]  # Before the last update, and after it.
        self.parameters = (kernel, bias)

    def step(self, ids, labels):
        def loss_of(activations, parameters):
            kernel, bias = parameters
            predicted = (activations @ kernel + bias[None])[:, 0]
            return jnp.mean((predicted - labels) ** 2)

        stale, latest = self.tables
        loss, (cotangents, gradients) = jax.value_and_grad(loss_of, (0, 1))(
            stale[ids], self.parameters
        )
        table = latest.at[ids].add(-0.5 * cotangents)
        self.tables = [latest, table]
        self.parameters = jax.tree.map(
            lambda p, g: p - 0.1 * g, self.parameters, gradients
        )
        return loss


class OneTable(nnx.Module):
    def __init__(self, num_devices):
        table = te.TableConfig(
            vocabulary_size=VOCABULARY_SIZE, dim=DIM, combiner="sum", name="items"
        )
        self.embedding = te.TPUEmbedding(
            te.FeatureConfig(table=table),
            te.optimizers.sgd(0.5),
            mesh=mesh_of(num_devices),
            rngs=nnx.Rngs(0),
        )
        self.linear = nnx.Linear(DIM, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids):
        return self.linear(self.embedding(ids))[:, 0]


def one_table_loss(model, ids, labels):
    return jnp.mean((model(ids) - labels) ** 2)


def test_stale_equals_a_reference_that_is_stale_in_the_same_way():
    model = OneTable(1)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    values = model.embedding.embedding_tables()["items"]
    kernel, bias = model.linear.kernel.get_value(), model.linear.bias.get_value()
    reference = DenseReference(
        *(jnp.asarray(np.array(x)) for x in (values, kernel, bias))
    )
    generator = np.random.default_rng(0)
    batches = [
        (generator.integers(0, 6, BATCH), generator.normal(size=BATCH))
        for _ in range(20)
    ]
    batches = [(ids, labels.astype(np.float32)) for ids, labels in batches]
    expected = [reference.step(*batch) for batch in batches]
    pipeline = te.PipelinedTrainStep(one_table_loss, mode="stale")
    found = run_pipeline(pipeline, model, optimizer, batches)
    # Gradients of equal ids are summed in another order.
    np.testing.assert_allclose(found[1:], expected, rtol=1e-5)
    values = model.embedding.embedding_tables()["items"]
    np.testing.assert_allclose(values, reference.tables[1], rtol=1e-5, atol=1e-6)


def test_gradients_are_transformed_before_the_update():
    model = OneTable(2)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    before = model.embedding.embedding_tables()["items"]
    pipeline = te.PipelinedTrainStep(
        one_table_loss, transform_gradients=lambda g: te.gradients.scale(g, 0.0)
    )
    run_pipeline(pipeline, model, optimizer, [(np.arange(4), np.ones(4, np.float32))])
    np.testing.assert_array_equal(model.embedding.embedding_tables()["items"], before)


class Chained(OneTable):
    """Ids of the second call come from activations of the first."""

    def __call__(self, ids):
        nearest = jnp.argmax(self.embedding(ids), axis=1)
        return self.linear(self.embedding(nearest))[:, 0]


class Weighted(OneTable):
    """The weights of the ids are parameters."""

    def __init__(self, num_devices):
        super().__init__(num_devices)
        self.weights = nnx.Param(jnp.ones(4))

    def __call__(self, ids):
        return self.linear(self.embedding(ids, self.weights.get_value()))[:, 0]


@pytest.mark.parametrize(
    ("model_class", "match"),
    [
        (Chained, "depend on the activations of layer 'embedding'"),
        (Weighted, "depend on the variable 'weights"),
    ],
)
def test_features_that_cannot_be_known_ahead_are_refused(model_class, match):
    model = model_class(2)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    pipeline = te.PipelinedTrainStep(one_table_loss)
    with pytest.raises(ValueError, match=match):
        pipeline(model, optimizer, np.arange(4), np.ones(4, np.float32))


def change_tables(pipeline, model, optimizer, batch):
    model.embedding.set_embedding_tables({"items": np.zeros((VOCABULARY_SIZE, DIM))})
    pipeline(model, optimizer, *batch)


def call_with_another_model(pipeline, model, optimizer, batch):
    del model
    other = OneTable(2)
    pipeline(other, optimizer, *batch)


def call_inside_jit(pipeline, model, optimizer, batch):
    pipeline.drain(model, optimizer)
    nnx.jit(lambda m, o: pipeline(m, o, *batch))(model, optimizer)


@nnx.jit
def jitted_loss(model, ids, targets):
    return one_table_loss(model, ids, targets)


@nnx.jit(donate_argnums=1)
def loss_that_donates_its_batch(model, batch):
    return one_table_loss(model, *batch), jax.tree.map(lambda x: x + 1, batch)


def split_and_merged(model, ids, targets):
    graph, state = nnx.split(model)

    @jax.jit
    def evaluate(state):
        copy = nnx.merge(graph, state)
        return one_table_loss(copy, ids, targets), nnx.state(copy)

    loss, new_state = evaluate(state)
    nnx.update(model, new_state)
    return loss


EVALUATIONS = {
    "nnx.jit": jitted_loss,
    "nnx.jit, donated batch": lambda model, *batch: loss_that_donates_its_batch(
        model, jax.tree.map(jnp.array, batch)
    ),
    "split, merge and update": split_and_merged,
}


@pytest.mark.parametrize("evaluate", quick_cases(with_ids(EVALUATIONS), "nnx.jit"))
def test_an_evaluation_between_calls_changes_nothing(evaluate):
    batches = [(np.arange(8) + i, np.ones(8, np.float32)) for i in range(3)]

    def train(evaluate):
        model = OneTable(2)
        values = model.embedding.embedding_tables()["items"]
        values[-1] = np.nan  # equals itself, and no batch reads it
        with pytest.warns(UserWarning, match="NaN or infinite"):
            model.embedding.set_embedding_tables({"items": values})
        optimizer = te.Optimizer(model, optax.sgd(0.1))
        pipeline = te.PipelinedTrainStep(one_table_loss)
        for batch in batches:
            pipeline(model, optimizer, *batch)
            for _ in range(2):
                evaluate(model, *batch)
        pipeline.drain(model, optimizer)
        return model.embedding.embedding_tables()["items"]

    np.testing.assert_array_equal(train(evaluate), train(lambda *_: None))


def donating_evaluation(pipeline, model, optimizer, batch):
    nnx.jit(one_table_loss, donate_argnums=0)(model, *batch)
    pipeline(model, optimizer, *batch)


MISUSE = {
    "donating evaluation": (donating_evaluation, "a jitted function donated"),
    "changed tables": (change_tables, "something else has changed"),
    "another model": (call_with_another_model, "in flight for another model"),
    "inside jit": (call_inside_jit, "call it outside"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_gives_one_clear_error(case):
    misuse, match = MISUSE[case]
    model = OneTable(2)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    batch = np.arange(4), np.ones(4, np.float32)
    pipeline = te.PipelinedTrainStep(one_table_loss)
    pipeline(model, optimizer, *batch)
    with pytest.raises(ValueError, match=match):
        misuse(pipeline, model, optimizer, batch)


def test_wrong_modes_and_models_are_refused():
    with pytest.raises(ValueError, match=r"\('exact', 'stale'\), got 'fast'"):
        te.PipelinedTrainStep(one_table_loss, mode="fast")
    linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    pipeline = te.PipelinedTrainStep(one_table_loss)
    with pytest.raises(ValueError, match="no TPUEmbedding layer"):
        pipeline(linear, nnx.Optimizer(linear, optax.sgd(0.1), wrt=nnx.Param))


def test_the_argument_of_tensorflow_names_the_way_out():
    with pytest.raises(ValueError, match=r"PipelinedTrainStep\(loss_fn, mode='stale'"):
        te.TPUEmbedding(
            feature_config("items"),
            pipeline_execution_with_tensor_core=True,
            rngs=nnx.Rngs(0),
        )


class Stream(nnx.Module):
    """Dynamic tables that share a stack, with evictions, beside a static one."""

    def __init__(self, num_devices):
        vocabularies = {
            "user": te.Dynamic(capacity=64),
            "item": te.Dynamic(capacity=100),
            "day": 7,
        }
        features = {
            name: te.FeatureConfig(
                table=te.TableConfig(vocabulary_size=size, dim=DIM, name=name)
            )
            for name, size in vocabularies.items()
        }
        mesh = mesh_of(num_devices)
        plan = te.make_plan(features, mesh, optimizer=te.optimizers.adagrad(0.3))
        rngs = nnx.Rngs(0)
        self.tables = te.TPUEmbedding(None, plan=plan, rngs=rngs)
        self.linear = nnx.Linear(3 * DIM, 1, rngs=rngs)

    def __call__(self, ids):
        found = self.tables(ids)
        joined = jnp.concatenate([found[k] for k in sorted(found)], axis=1)
        return self.linear(joined)[:, 0]


def stream_loss(model, ids, labels):
    return jnp.mean((model(ids) - labels) ** 2)


def stream_batches(model, count):
    generator = np.random.default_rng(1)
    for step in range(count):
        ids = {
            "user": generator.integers(0, 60, 24) + 20 * step,
            "item": generator.zipf(1.3, 24) % 2**40 - 2**39,
            "day": generator.integers(0, 7, 24),
        }
        labels = generator.normal(size=24).astype(np.float32)
        yield model.tables.prepare(ids), labels


def insert_ids(model, optimizer, ids, labels):
    return optimizer.insert_ids(model, ids), labels


@nnx.jit(donate_argnums=(0, 1))
def plain_stream_step(model, optimizer, ids, labels):
    batch = insert_ids(model, optimizer, ids, labels)
    loss, gradients = te.value_and_grad(stream_loss)(model, *batch)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.full
def test_dynamic_tables_equal_those_of_a_plain_loop_bitwise():
    def make():
        model = Stream(1)
        return model, te.Optimizer(model, optax.sgd(0.1))

    model, optimizer = make()
    batches = list(stream_batches(model, 8))
    expected, evictions = [], 0
    for batch in batches:
        expected.append(plain_stream_step(model, optimizer, *batch))
        evictions += int(model.tables.dynamic_stats.get_value()["user"].evictions)
    assert evictions > 0
    expected_state = values_of(model, optimizer)

    traces = []

    def counting_loss(model, ids, labels):
        traces.append(1)
        return stream_loss(model, ids, labels)

    model, optimizer = make()
    pipeline = te.PipelinedTrainStep(counting_loss, insert_ids=insert_ids)
    found = [pipeline(model, optimizer, *batch) for batch in batches[:2]]
    num_traces = len(traces)
    found += [pipeline(model, optimizer, *batch) for batch in batches[2:]]
    assert len(traces) == num_traces  # One compilation for the stream.
    found.append(pipeline.drain(model, optimizer))
    assert found[0] is None
    assert_equal(found[1:], expected)
    assert_equal(values_of(model, optimizer), expected_state)
    # After drain, it starts again.
    assert pipeline(model, optimizer, *batches[0]) is None
    assert np.isfinite(pipeline.drain(model, optimizer))


def test_dynamic_tables_without_insert_ids_are_refused():
    model = Stream(1)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    (batch,) = stream_batches(model, 1)
    with pytest.raises(ValueError, match="needs insert_ids.*insert_ids=lambda"):
        te.PipelinedTrainStep(stream_loss)(model, optimizer, *batch)
    with pytest.raises(ValueError, match="needs mode='exact', got 'stale'"):
        te.PipelinedTrainStep(stream_loss, mode="stale", insert_ids=insert_ids)


@pytest.mark.parametrize(
    ("insert", "names", "message"),
    [
        (lambda m, o, ids, labels: None, (), "must return a tuple.*got NoneType"),
        (
            lambda m, o, ids, labels: o.insert_ids(m, ids),
            (),
            "must return a tuple.*got dict",
        ),
        (insert_ids, ("labels",), r"by position, got the arguments \['labels'\]"),
    ],
)
def test_a_wrong_use_of_insert_ids_is_refused(insert, names, message):
    model = Stream(1)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    ((ids, labels),) = stream_batches(model, 1)
    pipeline = te.PipelinedTrainStep(stream_loss, insert_ids=insert)
    arguments = {"ids": ids, "labels": labels}
    by_name = {name: arguments.pop(name) for name in names}
    with pytest.raises(TypeError, match=message):
        pipeline(model, optimizer, *arguments.values(), **by_name)
    # Nothing was donated: a correct pipeline goes on.
    pipeline = te.PipelinedTrainStep(stream_loss, insert_ids=insert_ids)
    assert pipeline(model, optimizer, ids, labels) is None
