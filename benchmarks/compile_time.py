"""Times tracing and compiling a train step against the number of tables.

    python benchmarks/compile_time.py [--rounds N] [--json FILE]
    python benchmarks/record.py FILE

The tables have 100,000 rows of dim 16 in all, and a batch has 104,000 ids in all, one
per sample and feature. Row-wise Adagrad. Features cost compile time, too: each has
activations and cotangents. So one case has 100 features on one table. Each compilation
is in a process of its own, without a cache.
"""

import argparse
import pathlib
import statistics
import time
from typing import Any, Final

import jax
from embedding_step import abstract_ids, lower_step
from measuring import report_results, run_fresh

import tpu_embedding as te

CASES: Final = ((1, 1), (1, 100), (26, 26), (100, 100))
"""Numbers of tables and of features."""
NUM_ROWS, DIM, NUM_IDS = 100_000, 16, 104_000


def run_case(num_tables: int, num_features: int) -> dict[str, float]:
    """Traces and compiles one step."""
    jax.config.update("jax_enable_compilation_cache", False)
    tables = [
        te.TableConfig(
            vocabulary_size=NUM_ROWS // num_tables,
            dim=DIM,
            combiner="sum",
            name=f"t{i}",
        )
        for i in range(num_tables)
    ]
    features = {
        f"f{i}": te.FeatureConfig(table=tables[i % num_tables])
        for i in range(num_features)
    }
    plan = te.make_plan(features, optimizer=te.optimizers.rowwise_adagrad(0.01))
    ids = abstract_ids(plan, NUM_IDS // num_features)
    start = time.perf_counter()
    lowered = lower_step(plan, ids)
    traced = time.perf_counter()
    lowered.compile()
    done = time.perf_counter()
    return {"trace_seconds": traced - start, "compile_seconds": done - traced}


def main() -> None:
    """Measures in turns."""
    parser = argparse.ArgumentParser(description="Times the compilation of a step.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    runs: dict[tuple[int, int], list[dict[str, float]]] = {c: [] for c in CASES}
    for _ in range(arguments.rounds):
        for case, found in runs.items():
            found.append(run_fresh(run_case, *case))
    results: list[dict[str, Any]] = []
    for (num_tables, num_features), found in runs.items():
        row: dict[str, Any] = {"tables": num_tables, "features": num_features}
        row |= {k: statistics.median(run[k] for run in found) for k in found[0]}
        row["seconds"] = row["trace_seconds"] + row["compile_seconds"]
        row["ratio"] = row["seconds"] / results[0]["seconds"] if results else 1.0
        results.append(row)
    report_results(
        arguments.json,
        "compile_time",
        shapes={"rows": NUM_ROWS, "dim": DIM, "ids": NUM_IDS},
        results=results,
    )


if __name__ == "__main__":
    main()
