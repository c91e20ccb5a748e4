"""One process of a job: trains a small model and writes what came out.

    python -m tests.processes.worker COORDINATOR NUM_PROCESSES PROCESS DEVICES FILE

Run by `test_processes.py`. With one process, it needs no coordinator.
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te


def main(coordinator, num_processes, process, num_devices, path):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(num_devices))
    if int(num_processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(num_processes), int(process))
    table = te.TableConfig(vocabulary_size=101, dim=8, combiner="mean", name="items")
    feature = te.FeatureConfig(table=table)
    model = te.TPUEmbedding(
        {"one": feature, "many": feature}, te.optimizers.adagrad(0.1), rngs=nnx.Rngs(0)
    )
    optimizer = te.Optimizer(model, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, features):
        def loss_fn(model):
            rows = model(features)
            return ((rows["one"] * rows["many"] - 1) ** 2).mean()

        loss, gradients = te.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    generator = np.random.default_rng(0)
    losses = []
    for _ in range(3):
        lengths = generator.integers(0, 4, 16)
        many = te.RaggedIds(
            values=generator.integers(0, 101, lengths.sum()),
            row_splits=np.concatenate([[0], np.cumsum(lengths)]),
        )
        features = {"one": generator.integers(0, 101, 16), "many": many}
        prepared = te.shard_batch(model.prepare(features), model.plan)
        losses.append(float(step(model, optimizer, prepared)))
    tables = model.embedding_tables()
    if int(process) == 0:
        np.savez(path, losses=losses, items=tables["items"], devices=jax.device_count())


if __name__ == "__main__":
    main(*sys.argv[1:])
