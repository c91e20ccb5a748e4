"""Unique rows: once per device, expanded late, with the gradients of plain rows."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import full_cases
from tpu_embedding.functional import unique_rows

NUM_ROWS, LENGTH = 50, 5
ITEM = te.TableConfig(vocabulary_size=NUM_ROWS, dim=4, combiner="sum", name="item")
ITEMS = te.FeatureConfig(table=ITEM, unique_rows=True, max_sequence_length=LENGTH)
CONFIG = {"items": ITEMS, "bag": te.FeatureConfig(table=ITEM)}
# Repeated, empty, and of the maximum length; one longer, which is cut.
HISTORIES = [[3, 3, 7], [], [7, 49, 3, 0, 1, 2, 8], [5], [3], [9, 9, 9, 9, 9], [1]]
CANDIDATES = np.array([7, 3, 3, 5, 11, 0, 1], np.int32)
BAGS = np.array([[3, 1], [20, 20], [0, 2], [3, 3], [1, 8], [49, 4], [7, 6]], np.int32)
BATCH = {
    "items": {"history": HISTORIES, "candidate": CANDIDATES},
    "bag": BAGS,
}
DENSE = {
    "kernel": jnp.linspace(-1, 1, 12).reshape(4, 3),
    "bias": jnp.array([0.1, -0.2, 0.3]),
}


@functools.cache
def plan_of(num_devices, **options):
    optimizer = te.optimizers.sgd(1.0)
    return te.make_plan(CONFIG, mesh_of(num_devices), optimizer=optimizer, **options)


def initial_tables(plan):
    return te.functional.init_tables(plan, nnx.Rngs(0).params())


def transform(rows, dense):
    products = rows @ dense["kernel"]
    return jnp.tanh(products + jnp.broadcast_to(dense["bias"], products.shape))


def score(content, target, history, bag, is_event):
    """A score from transformed events and candidates, plain events, and bags."""
    content = jnp.where(is_event, content, 0.0).sum(1)
    return (content * target).sum(-1) + 0.1 * history.sum((1, 2)) ** 2 + bag.sum(-1)


def loss_of(activations, dense):
    unique = activations["items"]
    expanded = unique.expand(transform(unique.rows, dense))
    return jnp.mean(
        score(
            expanded["history"],
            expanded["candidate"],
            unique.expand()["history"],
            activations["bag"],
            unique.is_id()["history"][..., None],
        )
        ** 2
    )


def dense_loss(table, dense):
    """The same loss by `table[ids]`, with a row per event."""
    cut = [ids[:LENGTH] for ids in HISTORIES]
    padded = np.array([ids + [0] * (LENGTH - len(ids)) for ids in cut])
    lengths = np.array([len(ids) for ids in cut])
    is_event = (np.arange(LENGTH) < lengths[:, None])[..., None]
    history = jnp.where(is_event, table[padded], 0.0)
    content, target = (transform(rows, dense) for rows in (history, table[CANDIDATES]))
    bag = table[BAGS].sum(1)
    return jnp.mean(score(content, target, history, bag, is_event) ** 2)


class Model(nnx.Module):
    """The loss as a Flax NNX model."""

    def __init__(self, plan):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
        self.kernel = nnx.Param(jnp.array(DENSE["kernel"]))
        self.bias = nnx.Param(jnp.array(DENSE["bias"]))

    def __call__(self, batch):
        return loss_of(self.embedding(batch), self.values())

    def values(self):
        return {"kernel": self.kernel.get_value(), "bias": self.bias.get_value()}


def train_by_nnx(plan, batch):
    model = Model(plan)
    optimizer = te.Optimizer(model, optax.sgd(1.0))

    @nnx.jit
    def step(model, optimizer, batch):
        loss, gradients = te.value_and_grad(Model.__call__)(model, batch)
        optimizer.update(model, gradients)
        return loss

    loss = step(model, optimizer, batch)
    return loss, model.values(), model.embedding.embedding_tables()


def train_in_a_pipeline(mode, plan, batch):
    model = Model(plan)
    optimizer = te.Optimizer(model, optax.sgd(1.0))
    pipeline = te.PipelinedTrainStep(Model.__call__, mode=mode)
    pipeline(model, optimizer, batch)
    loss = pipeline.drain(model, optimizer)
    return loss, model.values(), model.embedding.embedding_tables()


class LinenModel(nn.Module):
    """The loss as a Linen model."""

    plan: te.EmbeddingPlan

    @nn.compact
    def __call__(self, batch):
        dense = {
            name: self.param(name, lambda key, value=value: value)
            for name, value in DENSE.items()
        }
        return loss_of(te.linen.TPUEmbedding(self.plan)(batch), dense)


def train_by_linen(plan, batch):
    model = LinenModel(plan)
    variables = model.init(jax.random.key(0), batch)
    (layer,) = te.linen.embedding_tables(variables)
    values = {layer: te.functional.unstack_tables(initial_tables(plan), plan)}
    state = te.linen.TrainState.create(
        apply_fn=model.apply, variables=variables, tx=optax.sgd(1.0)
    ).with_embedding_tables(values)
    loss, gradients = te.linen.value_and_grad(lambda v: model.apply(v, batch))(
        state.variables
    )
    state = state.apply_gradients(grads=gradients)
    tables = te.linen.embedding_tables(state.variables)[layer]
    return loss, state.variables["params"], tables


def train_by_functions(plan, batch):
    tables = initial_tables(plan)
    slots = te.functional.init_slots(tables, plan)
    result = te.functional.lookup(tables, batch, plan)

    def loss_fn(activations, dense):
        unique = te.functional.UniqueRows(
            rows=activations["items"], ids=batch["items"], plan=plan
        )
        return loss_of(activations | {"items": unique}, dense)

    loss, (cotangents, gradients) = jax.value_and_grad(loss_fn, argnums=(0, 1))(
        result.activations, DENSE
    )
    by_table = te.functional.compute_gradients(result.routing, cotangents, plan)
    tables, _ = te.functional.apply_gradients(tables, slots, by_table, plan)
    dense = jax.tree.map(lambda value, g: value - g, DENSE, gradients)
    return loss, dense, te.functional.unstack_tables(tables, plan)


WAYS = {
    "nnx": train_by_nnx,
    "exact": functools.partial(train_in_a_pipeline, "exact"),
    "stale": functools.partial(train_in_a_pipeline, "stale"),
    "linen": train_by_linen,
    "functions": train_by_functions,
}


@pytest.mark.parametrize("way", full_cases(WAYS, "exact", "functions", "linen"))
def test_a_step_equals_that_of_one_row_per_event(way):
    plan = plan_of(2)
    batch = te.inputs.prepare_features(BATCH, plan)
    loss, dense, tables = WAYS[way](plan, batch)
    initial = te.functional.unstack_tables(initial_tables(plan), plan)["item"]
    wanted, (by_table, by_dense) = jax.value_and_grad(dense_loss, argnums=(0, 1))(
        initial, DENSE
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(tables["item"], initial - by_table, rtol=1e-6, atol=1e-6)
    for name, value in DENSE.items():
        np.testing.assert_allclose(
            dense[name], value - by_dense[name], rtol=0, atol=1e-6
        )
    untouched = [row for row in range(NUM_ROWS) if not np.any(by_table[row])]
    np.testing.assert_array_equal(tables["item"][untouched], initial[untouched])


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize(
    ("kind", "batch_axes"), [("auto", ("data",)), ("explicit", ("model",))]
)
def test_meshes_of_two_axes_give_equal_numbers(kind, batch_axes):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(KINDS[kind],) * 2)
    plan = te.make_plan(
        CONFIG, mesh, optimizer=te.optimizers.sgd(1.0), batch_axes=batch_axes
    )
    batch = te.inputs.prepare_features(BATCH, plan)
    with jax.set_mesh(mesh):
        loss, dense, tables = WAYS["nnx"](plan, batch)
    wanted, wanted_dense, wanted_tables = WAYS["functions"](
        plan_of(1), te.inputs.prepare_features(BATCH, plan_of(1))
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for name, value in wanted_tables.items():
        np.testing.assert_allclose(tables[name], value, rtol=1e-6, atol=1e-6)
    for name, value in wanted_dense.items():
        np.testing.assert_allclose(dense[name], value, rtol=0, atol=1e-6)


def test_events_never_cross_the_network():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    plan = te.make_plan(CONFIG, mesh, batch_axes=("data",))
    lists = np.random.default_rng(0).integers(0, 9, (8, LENGTH)).tolist()
    ids = te.inputs.prepare_features({"items": lists}, plan)["items"]
    values = jnp.ones((ids.ids.size, 16))

    def total(values):
        return jnp.sum(te.functional.expand(values, ids, plan) ** 2)

    text = jax.jit(jax.grad(total)).lower(values).compile().as_text()
    sizes = re.findall(r"= f32\[([\d,]+)\]\S* (?:all-gather|all-to-all)\(", text)
    assert sizes
    assert all(math.prod(map(int, s.split(","))) <= values.size for s in sizes)


@pytest.mark.parametrize(
    ("policy", "unique", "is_id"),
    [("drop", [1, 2], [True, False, False]), ("clip", [1, 2, 49], [True] * 3)],
)
def test_ids_outside_the_table_are_dropped_or_clipped_and_counted(
    policy, unique, is_id
):
    feature = dataclasses.replace(ITEMS, out_of_range_ids=policy)
    plan = te.make_plan({"items": feature}, mesh_of(1))
    ids = np.array([[1, 60, 2**40], [60, 70, 2]])
    batch = te.inputs.prepare_features({"items": ids}, plan)
    result = te.functional.lookup(initial_tables(plan), batch, plan)
    kept = batch["items"].ids[batch["items"].ids < NUM_ROWS]
    assert kept.tolist() == unique
    assert int(result.stats.out_of_range["items"]) == 4
    rows = te.functional.UniqueRows(
        rows=result.activations["items"], ids=batch["items"], plan=plan
    )
    assert rows.is_id()[0].tolist() == is_id
    assert int(rows.is_row().sum()) == len(unique)


@pytest.mark.full(every_case=True)
def test_one_batch_in_two_calls_and_several_tables():
    other = te.TableConfig(vocabulary_size=NUM_ROWS, dim=2, name="other")
    both = te.FeatureConfig(
        table=(ITEM, other), unique_rows=True, max_sequence_length=LENGTH
    )
    plan = te.make_plan({"items": both}, mesh_of(1), optimizer=te.optimizers.sgd(1.0))
    layer = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
    batch = layer.prepare({"items": BATCH["items"]})
    first, second = layer(batch)["items"]
    tables = layer.embedding_tables()
    for unique, name in ((first, "item"), (second, "other")):
        candidates = unique.expand()["candidate"]
        np.testing.assert_array_equal(candidates, tables[name][CANDIDATES])

    def loss_fn(layer, batch):
        calls = [layer(batch)["items"][0].expand()["candidate"] for _ in range(2)]
        return jnp.sum(calls[0] * calls[1])

    _, gradients = te.value_and_grad(loss_fn)(layer, batch)
    te.Optimizer(layer, optax.sgd(0.1)).update(layer, gradients)
    counts = np.bincount(CANDIDATES, minlength=NUM_ROWS)[:, None]
    wanted = tables["item"] * (1 - 2 * counts)
    found = layer.embedding_tables()["item"]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_narrow_values_are_summed_in_float32(monkeypatch):
    """Slices of places, and the rest behind the last one, equal one sum of all."""
    monkeypatch.setattr(unique_rows, "_MAX_SUMMED_PLACES", 64)
    index = np.random.default_rng(0).integers(0, 5, (100, 3)).astype(np.int32)
    values = jnp.ones((4, 2), jnp.bfloat16)  # so the index 4 is padding

    ids = te.inputs.UniqueIds(
        ids=np.arange(4)[None], index=index, out_of_range=np.zeros(1, np.int32)
    )

    def total(values, weights):
        return jnp.sum(te.functional.expand(values, ids, None) * weights)

    weights = jnp.full((100, 3, 2), 1 / 3, jnp.bfloat16)
    gradient = jax.grad(total)(values, weights)
    wanted = np.bincount(index.ravel(), minlength=5)[:4] * float(weights[0, 0, 0])
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        gradient, jnp.asarray(wanted, jnp.bfloat16)[:, None] * jnp.ones((1, 2))
    )


def test_each_row_is_read_once_per_device():
    plan = plan_of(3)
    batch = te.inputs.prepare_features(BATCH, plan)["items"]
    parts = [slice(0, 3), slice(3, 6), slice(6, 9)]
    for shard, part in enumerate(parts):
        events = [i for ids in HISTORIES[part] for i in ids[:LENGTH]]
        wanted = sorted({*events, *CANDIDATES[part].tolist()})
        found = batch.ids[shard][batch.ids[shard] != te.inputs.PADDING_ROW_ID]
        assert found.tolist() == wanted


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"a": [1, 2], "b": [1, 2, 3]}, "the same number of samples"),
        ({"a": [1, 2], "b": [50, 2]}, r"'items/b' must lie in \[0, 50\)"),
        ({"a": [0.5]}, "must be integers"),
        ({}, "is a mapping"),
        (te.DenseIds(ids=np.ones(2, int), weights=np.ones(2)), "has weights and uniq"),
        (np.zeros((2, 3, 4), int), "reshape the expanded rows"),
    ],
)
def test_wrong_ids_are_refused(ids, message):
    plan = te.make_plan({"items": ITEMS}, mesh_of(1))
    with pytest.raises((TypeError, ValueError), match=message):
        te.inputs.prepare_features({"items": ids}, plan)


def test_ids_that_were_not_prepared_are_refused():
    plan = plan_of(1)
    with pytest.raises(TypeError, match="pass the raw ids through prepare"):
        te.functional.lookup(
            initial_tables(plan), {"items": CANDIDATES, "bag": BAGS}, plan
        )
