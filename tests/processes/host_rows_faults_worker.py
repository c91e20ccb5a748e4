"""One process of a job in which process 1 fails in a loop over `te.host_rows`.

    python -m tests.processes.host_rows_faults_worker
        COORDINATOR NUM_PROCESSES PROCESS DEVICES FILE FAULT

Run by `test_host_rows.py`.
"""

import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te
from tests.processes.joining import join_job

ROWS, USED_ROWS, CACHE_ROWS = 400, 40, 80
BATCH, STEPS, FAULTY_STEP = 16, 12, 5


def batches(fault):
    """Yields this process's samples of each batch."""
    draw = np.random.default_rng(0)
    for step in range(STEPS):
        if fault and step == FAULTY_STEP:
            if fault == "iterator raises":
                raise OSError("no more data")
            if fault.startswith("iterator ends"):
                return
        ids = draw.integers(0, USED_ROWS, (BATCH, 3), np.int32)
        yield ids[: BATCH // 2] if jax.process_index() == 0 else ids[BATCH // 2 :]


def main(fault):
    directory = None
    if fault.startswith("directory"):
        directory = "/dev/null" if jax.process_index() else "/tmp"
    table = te.TableConfig(
        vocabulary_size=ROWS,
        dim=4,
        name="user",
        placement=te.HostRows(cache_rows=CACHE_ROWS, directory=directory),
    )
    features = {"user": te.FeatureConfig(table=table)}
    model = te.TPUEmbedding(features, "adagrad", rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    is_faulty = jax.process_index() == 1

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, ids):
        loss_fn = lambda model: jnp.mean((model(ids)["user"] - 1) ** 2)  # noqa: E731
        loss, gradients = te.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    def features_of(ids):
        if fault == "features_of raises" and is_faulty:
            raise KeyError("user")
        return te.inputs.shard_batch({"user": ids}, model.plan, samples="process")

    def with_large_batch(found):
        """All ids are rows of one device, which is of process 1."""
        for number, ids in enumerate(found):
            if fault == "cache too small" and number == FAULTY_STEP:
                first = jax.process_index() * ids.size
                ids = (first + np.arange(ids.size, dtype=np.int32)).reshape(ids.shape)
                ids = 4 * ids + 3
            yield ids

    def prepared(batches):
        """All processes agree on the size of each batch."""
        for ids in batches:
            ragged = {"user": te.RaggedIds.from_lists(ids.tolist())}
            model.prepare(ragged, samples="process")
            yield ids

    host = model.tables.get_value()["stack_0"].host
    if fault == "writer fails" and is_faulty:
        host.shards.write = None
    steps = 0
    data = with_large_batch(batches(fault if is_faulty else ""))
    if fault == "iterator ends, ragged":
        data = prepared(data)
    for ids in te.host_rows(data, model, optimizer, features_of=features_of):
        batch = te.inputs.shard_batch({"user": ids}, model.plan, samples="process")
        loss = float(step(model, optimizer, batch))
        steps += 1
        print(f"step {steps} loss {loss:.4f}", flush=True)
        if is_faulty and steps == FAULTY_STEP:
            if fault.startswith("break"):
                break
            if fault == "interrupt":
                signal.raise_signal(signal.SIGINT)
            if fault == "body raises":
                raise ArithmeticError("in the body")
            if fault == "killed":
                signal.raise_signal(signal.SIGKILL)
    print("left the loop", flush=True)
    if fault == "break and stay" and is_faulty:
        threading.Event().wait()


if __name__ == "__main__":
    _, fault = join_job()
    main(fault)
