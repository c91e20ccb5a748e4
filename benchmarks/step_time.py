"""Times the step of `compiler_estimate.py` on the devices that are there.

    python benchmarks/step_time.py [--backend sparse_core] [--json FILE]
    python benchmarks/record.py FILE

26 tables of 100,000 rows of dim 128, one id per sample and table, global batch 16,384,
Adagrad, tables and slot variables donated. The ids are Zipf-distributed, with exponent
1.05. Each backend has a process of its own: run the script once for each.

Steps are dispatched one after the other, and the host waits at the end of a round. So
the host's own time counts only where it is longer than the step.
"""

import argparse
import contextlib
import pathlib
import statistics
import time

import jax
import numpy as np
from embedding_step import jit_step, make_plan
from jax.sharding import Mesh
from measuring import report_results

import tpu_embedding as te
from tpu_embedding.tools.data.teacher import ZipfIds

SHAPES = {"tables": 26, "rows": 100_000, "dim": 128, "batch": 16_384}
SMALL_SHAPES = {"tables": 3, "rows": 1_000, "dim": 16, "batch": 512}


def main() -> None:
    """Measures one backend."""
    parser = argparse.ArgumentParser(description="Times the benchmark step.")
    parser.add_argument("--backend", choices=("xla", "sparse_core"), default="xla")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    parser.add_argument("--profile", type=pathlib.Path, help="directory for xprof")
    parser.add_argument("--devices", type=int, help="emulated CPU devices")
    parser.add_argument("--small", action="store_true", help="to try the script")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    arguments = parser.parse_args()
    if arguments.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    shapes = SMALL_SHAPES if arguments.small else SHAPES

    plan = make_plan(
        Mesh(np.array(jax.devices()), ("shard",)),
        num_tables=shapes["tables"],
        vocabulary_size=shapes["rows"],
        dim=shapes["dim"],
        optimizer=te.optimizers.adagrad(0.1),
        backend=arguments.backend,
    )
    random, batch = np.random.default_rng(0), shapes["batch"]
    law = ZipfIds(vocabulary_size=shapes["rows"], exponent=1.05)
    names = [feature.name for feature in plan.features]
    ids = {name: law.draw(random, (batch,)) for name in names}
    size = batch, shapes["dim"]
    cotangents = {name: random.standard_normal(size, np.float32) for name in names}
    ids, cotangents = te.inputs.shard_batch((ids, cotangents), plan)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)

    @jax.jit
    def rounds_of(tables, ids):
        return te.functional.lookup(tables, ids, plan).stats.rounds

    rounds = {name: int(n) for name, n in rounds_of(tables, ids).items()}
    begin = time.perf_counter()
    step = jit_step(plan).lower(tables, slots, ids, cotangents, plan).compile()
    compile_seconds = time.perf_counter() - begin
    tables, slots, _ = jax.block_until_ready(step(tables, slots, ids, cotangents))
    milliseconds = []
    profile = contextlib.nullcontext()
    if arguments.profile is not None:
        profile = jax.profiler.trace(str(arguments.profile))
    with profile:
        for _ in range(arguments.rounds):
            begin = time.perf_counter()
            for _ in range(arguments.steps):
                tables, slots, _ = step(tables, slots, ids, cotangents)
            jax.block_until_ready((tables, slots))
            seconds = time.perf_counter() - begin
            milliseconds.append(1e3 * seconds / arguments.steps)
    report_results(
        arguments.json,
        "step_time",
        shapes=shapes,
        results=[
            {
                "backend": arguments.backend,
                "devices": jax.device_count(),
                "median_ms": statistics.median(milliseconds),
                "fastest_ms": min(milliseconds),
                "slowest_ms": max(milliseconds),
                "compile_seconds": compile_seconds,
                # 0: SparseCores looked the rows up. 1 or more: the exchange did.
                "rounds": max(rounds.values()),
                "backends": sorted({s.backend.updates for s in plan.stacks}),
            }
        ],
    )


if __name__ == "__main__":
    main()
