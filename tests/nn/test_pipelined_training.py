"""The pipelined train step against plain loops: exact, or stale by one update."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import full_cases, quick_cases, with_ids

BATCH = 12
VOCABULARY_SIZE, DIM = 20, 4


def values_of(model, optimizer):
    state = nnx.state((model, optimizer))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves if not is_key(x)
    }


def run_pipeline(step, model, optimizer, batches):
    """Returns the loss of each batch."""
    pairs = itertools.pairwise([*batches, None])
    return [step(model, optimizer, *pair) for pair in pairs]


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


def one_table_loss(model, batch):
    ids, labels = batch
    return jnp.mean((model(ids) - labels) ** 2)


def one_table_step(loss_fn=one_table_loss, **options):
    return te.PipelinedTrainStep(loss_fn, features_of=lambda batch: batch[0], **options)


SMALL_BATCH = np.arange(4), np.ones(4, np.float32)


def make(num_devices=1):
    model = OneTable(num_devices)
    return model, te.Optimizer(model, optax.sgd(0.1))


@pytest.mark.full
def test_statistics_are_those_of_the_batch_that_was_trained():
    model, optimizer = make()
    step, labels, found = one_table_step(), np.ones(8, np.float32), []
    batches = [(np.where(np.arange(8) < n, 99, 0), labels) for n in (1, 2, 3)]
    for batch, next_batch in itertools.pairwise([*batches, None]):
        step(model, optimizer, batch, next_batch)
        (count,) = model.embedding.stats.get_value().out_of_range.values()
        found.append(int(count))
    assert found == [1, 2, 3]


def test_stale_equals_a_reference_that_is_stale_in_the_same_way():
    model, optimizer = make()
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
    found = run_pipeline(one_table_step(mode="stale"), model, optimizer, batches)
    # Gradients of equal ids are summed in another order.
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    values = model.embedding.embedding_tables()["items"]
    np.testing.assert_allclose(values, reference.tables[1], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_gradients_are_transformed_before_the_update():
    model, optimizer = make(num_devices=2)
    before = model.embedding.embedding_tables()["items"]
    step = one_table_step(
        transform_gradients=lambda gradients: te.gradients.scale(gradients, 0.0)
    )
    run_pipeline(step, model, optimizer, [SMALL_BATCH])
    np.testing.assert_array_equal(model.embedding.embedding_tables()["items"], before)


class Chained(OneTable):
    """Ids of the second call come from activations of the first."""

    def __call__(self, ids):
        nearest = jnp.argmax(self.embedding(ids), axis=1)
        return self.linear(self.embedding(nearest))[:, 0]


UNKNOWN_AHEAD = {
    "learned weights": lambda model, batch: jnp.sum(
        model.embedding(batch[0], jnp.ones(4) * model.linear.bias.get_value())
    ),
    "changed ids": lambda model, batch: one_table_loss(model, (batch[0] + 1, batch[1])),
}


@pytest.mark.parametrize("loss_fn", UNKNOWN_AHEAD.values(), ids=UNKNOWN_AHEAD)
def test_features_that_cannot_be_known_ahead_are_rejected(loss_fn):
    model, optimizer = make()
    with rejects():
        one_table_step(loss_fn)(model, optimizer, SMALL_BATCH, None)


def train_otherwise(step, model, optimizer, batch):
    optimizer.update(model, te.grad(one_table_loss)(model, batch))
    step(model, optimizer, batch, None)


MISUSE = {
    "another batch": lambda step, model, optimizer, batch: step(
        model, optimizer, (batch[0], batch[1]), None
    ),
    "another update": train_otherwise,
    "another optimizer": lambda step, model, optimizer, batch: step(
        model, te.Optimizer(model, optax.sgd(0.1)), batch, None
    ),
    "inside jit": lambda step, model, optimizer, batch: nnx.jit(
        lambda m, o: step(m, o, batch, None)
    )(model, optimizer),
}


@pytest.mark.parametrize(
    "misuse", full_cases(with_ids(MISUSE), "another optimizer", "inside jit")
)
def test_misuse_gives_one_clear_error(misuse):
    model, optimizer = make()
    step = one_table_step(mode="stale")
    step(model, optimizer, SMALL_BATCH, SMALL_BATCH)
    with rejects():
        misuse(step, model, optimizer, SMALL_BATCH)


@pytest.mark.full
def test_mode_exact_goes_on_with_tables_that_were_set():
    """Only the ids of the next batch are in flight, and those depend on no table."""
    model, optimizer = make()
    step = one_table_step()
    step(model, optimizer, SMALL_BATCH, SMALL_BATCH)
    zeros = {"items": np.zeros((VOCABULARY_SIZE, DIM))}
    model.embedding.set_embedding_tables(zeros)
    expected = one_table_loss(model, SMALL_BATCH)
    loss = step(model, optimizer, SMALL_BATCH, None)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_wrong_modes_and_models_are_rejected():
    with rejects(field="mode", value="fast"):
        one_table_step(mode="fast")
    linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(linear, optax.sgd(0.1), wrt=nnx.Param)
    with rejects():
        one_table_step()(linear, optimizer, SMALL_BATCH, None)
    table = te.TableConfig(vocabulary_size=te.Dynamic(capacity=64), dim=DIM, name="t")
    features = te.FeatureConfig(table=table)
    layer = te.TPUEmbedding(features, te.optimizers.sgd(0.1), rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    with rejects(NotImplementedError, fix="optimizer.insert_ids"):
        one_table_step()(layer, optimizer, SMALL_BATCH, None)
    with rejects(field="pipeline_execution_with_tensor_core", value=True):
        te.TPUEmbedding(
            features, pipeline_execution_with_tensor_core=True, rngs=nnx.Rngs(0)
        )


@pytest.mark.parametrize("model_class", quick_cases([OneTable, Chained], "Chained"))
def test_mode_exact_equals_a_plain_loop_and_compiles_once(model_class):
    traces = []

    def counting_loss(model, batch):
        traces.append(1)
        return one_table_loss(model, batch)

    @nnx.jit(donate_argnums=(0, 1))
    def plain_step(model, optimizer, batch):
        loss, gradients = te.value_and_grad(one_table_loss)(model, batch)
        optimizer.update(model, gradients)
        return loss

    batches = [(np.arange(6) + i, np.full(6, i, np.float32)) for i in range(6)]
    plain, piped = (
        (model, te.Optimizer(model, optax.adam(0.1)))
        for model in (model_class(2), model_class(2))
    )
    expected = [plain_step(*plain, batch) for batch in batches]
    step = one_table_step(counting_loss)
    pairs = list(itertools.pairwise([*batches, None]))
    found = [step(*piped, *pair) for pair in pairs[:2]]
    num_traces = len(traces)
    found += [step(*piped, *pair) for pair in pairs[2:-1]]
    assert len(traces) == num_traces
    found.append(step(*piped, *pairs[-1]))
    np.testing.assert_array_equal(found, expected)
    jax.tree.map(np.testing.assert_array_equal, values_of(*piped), values_of(*plain))
    # After the last batch, it begins again.
    assert np.isfinite(step(*piped, batches[0], None))
