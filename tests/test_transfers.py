"""What the library moves on purpose works under `jax.transfer_guard("disallow")`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of


def make(vocabulary_size=40, **options):
    sizes = {"vocabulary_size": vocabulary_size, "dim": 4}
    table = te.TableConfig(**sizes, name="t", **options)
    layer = te.TPUEmbedding(
        te.FeatureConfig(table=table), "adagrad", mesh=mesh_of(2), rngs=nnx.Rngs(0)
    )
    return layer, te.Optimizer(layer, optax.sgd(0.1))


@pytest.fixture(scope="module")
def trained():
    return make()


def restore(model, optimizer, path):
    te.save(path / "saved", (model, optimizer))
    return te.restore(path / "saved", (model, optimizer))


def serve(model, optimizer, path):
    te.export.save(model, path / "served", np.arange(8))
    return te.export.load(path / "served")(np.arange(8))


def initial_tables(model, *_):
    with jax.transfer_guard("allow"):
        key = jax.random.key(0)
    return te.functional.init_tables(model.plan, key)


def dynamic_rows(*_):
    with jax.transfer_guard("allow"):
        layer, _ = make(vocabulary_size=te.Dynamic(capacity=64))
    return te.functional.dynamic_rows(layer.tables.get_value(), layer.plan)


CALLS = {
    "initial tables": initial_tables,
    "import": lambda model, optimizer, _: te.checkpoint.import_tables(
        {"t": np.ones((40, 4))}, model, optimizer
    ),
    "ids of rows": dynamic_rows,
    "tables": lambda model, optimizer, _: model.embedding_tables(),
    "values": lambda model, optimizer, _: optimizer.set_embedding_tables(
        model, {"t": np.zeros((40, 4))}
    ),
    "slots": lambda model, optimizer, _: optimizer.set_slot_values(
        optimizer.slot_values()
    ),
    "checkpoint": restore,
    "export": serve,
    "top_k": lambda model, optimizer, _: te.nn.top_k(model, np.ones((3, 4)), k=2),
    "ids": lambda model, optimizer, _: te.inputs.shard_batch(
        model.prepare(np.arange(8)), model.plan
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_that_move_arrays(call, trained, tmp_path):
    with jax.transfer_guard("disallow"):
        call(*trained, tmp_path)


@pytest.mark.full
def test_a_loop_that_brings_rows_from_the_host():
    model, optimizer = make(placement=te.HostRows(cache_rows=20))

    @nnx.jit
    def train_step(model, optimizer, ids):
        compute = te.value_and_grad(lambda model: jnp.sum(model(ids) ** 2))
        _, gradients = compute(model)
        optimizer.update(model, gradients)

    batches = [np.arange(i, i + 8, dtype=np.int32) for i in range(5)]
    with jax.transfer_guard("disallow"):
        for ids in te.host_rows(batches, model, optimizer, features_of=lambda x: x):
            train_step(model, optimizer, te.inputs.shard_batch(ids, model.plan))
        assert model.embedding_tables()["t"].shape == (40, 4)
    assert int(optimizer.step[...]) == 5
