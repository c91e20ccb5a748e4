"""Tests the models against their formulas in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.conftest import mesh_of
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.tools.data.synthetic_interactions import InteractionsSource
from tpu_embedding.tools.train.models import (
    TwoTowerConfig,
)
from tpu_embedding.types import PADDING_ROW_ID

TOWERS = TwoTowerConfig(
    dim=4, context_dim=2, hidden_sizes=(5,), output_dim=3, temperature=0.2
)


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
    used_mask = (ids["history"] != PADDING_ROW_ID)[:, :, None]
    assert 0 < used_mask.sum() < used_mask.size
    history = rows["item"][np.where(used_mask[:, :, 0], ids["history"], 0)]
    history = (history * used_mask).sum(1) / np.maximum(used_mask.sum(1), 1)
    one = {name: rows[name][ids[name]] for name in rows}
    users = [one["user"], history, one["country"], one["device"]]
    vectors = []
    for tower, inputs in (
        (model.user_tower, users),
        (model.item_tower, [one["item"], one["category"]]),
    ):
        x = np.asarray(tower(jnp.concatenate(inputs, axis=1)))
        vectors.append(x / np.linalg.norm(x, axis=1, keepdims=True))
    scores = vectors[0] @ vectors[1].T / 0.2 - batch.dense[:, 0]
    exponentials = np.exp(scores.astype(np.float64))
    wanted = np.log(np.diag(exponentials) / exponentials.sum(axis=1))
    # Tolerance: float32 rounding of scores in [-5, 5].
    np.testing.assert_allclose(outputs.scores, wanted, atol=2e-5)
