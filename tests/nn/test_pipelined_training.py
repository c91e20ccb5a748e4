"""The pipelined train step against plain loops: exact, or stale by one update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import matrix, quick_cases, with_ids

BATCH = 12
VOCABULARY_SIZE, DIM = 20, 4


@pytest.mark.full
def test_loader_may_reuse_its_buffers():
    """The batch of a call is read again in the next call."""
    table = te.TableConfig(vocabulary_size=9, dim=2, combiner="sum", name="t")

    def losses(reuses_buffers):
        layer = te.TPUEmbedding(
            te.FeatureConfig(table=table), te.optimizers.sgd(0.1), rngs=nnx.Rngs(0)
        )
        optimizer = te.Optimizer(layer, optax.sgd(0.1))
        pipeline = te.PipelinedTrainStep(
            lambda model, ids, labels: jnp.mean((model(ids) - labels[:, None]) ** 2)
        )
        ids, labels = np.zeros(8, np.int32), np.zeros(8, np.float32)
        found = []
        for step in range(4):
            if not reuses_buffers:
                ids, labels = ids.copy(), labels.copy()
            ids[:], labels[:] = np.arange(8) + step % 2, step
            found.append(pipeline(layer, optimizer, ids, labels))
        return found[1:] + [pipeline.drain(layer, optimizer)]

    assert losses(True) == losses(False)


@pytest.mark.full
def test_variables_on_one_device_are_put_on_the_mesh():
    """As an eager lookup of some features leaves them, or a variable added later."""
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=9, dim=dim, name=name)
        )
        for name, dim in (("a", 2), ("b", 3))
    }
    plan = te.make_plan(features, mesh_of(2), optimizer=te.optimizers.sgd(0.1))
    layer = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    layer({"a": np.arange(4)})
    for count in jax.tree.leaves(layer.stats.get_value()):
        assert count.sharding == plan.replicated
    layer.seen = nnx.Variable(jnp.zeros(()))
    pipeline = te.PipelinedTrainStep(lambda model, ids: jnp.sum(model(ids)["b"]))
    batch = dict.fromkeys("ab", np.arange(4))
    assert pipeline(layer, optimizer, batch) is None
    assert np.isfinite(pipeline.drain(layer, optimizer))


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


class Model(nnx.Module):
    """Two layers, one of them called twice; ids made inside; statistics and dropout."""

    def __init__(self, num_devices, capacity=None):
        rngs, mesh = nnx.Rngs(0), mesh_of(num_devices)
        users, items = (
            te.make_plan(
                feature_config(name),
                mesh,
                optimizer=te.optimizers.adagrad(0.3),
                capacity=capacity,
            )
            for name in ("users", "items")
        )
        self.users = te.TPUEmbedding(None, plan=users, rngs=rngs)
        self.items = te.TPUEmbedding(None, plan=items, rngs=rngs)
        self.norm = nnx.BatchNorm(6 * DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.linear = nnx.Linear(6 * DIM, 1, rngs=rngs)

    def __call__(self, ids):
        shifted = {"one": (ids["one"] + 1) % VOCABULARY_SIZE, "bag": ids["bag"]}
        found = [self.items(ids), self.users(ids), self.items(shifted)]
        joined = jnp.concatenate([x for each in found for x in each.values()], axis=1)
        return self.linear(self.dropout(self.norm(joined)))[:, 0]


def loss_fn(model, ids, labels):
    predicted = model(ids)
    return jnp.mean((predicted - labels) ** 2), predicted


def make(num_devices=3, capacity=None):
    model = Model(num_devices, capacity)
    return model, te.Optimizer(model, optax.adam(0.01))


def batches_of(model, count, batch_size=BATCH):
    """Ids of few rows, so that neighbouring batches share them; one bag per sample."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        lengths = generator.integers(0, 4, batch_size)
        lengths[0] = 4 * batch_size - lengths[1:].sum()  # All batches of one size.
        bags = te.RaggedIds(
            values=generator.zipf(1.5, 4 * batch_size) % VOCABULARY_SIZE,
            row_splits=np.concatenate([[0], np.cumsum(lengths)]),
        )
        ids = {"one": generator.integers(0, 5, batch_size), "bag": bags}
        labels = generator.normal(size=batch_size).astype(np.float32)
        plan = model.items.plan
        yield te.inputs.shard_batch((model.items.prepare(ids), labels), plan)


