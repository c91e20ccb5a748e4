"""Tests the click model against its formula in NumPy."""

import types

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.conftest import mesh_of
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.tools.train.models import ClickModelConfig
from tpu_embedding.types import PADDING_ROW_ID

CONFIG = ClickModelConfig(
    dim=2, hidden_sizes=(5,), interactions="products", initial_deviation=0.5
)


def test_many_columns_reach_the_mlp():
    data = types.SimpleNamespace(
        vocabulary_sizes={"all": 700, "tag": 5}, sequence_lengths={"all": 70}
    )
    plan = make_plan(CONFIG.feature_config(data), mesh_of(1))
    model = CONFIG.build(data, plan, rngs=nnx.Rngs(0))
    columns = np.arange(700, dtype=np.int32).reshape(10, 70)[:4]
    ids = {"all": columns.copy(), "tag": np.array([3, 0, 1, 1])}
    ids["all"][[1, 1, 2], [0, 7, 69]] = PADDING_ROW_ID
    outputs = model(model.embedding.prepare(ids), None)
    tables = model.embedding.embedding_tables()
    rows = np.where((ids["all"] == columns)[..., None], tables["all"][columns], 0)
    rows = np.concatenate([rows, tables["tag"][ids["tag"]][:, None]], axis=1)
    pairs = np.einsum("bid,bjd->bijd", rows, rows)
    pairs = (pairs.sum(axis=(1, 2)) - np.einsum("biid->bd", pairs)) / 2 / 71
    inputs = np.concatenate([rows.sum(axis=1), pairs], axis=1)
    wanted = model.mlp(jnp.asarray(inputs, jnp.float32))[:, 0]
    np.testing.assert_allclose(outputs.scores, wanted, rtol=1e-4)


def test_products_and_numbers_reach_the_mlp():
    data = types.SimpleNamespace(
        vocabulary_sizes={"user": 7, "item": 5, "day": 3},
        number_scales={"price": (1.0, 2.0, 1.0, 8.0), "age": (0.5, 0.25, 4.0, 3.0)},
    )
    plan = make_plan(CONFIG.feature_config(data), mesh_of(1))
    model = CONFIG.build(data, plan, rngs=nnx.Rngs(0))
    ids = {
        "user": np.array([6, 0]),
        "item": np.array([1, 4]),
        "day": np.array([2, 2]),
    }
    numbers = {"price": np.array([-3.0, np.nan]), "age": np.array([np.nan, 40.0])}
    features = model.embedding.prepare(ids)
    outputs = model(features, {k: jnp.asarray(x) for k, x in numbers.items()})
    tables = model.embedding.embedding_tables()
    day, item, user = (tables[name][ids[name]] for name in ("day", "item", "user"))
    pairs = [(item, day), (user, day), (user, item)]
    products = np.stack([(a * b).sum(axis=1) for a, b in pairs], axis=1)
    # Missing numbers are 0, and marked; 40 is 12 deviations from the mean.
    logs = [[0, (-np.log(4) - 1) / 2], [(np.log(41) - 0.5) / 0.25, 0]]
    scaled = [[0, -0.5], [5, 0]]
    inputs = np.concatenate(
        [day, item, user, products, logs, scaled, [[1, 0], [0, 1]]], axis=1
    )
    wanted = model.mlp(jnp.asarray(inputs, jnp.float32))[:, 0]
    np.testing.assert_allclose(outputs.scores, wanted, rtol=1e-5)
