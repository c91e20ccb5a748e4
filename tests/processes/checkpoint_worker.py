"""One process of a job that saves, restores, imports or exports a model.

    python -m tests.processes.checkpoint_worker
        COORDINATOR NUM_PROCESSES PROCESS DEVICES save|restore|import|export PATH FILE

The values of the model go to the file, and its dynamic table to a checkpoint, as its
rows depend on the devices. Imports have no such table. Run by
`test_checkpoints.py`. With one process, it needs no coordinator.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import tpu_embedding as te
from tests.processes.joining import start_devices
from tests.rejections import rejects
from tpu_embedding.tables import line_exchange

SIZES = {"sharded": 101, "replicated": 13}
STREAM = "stream"


def main(coordinator, num_processes, process, num_devices, work, directory, path):
    start_devices(coordinator, num_processes, process, num_devices)
    line_exchange._MIN_BLOCK_BYTES = 512  # several chunks per process
    dynamic = {} if work == "import" else {STREAM: te.Dynamic(capacity=1000)}
    model, optimizer = make(SIZES | dynamic, seed=int(work in ("restore", "import")))
    # Each process has a copy of these.
    own = {"key": jax.random.key(len(work)), "weights": jnp.full(3, len(work))}
    state = {"model": model, "optimizer": optimizer, "own": own}
    if work == "import":
        te.checkpoint.import_tables(directory, model, optimizer)
    elif work == "export":
        export(model, optimizer, directory, num_processes)
    else:
        with ocp.CheckpointManager(directory) as manager:
            if work == "save":
                train(model, optimizer)
                # Twice: the second save waits for the first one.
                for step in (1, 2):
                    manager.save(step, args=te.checkpoint.SaveState(state))
            else:
                args = te.checkpoint.RestoreState(state)
                own = manager.restore(manager.latest_step(), args=args)["own"]
                te.save(f"{directory}-{num_processes}", (model, optimizer))
    values = model.embedding_tables()
    for name, slots in optimizer.slot_values("all").items():
        values |= {f"{name}/{slot}": value for slot, value in slots.items()}
    values = {k: v for k, v in values.items() if not k.startswith(STREAM)}
    values |= {"key": jax.random.key_data(own["key"]), "weights": own["weights"]}
    np.savez(path, **values)


def export(model, optimizer, directory, num_processes):
    batch = model.prepare({STREAM: np.arange(4, dtype=np.int64) << 40})
    optimizer.insert_ids(model, te.inputs.shard_batch(batch, model.plan))
    te.export.save_tables(model, directory)
    if int(num_processes) > 1:
        with rejects(te.export.ExportError, fix="te.save"):
            te.export.save(model, f"{directory}/program", {"sharded": np.array([1])})


def make(sizes, seed):
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
    model = te.TPUEmbedding(
        features, te.optimizers.adam(0.1, bias_correction=True), rngs=nnx.Rngs(seed)
    )
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
    main(*sys.argv[1:])
