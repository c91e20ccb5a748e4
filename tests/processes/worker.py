"""One process of a job: trains a small model and writes what came out.

    python -m tests.processes.worker COORDINATOR NUM_PROCESSES PROCESS DEVICES FILE

Run by `test_processes.py`. The mesh has two axes, of which the first one crosses the
processes.
"""

import jax
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te
from tests.processes.joining import join_job

PLACEMENTS = {
    "sharded": te.Sharded(),
    "grouped": te.Sharded(axes=("model",)),
    "replicated": te.Replicated(),
}
SIZES = {"sharded": 101, "grouped": 31, "replicated": 13}
BATCH = 16


def train(mesh):
    """Returns losses, tables, and the copies of rows that this process holds."""
    tables = {
        name: te.TableConfig(
            vocabulary_size=SIZES[name],
            dim=8,
            combiner="mean",
            name=name,
            placement=placement,
        )
        for name, placement in PLACEMENTS.items()
    }
    features = {name: te.FeatureConfig(table=t) for name, t in tables.items()}
    features["many"] = te.FeatureConfig(table=tables["sharded"])
    plan = te.make_plan(features, mesh, optimizer=te.optimizers.adagrad(0.1))
    model = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, features):
        def loss_fn(model):
            rows = model(features)
            joined = rows["sharded"] * rows["many"]
            return ((joined + rows["grouped"] - rows["replicated"] - 1) ** 2).mean()

        loss, gradients = te.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    generator = np.random.default_rng(0)
    losses = []
    for _ in range(3):
        prepared = te.inputs.shard_batch(model.prepare(batch_of(generator)), plan)
        losses.append(float(step(model, optimizer, prepared)))
    results = {"losses": losses} | model.embedding_tables()
    for stack in plan.stacks:
        (table,) = stack.tables
        if stack.num_replicas > 1:
            lines = model.tables.get_value()[stack.name].lines
            for index, shards in shards_by_index(lines).items():
                results[f"copies of {table.name} {index}"] = shards
    return results


def batch_of(generator):
    lengths = generator.integers(0, 4, BATCH)
    many = te.RaggedIds(
        values=generator.integers(0, SIZES["sharded"], lengths.sum()),
        row_splits=np.concatenate([[0], np.cumsum(lengths)]),
    )
    ids = {name: generator.integers(0, size, BATCH) for name, size in SIZES.items()}
    return ids | {"many": many}


def shards_by_index(array):
    """Returns the parts of an array on this process's devices, by their index."""
    found = {}
    for shard in array.addressable_shards:
        found.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return found


if __name__ == "__main__":
    (path,) = join_job()
    mesh = jax.sharding.Mesh(
        np.asarray(jax.devices()).reshape(2, -1), ("data", "model")
    )
    np.savez(path, **train(mesh))
