"""Calls of the layer with some features, and with others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases

full = pytest.mark.full

SIZE = 13
ITEM = te.TableConfig(vocabulary_size=SIZE, dim=4, combiner="sum", name="item")
LINEAR = te.TableConfig(vocabulary_size=SIZE, dim=1, combiner="sum", name="linear")
CONFIG = {
    "item": [te.FeatureConfig(table=LINEAR), te.FeatureConfig(table=ITEM)],
    "user": {
        "id": te.FeatureConfig(table=ITEM),
        "bias": te.FeatureConfig(table=LINEAR),
    },
}


def ragged(samples):
    return te.RaggedIds(
        values=np.concatenate(samples), row_splits=np.cumsum([0, *map(len, samples)])
    )


ITEM_IDS = ragged([[1, 2], [3], [3, 3, 4], [5], [6, 7]])
USER_IDS = np.array([8, 9, 9, 10, 1])
BATCH = {"item": [ITEM_IDS, ITEM_IDS], "user": {"id": USER_IDS, "bias": USER_IDS}}


def layer_on(num_devices):
    rule, mesh = te.optimizers.sgd(1.0), mesh_of(num_devices)
    return te.TPUEmbedding(CONFIG, rule, mesh=mesh, rngs=nnx.Rngs(0))


SUBSETS = {
    "one stack": {"user": {"bias": USER_IDS}},
    "two tables": {"item": [ITEM_IDS, ITEM_IDS]},
}


@pytest.mark.parametrize("case", quick_cases(SUBSETS))
def test_a_subset_of_the_features(case):
    layer, batch = layer_on(2), SUBSETS[case]
    everything = layer(layer.prepare(BATCH))
    some = layer(layer.prepare(batch))
    (name,) = batch
    expected = everything[name]
    if name == "user":
        expected = {"bias": expected["bias"]}
        twice = layer(batch, {"user": {"bias": np.full(5, 2.0)}})
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 2 * y), twice, some)
    jax.tree.map(np.testing.assert_array_equal, some, {name: expected})
    # Stacks that were not looked up had no round.
    used = layer.plan.match(batch)[0].used_stacks
    rounds = layer.stats.get_value().rounds
    assert {name for name, n in rounds.items() if n} == {s.name for s in used}


SERVING = {
    "candidates": te.FeatureConfig(table=ITEM, max_sequence_length=3),
    "both": [
        te.FeatureConfig(table=table, output_shape=(2, 2)) for table in (ITEM, LINEAR)
    ],
}


def test_other_features_on_the_same_tables():
    layer = layer_on(1)
    tables = layer.embedding_tables()
    ids = {
        "candidates": ragged([[1, 2, 3, 4], [5]]),
        "both": [np.array([1, 2, 3, 4])] * 2,
    }
    prepared = layer.prepare(ids, serving_config=SERVING)
    found = layer(prepared, serving_config=SERVING)
    np.testing.assert_array_equal(found["candidates"][0], tables["item"][1:4])
    assert not np.any(found["candidates"][1, 1:])
    item, linear = found["both"]
    np.testing.assert_array_equal(item.reshape(4, 4), tables["item"][1:5])
    np.testing.assert_array_equal(linear.reshape(4, 1), tables["linear"][1:5])
    # A subset of them.
    part = {"both": prepared["both"]}
    np.testing.assert_array_equal(
        layer(part, serving_config=SERVING)["both"][0], found["both"][0]
    )

    def loss_fn(layer):
        return jnp.sum(layer(part, serving_config=SERVING)["both"][1])

    _, gradients = te.value_and_grad(loss_fn)(layer)
    te.Optimizer(layer, optax.sgd(1.0)).update(layer, gradients)
    after = layer.embedding_tables()
    np.testing.assert_array_equal(after["item"], tables["item"])
    moved = tables["linear"] - after["linear"]
    np.testing.assert_allclose(moved[1:5], 1, rtol=1e-5)


@full
def test_calls_with_other_features_compile_once_each():
    layer, traces = layer_on(2), []

    @nnx.jit
    def call(layer, features):
        traces.append(features)
        config = SERVING if "both" in features else None
        return layer(features, serving_config=config)

    items = layer.prepare({"item": [ITEM_IDS, ITEM_IDS]})
    for _ in range(3):
        call(layer, items)
        call(layer, {"user": {"id": USER_IDS}})
        call(layer, {"both": [np.array([1, 2, 3, 4])] * 2})
    assert len(traces) == 3


SHOP = te.TableConfig(vocabulary_size=3, dim=4, name="shop")
MISUSE = {
    "unknown key": (lambda layer: layer({"shop": USER_IDS}), "features"),
    "nothing": (lambda layer: layer({}), "features"),
    "another table": (
        lambda layer: layer(USER_IDS, serving_config=te.FeatureConfig(table=SHOP)),
        "feature_config",
    ),
    "no config": (lambda layer: layer(USER_IDS, serving_config=ITEM), "feature_config"),
    "weights of other features": (
        lambda layer: layer({"user": {"id": USER_IDS}}, {"user": {"bias": np.ones(5)}}),
        "weights",
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_gives_one_clear_error(case):
    call, field = MISUSE[case]
    with rejects(field=field):
        call(layer_on(1))
