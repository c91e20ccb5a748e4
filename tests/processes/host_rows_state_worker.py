"""One process of a job that trains, saves, exports and restores rows on the host.

    python -m tests.processes.host_rows_state_worker
        COORDINATOR NUM_PROCESSES PROCESS DEVICES FILE DIRECTORY RULES...

The states go to the file. `DIRECTORY/one` has a checkpoint of one process. Run by
`test_host_rows.py`.
"""

import pathlib

import jax
import numpy as np

import tpu_embedding as te
from tests.host_rows import models
from tests.host_rows.test_exact import RULES, config_of
from tests.host_rows.twins import Run, zipf_ids
from tests.processes.joining import join_job
from tpu_embedding.tables import line_exchange

BATCH = 8
CACHE = te.HostRows(cache_rows=100)  # of each table
SIZES = {"a": 301, "b": 133, "c": 301}


def batches_of(plan, number, seed=0):
    """Yields batches of this process's samples: dense, weighted and ragged ids."""
    draw = np.random.default_rng(seed)
    own = plan.process_samples(BATCH)
    for i in range(number):
        ids = {name: zipf_ids(draw, (BATCH, 3), size) for name, size in SIZES.items()}
        ids["a"][: BATCH // 4] //= 4  # Some devices are asked for more rows.
        ids["a"][: BATCH // 4] *= 4
        weights = draw.random((BATCH, 3), np.float32)
        lengths = draw.integers(0, 4, BATCH)[own.start : own.stop]
        mine = {name: rows[own.start : own.stop] for name, rows in ids.items()}
        batch = {
            "a": te.DenseIds(ids=mine["a"], weights=weights[own.start : own.stop]),
            "b": te.RaggedIds.from_lists(
                [list(x[:n]) for x, n in zip(mine["b"], lengths, strict=True)]
            ),
            "c": mine["c"],
        }
        prepared = te.inputs.prepare_features(batch, plan, samples="process")
        if i % 4 == 3:
            del prepared["c"]
        yield te.inputs.shard_batch(prepared, plan, samples="process")


def run_rule(rule, placement, mesh):
    """Returns rows and slot variables after training, and the most exchanges."""
    plan = te.make_plan(config_of(placement), mesh, optimizer=RULES[rule], capacity=12)
    run = Run(plan=plan)
    for host in run.hosts.values():
        host.exchange_rows = 8
    for number, batch in enumerate(run.batches(batches_of(plan, 10))):
        if number == 4:
            for other in run.batches(batches_of(plan, 3, seed=1)):
                run.evaluate(other)
        run.train(batch)
    assert run.missing == 0
    run.outputs.clear()
    state = run.state()
    return {
        f"{rule} {kind} {jax.tree_util.keystr(path)}": np.asarray(leaf)
        for kind in ("tables", "slots")
        for path, leaf in jax.tree_util.tree_leaves_with_path(state[kind])
    }


def trained(model, optimizer, first, last):
    """Trains on some of the batches, and returns the state."""
    data = models.batches(last)[first:]
    plan = model.embedding.plan
    batches = (te.inputs.shard_batch(batch, plan) for batch in data)
    models.fit(model, optimizer, batches)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            models.state_of(model, optimizer)
        )
    }


def main(directory, *rules):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("devices",))
    models.mesh_of = lambda num_devices: mesh
    values = {}
    for rule in rules:
        values |= run_rule(rule, CACHE, mesh)
    model, optimizer = models.make()
    trained(model, optimizer, 0, 6)
    te.save(directory / "job", (model, optimizer))
    te.export.save_tables(model, directory / "job_tables")
    te.restore(directory / "one", (model, optimizer))
    restored = trained(model, optimizer, 6, 12)
    (host,) = (rows.host for rows in model.embedding.tables.get_value().values())
    values["store_bytes"] = sum(store.num_bytes for store in host.shards.stores)
    return values | {f"restored {name}": value for name, value in restored.items()}


if __name__ == "__main__":
    path, directory, *rules = join_job()
    line_exchange._MIN_BLOCK_BYTES = 512  # several blocks for each table
    np.savez(path, **main(pathlib.Path(directory), *rules))
