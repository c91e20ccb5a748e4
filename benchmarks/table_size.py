"""Times a train step on tables of several sizes: the size should not matter.

    python benchmarks/table_size.py [--devices N] [--json FILE]
    python benchmarks/record.py FILE

One table of dim 16 with 10^5 to 2 x 10^7 rows, row-wise Adagrad, table and slots
donated. The sizes take turns within one run, so that other load on the machine slows
all of them alike; compare the ratios. The difference that remains comes from the
caches: rows of a small table stay in them.
"""

import argparse
import functools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from list_options import AllValues
from measuring import report_results

import tpu_embedding as te

NUM_ROWS = (10**5, 10**6, 10**7, 2 * 10**7)
DIM = 16
BATCH_SIZE = 8192
VALENCE = 4


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=(0, 1))
def step(tables, slots, features, plan):
    """Looks up, takes the derivative of a small loss, and updates."""
    result = te.functional.lookup(tables, features, plan)
    cotangents = jax.tree.map(lambda a: jnp.tanh(a) / a.size, result.activations)
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    return te.functional.apply_gradients(tables, slots, gradients, plan)


def make_run(num_rows: int):
    """Returns a function that runs and times one step on a table of this size."""
    table = te.TableConfig(
        vocabulary_size=num_rows, dim=DIM, combiner="sum", name="table"
    )
    plan = te.make_plan(
        te.FeatureConfig(table=table), optimizer=te.optimizers.rowwise_adagrad(0.01)
    )
    tables = te.functional.init_tables(plan, jax.random.key(0))
    state = [tables, te.functional.init_slots(tables, plan)]
    generator = np.random.default_rng(0)
    # The same number of ids for every size: the program's work is compared.
    batches = [
        te.inputs.shard_batch(
            generator.integers(0, num_rows, (BATCH_SIZE, VALENCE)), plan
        )
        for _ in range(8)
    ]

    def run(i: int) -> float:
        start = time.perf_counter()
        state[:] = step(*state, batches[i % len(batches)], plan)
        jax.block_until_ready(state)
        return time.perf_counter() - start

    return run


def main() -> None:
    """Measures all sizes in turns."""
    parser = argparse.ArgumentParser(
        description="Times train steps on tables of several sizes."
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    parser.add_argument("--devices", type=int, help="emulated CPU devices")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--rows", nargs="+", action=AllValues, type=int, default=NUM_ROWS
    )
    arguments = parser.parse_args()
    if arguments.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices)

    runs = {num_rows: make_run(num_rows) for num_rows in arguments.rows}
    for run in runs.values():
        for i in range(4):
            run(i)
    seconds = {num_rows: [] for num_rows in arguments.rows}
    for i in range(arguments.steps):
        for num_rows, run in runs.items():
            seconds[num_rows].append(run(i))

    medians = {n: 1e3 * statistics.median(s) for n, s in seconds.items()}
    report_results(
        arguments.json,
        "table_size",
        shapes={"dim": DIM, "batch": BATCH_SIZE, "valence": VALENCE},
        results=[
            {
                "devices": jax.device_count(),
                "rows": n,
                "median_ms": medians[n],
                "quartiles_ms": [1e3 * q for q in statistics.quantiles(s, n=4)],
                "ratio": medians[n] / medians[arguments.rows[0]],
            }
            for n, s in seconds.items()
        ],
    )


if __name__ == "__main__":
    main()
