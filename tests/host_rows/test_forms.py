"""Linen states, explicit arrays, and models of several layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.host_rows import models
from tests.host_rows.models import ROWS, batches, feed
from tests.host_rows.test_exact import RULES
from tests.host_rows.twins import Run, check_equal, zipf_ids
from tests.rejections import rejects
from tpu_embedding.nn.linen.variables import layer_tables


def plan_of(placement, name="user"):
    table = te.TableConfig(
        vocabulary_size=ROWS, dim=4, name=name, combiner="sum", placement=placement
    )
    config = {"user": te.FeatureConfig(table=table)}
    return te.make_plan(config, mesh_of(2), optimizer=RULES["adagrad"])


class LinenModel(nn.Module):
    plan: te.EmbeddingPlan

    @nn.compact
    def __call__(self, batch):
        rows = te.linen.TPUEmbedding(self.plan, name="embedding")(batch)["user"]
        return nn.Dense(1)(rows)[:, 0]


@jax.jit
def linen_step(state, batch):
    def loss_of(variables):
        return jnp.mean((state.apply_fn(variables, batch) - 1) ** 2)

    loss, gradients = te.linen.value_and_grad(loss_of)(state.variables)
    return state.apply_gradients(grads=gradients), loss


def linen_state(placement, batch):
    """Tables can't be made inside jit, which can't fill the host's memory."""
    model = LinenModel(plan_of(placement))
    variables = model.init(jax.random.key(0), batch)
    return te.linen.TrainState.create(
        apply_fn=model.apply, variables=variables, tx=optax.adam(0.01)
    )


def identity(batch):
    return batch


def linen_losses(state, data):
    losses = []
    for batch, bring in te.linen.host_rows(data, state, features_of=identity):
        state, loss = linen_step(bring(state), batch)
        losses.append(float(loss))
    return state, losses


def linen_values(state):
    plan = layer_tables(state.variables)["embedding"].plan
    return {
        "tables": te.linen.embedding_tables(state.variables),
        "slots": te.functional.slot_values(state.slots["embedding"], plan, "all"),
        "dense": jax.tree.map(np.asarray, state.variables["params"]),
    }


@pytest.mark.full
def test_linen(tmp_path):
    data = batches(12)
    twin, expected = linen_losses(linen_state(te.Sharded(), data[0]), data)
    state = linen_state(models.CACHE, data[0])
    state, losses = linen_losses(state, data[:7])
    te.save(tmp_path / "a", state)
    other = linen_state(te.HostRows(cache_rows=90), data[0])
    other = te.restore(tmp_path / "a", other)
    for saved in (state, other):
        trained, later = linen_losses(saved, data[7:])
        assert losses + later == expected
        check_equal(linen_values(trained), linen_values(twin))


def test_linen_states_are_not_serialized_in_part():
    state = linen_state(models.CACHE, batches(1)[0])
    for convert in (serialization.to_state_dict, serialization.to_bytes):
        with rejects(ValueError, fix="te.save"):
            convert(state)


class Towers(nnx.Module):
    """Two layers; the second has a table on the devices as well."""

    def __init__(self, placement, rngs):
        self.user = te.TPUEmbedding(None, plan=plan_of(placement), rngs=rngs)
        tables = {
            name: te.TableConfig(
                vocabulary_size=size, dim=4, name=name, placement=place, optimizer=rule
            )
            for name, size, place, rule in (
                ("item", 200, placement, te.optimizers.adagrad(0.1)),
                ("shop", 20, te.Sharded(), te.optimizers.sgd(0.1)),
            )
        }
        config = {name: te.FeatureConfig(table=table) for name, table in tables.items()}
        self.item = te.TPUEmbedding(config, mesh=mesh_of(2), rngs=rngs)

    def __call__(self, batch):
        user, item = self.user(batch["user"])["user"], self.item(batch["item"])
        return jnp.sum(user * (item["item"] + item["shop"]), axis=1)


@pytest.mark.full
def test_several_layers():
    draw = np.random.default_rng(0)
    data = [
        {
            "user": batch,
            "item": {
                "item": zipf_ids(draw, (8,), 200),
                "shop": zipf_ids(draw, (8,), 20),
            },
        }
        for batch in batches(12)
    ]
    results = []
    for placement in (te.HostRows(cache_rows=90), te.Sharded()):
        model = Towers(placement, nnx.Rngs(0))
        optimizer = te.Optimizer(model, optax.adam(0.01))
        losses = [
            float(models.train(model, optimizer, batch))
            for batch in te.host_rows(data, model, optimizer, features_of=identity)
        ]
        tables = [x.embedding_tables() for x in (model.user, model.item)]
        results.append((losses, tables, optimizer.slot_values("all")))
    check_equal(*results)


@pytest.mark.full
def test_features_of_an_unknown_layer():
    model = Towers(te.HostRows(cache_rows=90), nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.adam(0.01))
    with rejects(ValueError, fix="features_of"):
        next(feed(batches(4), model, optimizer, features_of=lambda x: {"users": x}))


@pytest.mark.parametrize("times", [0, 2])
def test_a_functional_loop_that_does_not_bring_once(times):
    """Rows of another batch would come into the cache."""
    run = Run(plan=plan_of(models.CACHE))
    drawn = te.functional.host_rows(
        batches(6), run.tables, run.plan, features_of=identity
    )
    _, bring = next(drawn)
    with rejects(ValueError, fix="host_rows"):
        for _ in range(times):
            run.tables, run.slots = bring(run.tables, run.slots)
        for batch, bring in drawn:
            run.tables, run.slots = bring(run.tables, run.slots)
            run.train(batch)
