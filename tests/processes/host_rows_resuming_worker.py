"""One process of a job that saves often, and resumes from the latest checkpoint.

    python -m tests.processes.host_rows_resuming_worker
        COORDINATOR NUM_PROCESSES PROCESS DEVICES FILE DIRECTORY

Run by `test_host_rows.py`, which kills it.
"""

import jax
import numpy as np
import orbax.checkpoint as ocp

import tpu_embedding as te
from tests.host_rows import models
from tests.processes.joining import join_job

STEPS = 60


def main(directory):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("devices",))
    models.mesh_of = lambda num_devices: mesh
    model, optimizer = models.make()
    with ocp.CheckpointManager(directory) as manager:
        state = {"model": model, "optimizer": optimizer}
        if (first := manager.latest_step() or 0) > 0:
            manager.restore(first, args=te.checkpoint.RestoreState(state))
        print("resumed", first, flush=True)
        data = models.batches(STEPS)[first:]
        plan = model.embedding.plan
        batches = (te.inputs.shard_batch(batch, plan) for batch in data)
        for step, batch in enumerate(models.feed(batches, model, optimizer), first + 1):
            models.train(model, optimizer, batch)
            if step % 2 == 0:
                manager.save(step, args=te.checkpoint.SaveState(state))
            print("step", step, flush=True)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            models.state_of(model, optimizer)
        )
    }


if __name__ == "__main__":
    path, directory = join_job()
    np.savez(path, **main(directory))
