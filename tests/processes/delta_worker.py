"""One process of a job that exports tables and deltas while it trains.

    python -m tests.processes.delta_worker COORDINATOR NUM_PROCESSES PROCESS DEVICES DIR

Run by `test_deltas.py`. Only the first process is told the directory to write. With one
process, it needs no coordinator.
"""

import pathlib
import sys

import jax
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te
from tpu_embedding.export.tensor_files import TensorFile
from tpu_embedding.tables import row_windows

SIZES = {"sharded": 101, "other": 7, "replicated": 13}


def main(coordinator, num_processes, process, num_devices, directory):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(num_devices))
    if int(num_processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(num_processes), int(process))
    row_windows._MIN_BLOCK_BYTES = 512  # several blocks per process
    directory = pathlib.Path(directory)
    model, optimizer = make()
    train(model, optimizer, 0)
    te.export.save_tables(model, directory / "base", optimizer=optimizer)
    train(model, optimizer, 1)
    te.export.save_delta(model, optimizer, directory / "first")
    refused(model, optimizer, directory / "first", "must be a new directory")
    model.set_embedding_tables({"other": np.ones((7, 8), np.float32)})
    train(model, optimizer, 2)
    fill_the_disk(model, optimizer, directory / "second")
    te.export.save_delta(model, optimizer, directory / "second")
    te.export.save_tables(model, directory / "later")
    if int(num_processes) > 1:
        try:
            te.export.save(model, directory / "program", {"sharded": np.array([1])})
        except te.export.ExportError as error:
            assert "te.save" in str(error)
        else:
            raise AssertionError


def refused(model, optimizer, directory, words):
    """Checks that a delta raises an error on all processes."""
    try:
        te.export.save_delta(model, optimizer, directory)
    except (te.export.ExportError, OSError) as error:
        assert words in str(error), error
    else:
        raise AssertionError


def fill_the_disk(model, optimizer, directory):
    """Checks that all processes end, and the chain stays, if the first cannot write."""
    write = TensorFile.write

    def fail(self, name, start, rows):
        raise OSError("no space left on device")

    TensorFile.write = fail
    refused(model, optimizer, directory, "no space left on device")
    TensorFile.write = write


def make():
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=size,
                dim=8,
                name=name,
                placement=te.Replicated() if name == "replicated" else None,
            )
        )
        for name, size in SIZES.items()
    }
    users = te.TableConfig(
        vocabulary_size=te.Dynamic(capacity=300), dim=8, name="dynamic"
    )
    features["dynamic"] = te.FeatureConfig(table=users)
    rule = te.optimizers.track_touched_rows(te.optimizers.sgd(0.5))
    model = te.TPUEmbedding(features, rule, rngs=nnx.Rngs(0))
    return model, te.Optimizer(model, optax.sgd(0.1))


def train(model, optimizer, seed):
    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, features):
        features = optimizer.insert_ids(model, features)

        def loss_fn(model):
            return sum((rows**2).sum() for rows in model(features).values())

        _, gradients = te.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)

    # Each id once: sums of float32 have one order then.
    ids = np.random.default_rng(seed).permutation(7)[:4].astype(np.int32)
    batch = model.prepare(
        {**dict.fromkeys(SIZES, ids), "dynamic": ids.astype(np.int64) << 40}
    )
    step(model, optimizer, te.inputs.shard_batch(batch, model.plan))


if __name__ == "__main__":
    main(*sys.argv[1:])