@nnx.jit(donate_argnums=(0, 1))
def plain_step(model, optimizer, ids, labels):
    compute = te.value_and_grad(loss_fn, has_aux=True)
    result, gradients = compute(model, ids, labels)
    optimizer.update(model, gradients)
    return result


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


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_devices", "capacity", "num_steps"),
    [
        (3, 1, 20),
        *(pytest.param(n, None, 20, marks=pytest.mark.full) for n in (1, 3, 8)),
    ],
)
def test_exact_equals_a_plain_loop_bitwise(num_devices, capacity, num_steps):
    model, optimizer = make(num_devices, capacity)
    batches = list(batches_of(model, num_steps))
    expected = [plain_step(model, optimizer, *batch) for batch in batches]
    expected_state = values_of(model, optimizer)
    if capacity == 1:
        assert model.items.stats.get_value().rounds["stack_0"] > 1
    traces = []

    def counting_loss(model, ids, labels):
        traces.append(1)
        return loss_fn(model, ids, labels)

    model, optimizer = make(num_devices, capacity)
    pipeline = te.PipelinedTrainStep(counting_loss, has_aux=True)
    found = [pipeline(model, optimizer, *batch) for batch in batches[:2]]
    num_traces = len(traces)
    found += [pipeline(model, optimizer, *batch) for batch in batches[2:]]
    assert len(traces) == num_traces  # One compilation for the stream.
    found.append(pipeline.drain(model, optimizer))
    assert found[0] is None
    assert pipeline.drain(model, optimizer) is None
    assert_equal(found[1:], expected)
    assert_equal(values_of(model, optimizer), expected_state)


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


@pytest.mark.parametrize(
    "num_devices", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 8))]
)
def test_stale_equals_a_reference_that_is_stale_in_the_same_way(num_devices):
    model = OneTable(num_devices)
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


@pytest.mark.full
def test_stale_is_exact_where_neighbouring_batches_share_no_row():
    """Stale activations of rows that no update in flight touches are up to date."""
    results = []
    for mode in ("exact", "stale"):
        model = OneTable(2)
        optimizer = te.Optimizer(model, optax.sgd(0.0))
        batches = [(np.arange(4) + 4 * (i % 2), np.ones(4, np.float32)) for i in (0, 1)]
        pipeline = te.PipelinedTrainStep(one_table_loss, mode=mode)
        results.append(run_pipeline(pipeline, model, optimizer, batches)[1:])
    assert_equal(*results)


@pytest.mark.full
@pytest.mark.parametrize(
    "mode", ["exact", pytest.param("stale", marks=pytest.mark.full)]
)
def test_batches_of_other_shapes_follow_each_other(mode):
    """The last batch of an epoch is smaller; it compiles anew and loses nothing."""
    model = OneTable(3)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    sizes = (12, 5, 12)
    generator = np.random.default_rng(0)
    batches = [(generator.integers(0, 6, n), np.ones(n, np.float32)) for n in sizes]
    pipeline = te.PipelinedTrainStep(one_table_loss, mode=mode)
    found = run_pipeline(pipeline, model, optimizer, batches)
    assert found[0] is None and np.isfinite(found[1:]).all()
    if mode == "exact":
        plain = OneTable(3)
        optimizer = te.Optimizer(plain, optax.sgd(0.1))
        for batch, loss in zip(batches, found[1:], strict=True):
            expected, gradients = te.value_and_grad(one_table_loss)(plain, *batch)
            optimizer.update(plain, gradients)
            # Without jit, XLA fuses less.
            np.testing.assert_allclose(loss, expected, rtol=1e-5)


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


class Noisy(OneTable):
    """Ids are drawn at random in each step."""

    def __init__(self, num_devices):
        super().__init__(num_devices)
        self.rngs = nnx.Rngs(0)

    def __call__(self, ids):
        shift = jax.random.randint(self.rngs.params(), ids.shape, 0, 3)
        return self.linear(self.embedding((ids + shift) % VOCABULARY_SIZE))[:, 0]


@pytest.mark.parametrize(
    ("model_class", "match"),
    [
        (Chained, "depend on the activations of layer 'embedding'"),
        (Weighted, "depend on the variable 'weights"),
        pytest.param(Noisy, "depend on the variable 'rngs", marks=pytest.mark.full),
    ],
)
def test_features_that_cannot_be_known_ahead_are_refused(model_class, match):
    model = model_class(2)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    pipeline = te.PipelinedTrainStep(one_table_loss)
    with pytest.raises(ValueError, match=match):
        pipeline(model, optimizer, np.arange(4), np.ones(4, np.float32))


