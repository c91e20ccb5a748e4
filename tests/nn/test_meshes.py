"""Models on meshes of two axes: batches over one, dense weights over the other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.lookup.placements import assert_replicas_equal, mesh_of_shape
from tests.rejections import rejects
from tests.tiers import quick_cases

full = pytest.mark.full

BATCH, DIM, HIDDEN = 24, 4, 16


def feature_config():
    big = te.TableConfig(vocabulary_size=53, dim=DIM, combiner="sum", name="big")
    small = te.TableConfig(
        vocabulary_size=7,
        dim=DIM,
        combiner="sum",
        name="small",
        placement=te.Replicated(),
    )
    return {
        "many": te.FeatureConfig(table=big, name="many"),
        "one": te.FeatureConfig(table=small, name="one"),
    }


class Model(nnx.Module):
    """Two dense layers; the first is split by columns, the second by rows."""

    def __init__(self, plan, rngs):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=rngs)
        generator = np.random.default_rng(0)
        is_split = plan.num_shards > 1
        columns = PartitionSpec(None, "model") if is_split else PartitionSpec()
        rows = PartitionSpec("model") if is_split else PartitionSpec()
        for name, shape, spec in (
            ("first", (2 * DIM, HIDDEN), columns),
            ("second", (HIDDEN, 1), rows),
        ):
            values = generator.normal(size=shape).astype(np.float32) / 4
            if AxisType.Explicit in plan.mesh.axis_types:
                # As types spell it; another name of the sharding would recompile.
                spec = PartitionSpec(*spec, *[None] * (2 - len(spec)))
            sharding = NamedSharding(plan.mesh, spec)
            setattr(self, name, nnx.Param(jax.device_put(values, sharding)))

    def __call__(self, features):
        activations = self.embedding(features)
        joined = jnp.concatenate([activations["many"], activations["one"]], axis=1)
        joined = over_data(joined, self.embedding.plan.mesh)
        hidden = jax.nn.relu(joined @ self.first[...])
        # With sharding in types, sums over a split axis ask for their result's type.
        is_explicit = AxisType.Explicit in jax.typeof(hidden).sharding.mesh.axis_types
        sharding = NamedSharding(self.embedding.plan.mesh, PartitionSpec("data", None))
        kind = dict(out_sharding=sharding) if is_explicit else {}
        return jnp.dot(hidden, self.second[...], **kind)[:, 0]


def over_data(activations, mesh):
    """Copies activations along the axis of the dense weights."""
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(activations, PartitionSpec("data", None))
    if "data" not in mesh.axis_names:
        return activations
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.lax.with_sharding_constraint(activations, sharding)


def loss_fn(model, features, labels):
    labels = over_data(labels[:, None], model.embedding.plan.mesh)[:, 0]
    return jnp.mean((model(features) - labels) ** 2)


def make_plan(mesh, **options):
    return te.make_plan(
        feature_config(), mesh, optimizer=te.optimizers.adagrad(0.1), **options
    )


def batch_of(plan, seed):
    generator = np.random.default_rng(seed)
    features = {
        "many": generator.integers(0, 53, (BATCH, 3)),
        "one": generator.integers(0, 7, BATCH),
    }
    labels = generator.normal(size=BATCH).astype(np.float32)
    return te.inputs.shard_batch(
        (te.inputs.prepare_features(features, plan), labels), plan
    )


def train(plan):
    """Returns losses, tables and dense weights of three steps."""
    model = Model(plan, nnx.Rngs(1))
    optimizer = te.Optimizer(model, optax.adam(1e-2))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, features, labels):
        loss, gradients = te.value_and_grad(loss_fn)(model, features, labels)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer, *batch_of(plan, seed)) for seed in range(3)]
    assert step.jitted_fn._cache_size() == 1
    assert_replicas_equal(model.embedding.tables.get_value())
    dense = [np.asarray(model.first[...]), np.asarray(model.second[...])]
    return losses, (model.embedding.embedding_tables(), dense)


@full
@pytest.mark.parametrize("is_explicit", [False, True])
def test_two_axes_give_equal_numbers(is_explicit):
    if not is_explicit:
        placement = te.Sharded(axes=("model",))
        found = train(make_plan(mesh_of_shape("4x2"), placement=placement))
    else:
        mesh = jax.make_mesh((4, 2), ("data", "model"))
        assert set(mesh.axis_types) == {AxisType.Explicit}
        with jax.set_mesh(mesh):
            found = train(make_plan(mesh))
    losses, state = train(make_plan(mesh_of_shape("1")))
    # Three steps; sums over samples and columns in another order.
    np.testing.assert_allclose(found[0], losses, rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        found[1],
        state,
    )


@pytest.mark.parametrize("size", quick_cases([2, 8]))
def test_a_batch_on_explicit_axes_is_taken_as_it_is(size):
    config = te.FeatureConfig(table=te.TableConfig(vocabulary_size=99, dim=4, name="a"))
    mesh = jax.make_mesh((size,), ("data",), devices=jax.devices()[:size])
    ids = np.arange(16, dtype=np.int32)
    batch = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
    for own_mesh in (mesh, mesh_of(size)):
        plan = te.make_plan(config, own_mesh, optimizer="adagrad")
        layer = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
        expected = layer.embedding_tables()["a"][ids]
        np.testing.assert_array_equal(layer(batch), expected)
        tables = layer.tables.get_value()
        for ids_on_mesh in (batch, te.inputs.shard_batch(batch, plan)):
            found = te.functional.lookup(tables, ids_on_mesh, plan).activations
            np.testing.assert_array_equal(found, expected)
    with rejects(fix="mesh=mesh"):
        nnx.eval_shape(lambda layer, ids: layer(ids), layer, batch)
