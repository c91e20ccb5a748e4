"""Times the initialisation of tables, and of `jax.random.uniform` beside the largest.

    python benchmarks/initialization.py [--rounds N] [--json FILE]
    python benchmarks/record.py FILE

Each case runs in a process of its own, from the first call to the values in memory, so
tracing and compilation count. Cases take turns; the figures are medians.
"""

import argparse
import dataclasses
import pathlib
import statistics
from typing import Any, Final

import jax
from embedding_step import make_plan
from measuring import measure, run_fresh, write_document

import tpu_embedding as te


@dataclasses.dataclass(frozen=True)
class Case:
    """Equal tables, initialised by `init_tables` or by `jax.random.uniform`."""

    tables: int
    rows: int
    dim: int
    by: str = "init_tables"

    @property
    def table_bytes(self) -> int:
        """Size of the tables."""
        return 4 * self.tables * self.rows * self.dim


CASES: Final = (
    Case(1, 100_000, 16),
    Case(26, 3_846, 16),
    Case(100, 1_000, 16),
    Case(26, 100_000, 64),
    Case(1, 8_000_000, 128),
    Case(1, 8_000_000, 128, by="uniform"),
)
"""The first three have about equal sizes in all; the last two have 4 GB."""


def run_case(case: Case) -> dict[str, Any]:
    """Initialises once."""
    key = jax.random.key(0)
    if case.by == "uniform":
        shape = (case.rows, case.dim)
        # Under jit, as fast as it gets: eager calls compile the same program.
        uniform = jax.jit(lambda key: jax.random.uniform(key, shape))
        _, use = measure(lambda: uniform(key))
    else:
        plan = make_plan(
            None,
            num_tables=case.tables,
            vocabulary_size=case.rows,
            dim=case.dim,
            optimizer=te.optimizers.rowwise_adagrad(0.01),
        )
        _, use = measure(lambda: te.functional.init_tables(plan, key))
    return dataclasses.asdict(use)


def main() -> None:
    """Measures all cases in turns; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Times the initialisation of tables.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--max-gb", type=float, default=5.0, help="leave larger cases out"
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.table_bytes <= 1e9 * arguments.max_gb]
    runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for case, found in runs.items():
            found.append(run_fresh(run_case, case))
            print(f"{case}: {found[-1]['seconds']:.2f} s", flush=True)
    results = [_median(case, found) for case, found in runs.items()]
    print(
        f"{'tables':>6} {'rows':>9} {'dim':>4} {'by':12} {'s':>7} {'CPU s':>7} "
        "peak / tables"
    )
    for row in results:
        print(
            f"{row['tables']:6} {row['rows']:9,} {row['dim']:4} {row['by']:12} "
            f"{row['seconds']:7.2f} {row['cpu_seconds']:7.2f} {row['peak_ratio']:11.2f}"
        )
    write_document(
        arguments.json,
        "initialization",
        shapes={"rounds": arguments.rounds},
        results=results,
    )


def _median(case: Case, runs: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    ratio = medians["peak_bytes"] / case.table_bytes
    return dataclasses.asdict(case) | medians | {"peak_ratio": ratio}


if __name__ == "__main__":
    main()
