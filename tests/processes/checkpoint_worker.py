"""One process of a job that saves and exports, restores, or imports a model.

    python -m tests.processes.checkpoint_worker
        COORDINATOR NUM_PROCESSES PROCESS DEVICES FILE save|restore|import PATH

The values of the model go to the file, and its dynamic table to a checkpoint, as its
rows depend on the devices. Imports have no such table. Run by `test_checkpoints.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import tpu_embedding as te
from tests.processes.joining import join_job
from tests.rejections import rejects
from tpu_embedding.tables import line_exchange

SIZES = {"sharded": 101, "replicated": 13}
STREAM = "stream"


def run(work, directory, mesh=None):
    """Does the work, and returns the values of the model."""
    num_processes = jax.process_count()
    dynamic = {} if work == "import" else {STREAM: te.Dynamic(capacity=1000)}
    model, optimizer = make(SIZES | dynamic, int(work != "save"), mesh)
    # Each process has a copy of these.
    own = {"key": jax.random.key(len(work)), "weights": jnp.full(3, len(work))}
    state = {"model": model, "optimizer": optimizer, "own": own}
    if work == "import":
        te.checkpoint.import_tables(directory, model, optimizer)
    elif work == "save":
        export(model, optimizer, f"{directory}-tables")
        train(model, optimizer)
        with ocp.CheckpointManager(directory) as manager:
            # Twice: the second save waits for the first one.
            for step in (1, 2):
                manager.save(step, args=te.checkpoint.SaveState(state))
    else:
        with ocp.CheckpointManager(directory) as manager:
            args = te.checkpoint.RestoreState(state)
            with rejects(te.checkpoint.CheckpointError) as raised:
                manager.restore(1, args=args)  # It is damaged.
            print(raised.value)
            own = manager.restore(2, args=args)["own"]
        te.save(f"{directory}-{num_processes}", (model, optimizer))
    values = model.embedding_tables()
    for name, slots in optimizer.slot_values("all").items():
        values |= {f"{name}/{slot}": value for slot, value in slots.items()}
    values = {k: v for k, v in values.items() if not k.startswith(STREAM)}
    return values | {"key": jax.random.key_data(own["key"]), "weights": own["weights"]}


def export(model, optimizer, directory):
    batch = model.prepare({STREAM: np.arange(4, dtype=np.int64) << 40})
    optimizer.insert_ids(model, te.inputs.shard_batch(batch, model.plan))
    te.export.save_tables(model, directory)
    if jax.process_count() > 1:
        with rejects(te.export.ExportError, fix="te.save"):
            te.export.save(model, f"{directory}/program", {"sharded": np.array([1])})


def make(sizes, seed, mesh=None):
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=size,
                dim=8,
                name=name,
                placement=te.Replicated() if name == "replicated" else None,
            )
        )
        for name, size in sizes.items()
    }
    rule = te.optimizers.adam(0.1, bias_correction=True)
    model = te.TPUEmbedding(features, rule, mesh=mesh, rngs=nnx.Rngs(seed))
    return model, te.Optimizer(model, optax.sgd(0.1))


def train(model, optimizer):
    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, features):
        features = optimizer.insert_ids(model, features)

        def loss_fn(model):
            rows = model(features)
            return ((sum(rows.values()) - 1) ** 2).mean()

        _, gradients = te.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)

    ids = np.random.default_rng(0).integers(0, 13, (12,))
    batch = {name: ids for name in SIZES} | {STREAM: ids * 10**12}
    batch = model.prepare(batch)
    step(model, optimizer, te.inputs.shard_batch(batch, model.plan))


if __name__ == "__main__":
    path, *arguments = join_job()
    line_exchange._MIN_BLOCK_BYTES = 512  # several chunks per process
    np.savez(path, **run(*arguments))
