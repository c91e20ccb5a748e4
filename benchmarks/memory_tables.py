"""Times or compiles the transformer of `docs/examples/memory_tables.py`, by table size.

    python benchmarks/memory_tables.py [--rows N ...] [--json FILE]
    python benchmarks/record.py FILE
    python benchmarks/memory_tables.py --topology v5p:4x4x4 --rows 384000000

The first command times train steps with two tables of 10^5 to 2 x 10^7 rows each, in
turns. The last one compiles the step with rows of dim 128 for a TPU slice that need not
be there, and prints the compile report. Nothing is allocated.
"""

import argparse
import importlib.util
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from list_options import AllValues
from measuring import report_results

import tpu_embedding as te
from tpu_embedding.tools import compile_report

NUM_ROWS = (10**5, 10**6, 10**7, 2 * 10**7)
BATCH_SIZE, NUM_TOKENS = 64, 4096
"""So many tokens have more different n-grams than the tables have rows."""

LAYERS, LENGTH, BATCH_PER_DEVICE = 24, 2048, 4
SIZES = {"width": 1024, "dim": 128, "num_tokens": 32_768}
"""Sizes of the compiled model."""


def load_program() -> Any:
    """Returns the module of the program."""
    path = pathlib.Path(__file__).parents[1] / "docs/examples/memory_tables.py"
    spec = importlib.util.spec_from_file_location("memory_tables_program", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


program = load_program()


def make_run(num_rows: int) -> Callable[[], float]:
    """Returns a function that runs and times one step with tables of this size."""
    model = program.LanguageModel(num_rows, nnx.Rngs(0), num_tokens=NUM_TOKENS)
    optimizer = te.Optimizer(model, optax.adam(1e-2))
    random = np.random.default_rng(0)
    size = (BATCH_SIZE, program.LENGTH + 1)

    def run() -> float:
        tokens = random.integers(0, NUM_TOKENS, size, dtype=np.int32)
        start = time.perf_counter()
        jax.block_until_ready(program.train_step(model, optimizer, tokens))
        return time.perf_counter() - start

    return run


def compile_for(topology: str, num_rows: int) -> str:
    """Returns the report of a step, compiled for a slice."""
    mesh = compile_report.topology_mesh(topology)
    program.NUM_LAYERS, program.LENGTH = LAYERS, LENGTH

    def build():
        model = program.LanguageModel(num_rows, nnx.Rngs(0), mesh=mesh, **SIZES)
        return model, te.Optimizer(model, optax.adam(1e-2))

    pair = nnx.eval_shape(build)
    plan = pair[0].tables.plan
    graph, state = nnx.split(pair)
    state = compile_report.abstract_arrays(state, plan)

    def step(state, tokens):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = te.value_and_grad(program.loss_fn)(model, tokens)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(shardings, plan.replicated),
        compiler_options=plan.compiler_options,
    )
    shape = (BATCH_PER_DEVICE * mesh.size, LENGTH + 1)
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=plan.batch_sharding)
    name = f"2 x {num_rows:,} rows"
    report = compile_report.compile_report(
        step, (state, tokens), plan, name=name, topology=topology
    )
    return compile_report.format_report(report)


def main() -> None:
    """Measures all sizes in turns, or compiles them."""
    parser = argparse.ArgumentParser(description="Times or compiles memory tables.")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    parser.add_argument("--topology", help="compile for this TPU slice instead")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--rows", nargs="+", action=AllValues, type=int, default=NUM_ROWS
    )
    arguments = parser.parse_args()
    if arguments.topology is not None:
        jax.config.update("jax_platforms", "cpu")  # TPUs are only compiled for.
        for num_rows in arguments.rows:
            print(compile_for(arguments.topology, num_rows))
        return
    runs = {num_rows: make_run(num_rows) for num_rows in arguments.rows}
    seconds: dict[int, list[float]] = {num_rows: [] for num_rows in arguments.rows}
    for turn in range(3 + arguments.steps):
        for num_rows, run in runs.items():
            taken = run()
            if turn >= 3:  # The first steps compile.
                seconds[num_rows].append(taken)
    medians = {n: 1e3 * statistics.median(s) for n, s in seconds.items()}
    report_results(
        arguments.json,
        "memory_tables",
        shapes={"dim": 16, "batch": BATCH_SIZE, "length": program.LENGTH},
        results=[
            {"rows": n, "median_ms": ms, "ratio": ms / medians[arguments.rows[0]]}
            for n, ms in medians.items()
        ],
    )


if __name__ == "__main__":
    main()
