"""One process of a job: trains on dynamic tables with its own samples; writes results.

    python -m tests.processes.dynamic_worker COORDINATOR NUM PROCESS DEVICES FILE

Run by `test_processes.py`. Each process prepares `samples="process"`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import tpu_embedding as te
from tests.checkpoint.states import features_of
from tests.processes.joining import join_job

CAPACITY, DIM, BATCH, STEPS = 128, 8, 32, 12


def train(mesh):
    """Returns losses, counts, ids with their rows, and what an evaluation finds."""
    vocabularies = {
        "user": te.Dynamic(capacity=CAPACITY),
        "tag": te.Dynamic(capacity=CAPACITY, admit=te.dynamic.AdmitAfter(2)),
        "day": 7,
    }
    features = features_of(vocabularies, DIM, te.optimizers.adagrad(0.1))
    plan = te.make_plan(features, mesh)
    model = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, ids):
        rows = optimizer.insert_ids(model, ids)

        def loss_fn(model):
            return sum((jnp.sin(x) ** 2).mean() for x in model(rows).values())

        loss, gradients = te.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    sizes = te.inputs.BufferSizes()
    losses, counts, evictions, last = [], [], 0, None
    for number in range(STEPS):
        ids = batch_of(number, plan.process_samples(BATCH))
        last = te.inputs.prepare_features(ids, plan, sizes=sizes, samples="process")
        last = te.inputs.shard_batch(last, plan, samples="process")
        losses.append(float(step(model, optimizer, last)))
        stats = model.dynamic_stats.get_value()
        counts.append([[int(x) for x in jax.tree.leaves(stats[n])] for n in stats])
        evictions += int(stats["user"].evictions)
    found = jax.jit(lambda model, ids: nnx.merge(*model)(ids))(nnx.split(model), last)
    results = {"losses": losses, "counts": counts, "evictions": evictions}
    for name, activations in found.items():
        results[f"found/{name}"] = multihost_utils.process_allgather(
            activations, tiled=True
        )
    values = model.embedding_tables()
    (slots,) = optimizer.slots.get_value().values()
    slots = te.functional.slot_values(slots, plan)
    all_rows = te.functional.dynamic_rows(model.tables.get_value(), plan)
    for name, rows in all_rows.items():
        for field in ("ids", "natural_rows", "last_used", "counts"):
            results[f"{name}/{field}"] = getattr(rows, field)
        results[f"{name}/values"] = values[name][rows.rows]
        results[f"{name}/slots"] = slots[name]["accumulators"][rows.rows]
    return results


def batch_of(number, own):
    """Returns the own samples of a global batch, whose ids come and go."""
    generator = np.random.default_rng(number)
    users = generator.integers(0, 40, BATCH) + 10 * number
    lengths = generator.integers(0, 4, BATCH)
    tags = generator.zipf(1.4, (BATCH, 4)) % 2**50 - 2**49 - 20 * number
    return {
        "user": users[own],
        "tag": te.RaggedIds.from_lists([tags[i, : lengths[i]].tolist() for i in own]),
        "day": users[own] % 7,
    }


if __name__ == "__main__":
    (path,) = join_job()
    np.savez(path, **train(te.device_mesh()))
