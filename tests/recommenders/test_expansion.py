"""Unique ids as a plain feature, expanded late, with the gradients of plain rows."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.recommenders import unique_ids

NUM_ROWS, DIM, LENGTH = 50, 4, 5
TABLES = {
    name: te.TableConfig(vocabulary_size=NUM_ROWS, dim=DIM, combiner="sum", name=name)
    for name in ("item", "artist")
}
CONFIG = {
    "items": te.FeatureConfig(table=TABLES["item"], output_shape=(-1,)),
    "artists": te.FeatureConfig(table=TABLES["artist"], output_shape=(-1,)),
    "bag": te.FeatureConfig(table=TABLES["item"]),
}
# Repeated, empty, and of the maximum length; one longer, which is cut.
HISTORIES = [[3, 3, 7], [], [7, 49, 3, 0, 1, 2, 8], [5], [3], [9, 9, 9, 9, 9], [1]]
CANDIDATES = np.array([7, 3, 3, 5, 11, 0, 1], np.int32)
BAGS = np.array([[3, 1], [20, 20], [0, 2], [3, 3], [1, 8], [49, 4], [7, 6]], np.int32)
ARTISTS = np.arange(NUM_ROWS) // 3
KERNEL = np.linspace(-1, 1, 2 * DIM * 3, dtype=np.float32).reshape(2 * DIM, 3)


def ids_of(of_item):
    """Returns the ids of events and candidates."""
    lists = [of_item[np.array(ids, int)].tolist() for ids in HISTORIES]
    return {
        "history": te.RaggedIds.from_lists(lists),
        "candidate": of_item[CANDIDATES],
    }


def prepared(plan):
    """Returns a batch and the index of its items."""
    items = te.inputs.unique_ids(
        ids_of(np.arange(NUM_ROWS)), plan, "items", length=LENGTH
    )
    features = {
        "items": items.ids,
        "artists": items.attribute_ids(ids_of(ARTISTS)),
        "bag": BAGS,
    }
    return te.inputs.prepare_features(features, plan), items.index


def plan_of(mesh, **options):
    return te.make_plan(CONFIG, mesh, optimizer=te.optimizers.sgd(1.0), **options)


def content_of(items, artists):
    return jnp.tanh(jnp.concatenate([items, artists], axis=-1) @ KERNEL)


def loss_of(history, candidate, bag, is_event):
    history = jnp.where(is_event, history, 0.0).sum(1)
    return jnp.mean(((history * candidate).sum(-1) + bag.sum(-1)) ** 2)


def is_event():
    lengths = np.array([len(ids[:LENGTH]) for ids in HISTORIES])
    return (np.arange(LENGTH) < lengths[:, None])[..., None]


def dense_loss(tables):
    """The loss by `table[ids]`, with a row per event."""
    cut = [ids[:LENGTH] for ids in HISTORIES]
    padded = np.array([ids + [0] * (LENGTH - len(ids)) for ids in cut])
    history, candidate = (
        content_of(tables["item"][ids], tables["artist"][ARTISTS[ids]])
        for ids in (padded, CANDIDATES)
    )
    return loss_of(history, candidate, tables["item"][BAGS].sum(1), is_event())


def train_by_nnx(plan):
    layer = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(layer, optax.sgd(1.0))
    batch, index = prepared(plan)

    @nnx.jit
    def step(layer, optimizer, batch, index):
        def loss_fn(layer):
            rows = layer(batch)
            expanded = layer.expand(content_of(rows["items"], rows["artists"]), index)
            return loss_of(**expanded, bag=rows["bag"], is_event=is_event())

        loss, gradients = te.value_and_grad(loss_fn)(layer)
        optimizer.update(layer, gradients)
        return loss

    with jax.set_mesh(plan.mesh):
        loss = step(layer, optimizer, batch, index)
        return loss, layer.embedding_tables()


def train_by_functions(plan):
    tables = te.functional.init_tables(plan, nnx.Rngs(0).params())
    slots = te.functional.init_slots(tables, plan)
    batch, index = prepared(plan)

    @jax.jit
    def step(tables, slots, batch, index):
        result = te.functional.lookup(tables, batch, plan)

        def loss_fn(rows):
            content = content_of(rows["items"], rows["artists"])
            expanded = te.functional.expand(content, index, plan)
            return loss_of(**expanded, bag=rows["bag"], is_event=is_event())

        loss, cotangents = jax.value_and_grad(loss_fn)(result.activations)
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        return loss, te.functional.apply_gradients(tables, slots, gradients, plan)[0]

    loss, tables = step(tables, slots, batch, index)
    return loss, te.functional.unstack_tables(tables, plan)


def check_step(way, plan):
    loss, tables = way(plan)
    initial = te.functional.unstack_tables(
        te.functional.init_tables(plan, nnx.Rngs(0).params()), plan
    )
    initial = {name: jnp.asarray(table) for name, table in initial.items()}
    wanted, gradients = jax.jit(jax.value_and_grad(dense_loss))(initial)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for name, gradient in gradients.items():
        table, before = tables[name], np.asarray(initial[name])
        np.testing.assert_allclose(table, before - gradient, rtol=1e-6, atol=2e-6)
        untouched = ~np.any(gradient, axis=1)
        np.testing.assert_array_equal(table[untouched], before[untouched])


@pytest.mark.parametrize("num_devices", quick_cases([1, 2, 8], "2"))
def test_a_step_equals_that_of_one_row_per_event(num_devices):
    check_step(train_by_functions, plan_of(mesh_of(num_devices)))


def two_axes(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes_of_two_axes_give_equal_numbers(kind):
    check_step(train_by_nnx, plan_of(two_axes(kind)))


def test_events_never_cross_the_network():
    plan = plan_of(two_axes(AxisType.Auto))
    ids = np.random.default_rng(0).integers(0, 9, (8, LENGTH))
    unique = te.inputs.unique_ids(ids, plan, "items")
    values = jnp.ones((len(unique.ids), 16))

    def total(values):
        return jnp.sum(te.functional.expand(values, unique.index, plan) ** 2)

    values = jax.device_put(values, plan.batch_sharding)
    text = jax.jit(jax.grad(total)).lower(values).compile().as_text()
    sizes = re.findall(r"= f32\[([\d,]+)\]\S* (?:all-gather|all-to-all)\(", text)
    assert all(math.prod(map(int, s.split(","))) <= values.size for s in sizes)


def test_narrow_values_are_summed_in_float32(monkeypatch):
    """Slices of positions, and the rest after the last one, equal one sum of all."""
    monkeypatch.setattr(unique_ids, "_MAX_SUMMED_POSITIONS", 64)
    index = np.random.default_rng(0).integers(0, 5, (100, 3)).astype(np.int32)
    values = jnp.ones((4, 2), jnp.bfloat16)  # so the index 4 is padding

    def total(values, weights):
        return jnp.sum(te.functional.expand(values, index, None) * weights)

    weights = jnp.full((100, 3, 2), 1 / 3, jnp.bfloat16)
    gradient = jax.grad(total)(values, weights)
    wanted = np.bincount(index.ravel(), minlength=5)[:4] * float(weights[0, 0, 0])
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        gradient, jnp.asarray(wanted, jnp.bfloat16)[:, None] * jnp.ones((1, 2))
    )


def test_values_that_devices_cannot_share_are_rejected():
    with rejects(field="values", value=[5, 2]):
        te.functional.expand(jnp.ones((5, 2)), CANDIDATES, plan_of(mesh_of(2)))
