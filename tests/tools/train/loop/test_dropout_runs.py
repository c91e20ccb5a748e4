"""Models with dropout: off in evaluations, and the same numbers after a resume."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.conftest import mesh_of
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.tools.train import (
    apply_overrides,
    click_outputs,
    init_train_state,
    load_config,
    make_evaluation_step,
    make_run_plan,
    make_train_step,
    train,
)
from tpu_embedding.tools.train.loop.read_ahead import put_batch
from tpu_embedding.tools.train.models import ClickModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropoutConfig(ClickModelConfig):
    rate: float = 0.5

    def build(self, data, plan, *, rngs):
        return DropoutModel(self.dim * len(data.vocabulary_sizes), self, plan, rngs)


class DropoutModel(nnx.Module):
    def __init__(self, num_inputs, config, plan, rngs):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.dense = nnx.Linear(num_inputs, 1, rngs=rngs)
        self.dropout = nnx.Dropout(config.rate, rngs=rngs)

    def __call__(self, features, dense):
        rows = self.embedding(features)
        inputs = jnp.concatenate([rows[name] for name in sorted(rows)], axis=1)
        return click_outputs(self.dense(self.dropout(inputs))[:, 0])


def config_of(**changes):
    config = apply_overrides(
        load_config("synthetic"),
        ["batch_size=50", "num_steps=6", "data.num_evaluation_samples=60"],
    )
    model = DropoutConfig(dim=4, hidden_sizes=(1,))
    return dataclasses.replace(
        config, model=model, target=None, evaluate_every=2, **changes
    )


def state_and_batch(config):
    data = config.data.open(None, batch_size=config.batch_size, seed=config.seed)
    plan = make_run_plan(config, data, mesh_of(2))
    graph, state = init_train_state(config, data, plan)
    return graph, state, put_batch(data.train_batch(0), plan, "batch")


def test_an_evaluation_has_no_dropout_and_a_step_has_another_mask_each_time():
    config = config_of(
        make_dense_optimizer=lambda run: optax.sgd(0.0), table_learning_rate=0.0
    )
    graph, state, batch = state_and_batch(config)
    evaluate = jax.jit(make_evaluation_step(graph, config.loss))
    step = jax.jit(make_train_step(graph, config.loss))
    metrics = jax.device_get(evaluate(state, batch)["log_loss"].compute())
    model, _ = nnx.merge(graph, state)
    model.eval()
    logits = np.asarray(model(batch.features, None).scores)
    losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
    # Tolerance: float32 rounding of a mean of 50 losses.
    np.testing.assert_allclose(metrics, losses.mean(), rtol=1e-5)
    state, first = step(state, batch)
    state, second = step(state, batch)
    assert len({float(metrics), float(first.loss), float(second.loss)}) == 3
    key, count = (
        jax.tree.leaves(nnx.filter_state(state[0], kind))
        for kind in (nnx.RngKey, nnx.RngCount)
    )
    assert len(key) == 1
    assert count[0] == 2


def test_a_resumed_run_draws_the_masks_of_an_uninterrupted_one(tmp_path):
    config = config_of()
    whole = train(config, tmp_path / "whole", mesh=mesh_of(2))
    directory = tmp_path / "parts"
    assert train(config, directory, mesh=mesh_of(2), stop_at=3) is None
    resumed = train(config, directory, mesh=mesh_of(2), existing_run="resume")
    assert resumed.metrics == whole.metrics