class Hashed(OneTable):
    """Ids depend on a variable that nothing changes, and the loss prints."""

    def __init__(self, num_devices):
        super().__init__(num_devices)
        self.salt = nnx.Variable(jnp.int32(3))

    def __call__(self, ids):
        activations = self.embedding((ids * self.salt.get_value()) % VOCABULARY_SIZE)
        jax.debug.callback(lambda x: None, activations)
        return self.linear(activations)[:, 0]


def test_features_may_depend_on_fixed_variables():
    model = Hashed(2)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    batch = np.arange(4), np.ones(4, np.float32)
    expected = one_table_loss(model, *batch)
    pipeline = te.PipelinedTrainStep(one_table_loss)
    _, found = run_pipeline(pipeline, model, optimizer, [batch])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def change_tables(pipeline, model, optimizer, batch):
    model.embedding.set_embedding_tables({"items": np.zeros((VOCABULARY_SIZE, DIM))})
    pipeline(model, optimizer, *batch)


def update_between(pipeline, model, optimizer, batch):
    _, gradients = te.value_and_grad(one_table_loss)(model, *batch)
    optimizer.update(model, gradients)
    pipeline.drain(model, optimizer)


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
    "eager": one_table_loss,
    "nnx.jit": jitted_loss,
    "nnx.jit, donated batch": lambda model, *batch: loss_that_donates_its_batch(
        model, jax.tree.map(jnp.array, batch)
    ),
    "split, merge and update": split_and_merged,
}


@pytest.mark.parametrize(
    ("evaluate", "num_devices"),
    quick_cases(matrix(with_ids(EVALUATIONS), [1, 8]), "nnx.jit-8"),
)
def test_an_evaluation_between_calls_changes_nothing(evaluate, num_devices):
    batches = [(np.arange(8) + i, np.ones(8, np.float32)) for i in range(3)]

    def train(evaluate):
        model = OneTable(num_devices)
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


def jitted_update(pipeline, model, optimizer, batch):
    @nnx.jit
    def update(model, optimizer):
        _, gradients = te.value_and_grad(one_table_loss)(model, *batch)
        optimizer.update(
            model, te.gradients.scale(gradients, 0.0)
        )  # tables keep their bits

    update(model, optimizer)
    pipeline(model, optimizer, *batch)


def donating_evaluation(pipeline, model, optimizer, batch):
    nnx.jit(one_table_loss, donate_argnums=0)(model, *batch)
    pipeline(model, optimizer, *batch)


def restored(pipeline, model, optimizer, batch):
    nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model)))
    pipeline(model, optimizer, *batch)


MISUSE = {
    "update in jit": (jitted_update, "something else has changed"),
    "donating evaluation": (donating_evaluation, "a jitted function donated"),
    "another state": (restored, "a restored checkpoint"),
    "changed tables": (change_tables, "something else has changed"),
    "update between calls": (update_between, "Call drain before"),
    "another model": (call_with_another_model, "in flight for another model"),
    "inside jit": (call_inside_jit, "call it outside"),
}


@pytest.mark.parametrize(
    "case",
    quick_cases(MISUSE, "changed tables", "update between calls", "another model"),
)
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


@pytest.mark.parametrize("num_devices", quick_cases([1, 3, 8], "3"))
def test_dynamic_tables_equal_those_of_a_plain_loop_bitwise(num_devices):
    def make():
        model = Stream(num_devices)
        return model, te.Optimizer(model, optax.sgd(0.1))

    model, optimizer = make()
    batches = list(stream_batches(model, 12))
    expected, evictions = [], 0
    for batch in batches:
        expected.append(plain_stream_step(model, optimizer, *batch))
        evictions += int(model.tables.dynamic_stats.get_value()["user"].evictions)
    assert evictions > 50
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


def test_counts_are_those_of_the_batch_of_the_call():
    model = Stream(1)
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    pipeline = te.PipelinedTrainStep(stream_loss, insert_ids=insert_ids)
    for ids, labels in stream_batches(model, 3):
        pipeline(model, optimizer, ids, labels)
        counts = model.tables.dynamic_stats.get_value()["user"]
        assert counts.ids == 24
        num_new = int(counts.inserts)
        pipeline.drain(model, optimizer)
        assert model.tables.dynamic_stats.get_value()["user"].inserts == num_new > 0


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
