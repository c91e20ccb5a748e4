"""One process of a job: trains on unique ids of its own samples, and writes results.

    python -m tests.processes.unique_ids_worker COORDINATOR NUM PROCESS DEVICES FILE

Run by `test_processes.py`. Each process prepares `samples="process"`.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import tpu_embedding as te
from tests.processes.joining import join_job

NUM_ROWS, DIM, LENGTH, BATCH = 101, 8, 6, 32
# Of each half of a batch: the longest history. The last batches have more different
# ids, but only in the samples of one process.
LONGEST = [(2, 2), (2, 2), (2, LENGTH), (LENGTH, 2)]


def train(mesh):
    """Returns losses, tables, and scores of the last batch."""
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=NUM_ROWS, dim=DIM, name=name),
            output_shape=(-1,),
        )
        for name in ("item", "artist")
    }
    plan = te.make_plan(features, mesh, optimizer=te.optimizers.adagrad(0.1))
    model = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, features, index):
        def loss_fn(model):
            rows = model(features)
            content = jnp.tanh(rows["item"] + rows["artist"])
            events = model.expand(content, index)
            scores = (events["history"].sum(1) * events["candidate"]).sum(-1)
            return ((scores - 1) ** 2).mean(), scores

        (loss, scores), gradients = te.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        return loss, scores

    generator = np.random.default_rng(0)
    sizes = te.inputs.BufferSizes()
    losses, widths = [], []
    for longest in LONGEST:
        own = plan.process_samples(BATCH)
        batch = batch_of(generator, longest, own)
        items = te.inputs.unique_ids(
            batch["item"], plan, "item", sizes, length=LENGTH, samples="process"
        )
        artists = items.attribute_ids(batch["artist"])
        batch = {"item": items.ids, "artist": artists}
        batch = te.inputs.prepare_features(batch, plan, samples="process")
        widths.append(items.size)
        inputs = te.inputs.shard_batch((batch, items.index), plan, samples="process")
        loss, scores = step(model, optimizer, *inputs)
        losses.append(float(loss))
    scores = multihost_utils.process_allgather(scores, tiled=True)
    results = {"losses": losses, "scores": scores, "widths": widths}
    return results | model.embedding_tables()


def batch_of(generator, longest, own):
    """Returns the own samples of a global batch; short histories have five items."""
    shape = BATCH // 2, LENGTH + 1
    lengths = np.concatenate([generator.integers(0, 1 + n, shape[0]) for n in longest])
    lengths[[0, -1]] = longest
    items = np.concatenate(
        [generator.integers(0, 5 if n == 2 else NUM_ROWS, shape) for n in longest]
    )

    def ids(of_item):
        lists = [
            of_item[row[:n]].tolist() for row, n in zip(items, lengths, strict=True)
        ]
        return {
            "history": te.RaggedIds.from_lists([lists[i] for i in own]),
            "candidate": of_item[items[own, -1]],
        }

    return {"item": ids(np.arange(NUM_ROWS)), "artist": ids(np.arange(NUM_ROWS) // 3)}


if __name__ == "__main__":
    (path,) = join_job()
    np.savez(path, **train(te.device_mesh()))
