"""Tests the models against their formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.conftest import mesh_of
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.tools.data.criteo import CriteoSource
from tpu_embedding.tools.data.synthetic_interactions import InteractionsSource
from tpu_embedding.tools.train.models import (
    DLRMDCNv2Config,
    TwoTowerConfig,
)
from tpu_embedding.types import PADDING_ROW_ID

DCN = DLRMDCNv2Config(
    dim=4, bottom_sizes=(5,), top_sizes=(6, 7), num_cross_layers=2, cross_rank=3
)
TOWERS = TwoTowerConfig(
    dim=4, context_dim=2, hidden_sizes=(5,), output_dim=3, temperature=0.2
)


@pytest.mark.full
def test_dcn_model():
    source = CriteoSource(
        vocabulary_size=9,
        vocabulary_sizes=(9, 5),
        valences=(2, 1),
        num_evaluation_samples=1,
    )
    data = source.open(None, batch_size=3, seed=0)
    plan = make_plan(DCN.feature_config(data), mesh_of(1))
    model = DCN.build(data, plan, rngs=nnx.Rngs(0))
    batch = data.train_batch(0)
    outputs = model(model.embedding.prepare(batch.features), jnp.asarray(batch.dense))
    rows = model.embedding.embedding_tables()
    many, one = (rows[name][ids] for name, ids in batch.features.items())
    vectors = [model.bottom(batch.dense), many.sum(axis=1), one]
    first = crossed = jnp.concatenate(vectors, axis=1)
    assert first.shape == (3, 3 * 4)
    for v, w in zip(model.cross.down.kernel, model.cross.up.kernel, strict=True):
        crossed = first * (crossed @ v @ w) + crossed  # the biases are 0
    scores = model.top(crossed)[:, 0]
    # Tolerance: the layer sums the rows of a sample in another order.
    np.testing.assert_allclose(outputs.scores, scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs.predictions, jax.nn.sigmoid(scores), rtol=1e-5)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.full
def test_two_tower_model():
    source = InteractionsSource(
        num_users=9,
        num_items=8,
        history_length=2,
        num_groups=2,
        num_evaluation_samples=1,
    )
    data = source.open(None, batch_size=6, seed=0)
    plan = make_plan(TOWERS.feature_config(data), mesh_of(1))
    model = TOWERS.build(data, plan, rngs=nnx.Rngs(0))
    batch = data.train_batch(0)
    outputs = model(model.embedding.prepare(batch.features), jnp.asarray(batch.dense))
    ids, rows = batch.features, model.embedding.embedding_tables()
    assert set(rows) == {"user", "item", "country", "device", "category"}
    used_mask = (ids["history"] != PADDING_ROW_ID)[:, :, None]
    assert 0 < used_mask.sum() < used_mask.size
    history = rows["item"][np.where(used_mask[:, :, 0], ids["history"], 0)]
    history = (history * used_mask).sum(1) / np.maximum(used_mask.sum(1), 1)
    one = {name: rows[name][ids[name]] for name in rows}
    users = unit(
        model.user_tower(
            jnp.concatenate([one["user"], history, one["country"], one["device"]], 1)
        )
    )
    items = unit(
        model.item_tower(jnp.concatenate([one["item"], one["category"]], axis=1))
    )
    scores = np.asarray(users) @ np.asarray(items).T / 0.2 - batch.dense[:, 0]
    # Tolerance: float32 rounding of scores in [-5, 5].
    np.testing.assert_allclose(outputs.scores, log_softmax(scores), atol=2e-5)


def log_softmax(scores):
    """Returns the log-softmax of each sample's own item, in NumPy and float64."""
    exponentials = np.exp(scores.astype(np.float64))
    return np.log(np.diag(exponentials) / exponentials.sum(axis=1))
