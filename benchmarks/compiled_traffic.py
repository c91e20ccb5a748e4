"""What a compiled step moves, beside the least that any program must move.

    pip install 'tpu-embedding[tpu]'
    python benchmarks/compiled_traffic.py [--topology v5p:2x2x1 ...] [--dim 16 128 ...]
        [--valence 1 20] [--optimizer adagrad rowwise_adagrad] [--json FILE]

The embedding part of a train step, 8 tables and 4,096 samples per device, compiled for
a TPU slice that need not be there. Bytes are those of the model in
`tpu_embedding/aot/traffic.py`, least bytes those of `tpu_embedding/aot/floor.py`, both
of ids that are as different as they can be. Where a batch has more ids than the tables
have rows, some must repeat; what the loops over repeats move for these is added.
Everything is modelled; nothing runs. `--topology v5p:2x2x2 v5p:16x16x16` shows how a
device's traffic grows with the number of devices.
"""

import argparse
import itertools
import json
import pathlib
import time
from typing import Any

import jax
from embedding_step import abstract_ids, compile_step, make_plan

import tpu_embedding as te
from tpu_embedding import aot
from tpu_embedding.aot import cost, hlo
from tpu_embedding.aot.floor import embedding_floor

NUM_TABLES, SAMPLES_PER_DEVICE, ROWS_PER_DEVICE = 8, 4096, 488_281
LINES_PER_REPEAT = 5  # Gathered: 2. Added: itself, its sum before and after.


def measure(topology: str, dim: int, valence: int, optimizer: str) -> dict[str, Any]:
    """Compiles one step; returns its figures per device."""
    mesh = aot.topology_mesh(topology)
    plan = make_plan(
        mesh,
        num_tables=NUM_TABLES,
        vocabulary_size=ROWS_PER_DEVICE * mesh.size // NUM_TABLES,
        dim=dim,
        optimizer=getattr(te.optimizers, optimizer)(0.1),
    )
    ids = abstract_ids(plan, SAMPLES_PER_DEVICE * mesh.size, valence)
    start = time.perf_counter()
    compiled = compile_step(plan, ids)
    seconds = time.perf_counter() - start
    operations = cost.program_cost(hlo.parse_module(compiled.as_text())).operations
    moved, floor = cost.total(operations), embedding_floor(plan, ids)
    by_class: dict[str, float] = {}
    for operation in operations:
        name = operation.operation_class
        by_class[name] = by_class.get(name, 0) + operation.traffic.hbm_bytes
    (stack,) = plan.stacks
    num_ids = NUM_TABLES * SAMPLES_PER_DEVICE * valence
    num_rows = stack.num_rows / mesh.size
    repeats = max(0, num_ids - num_rows)
    line_bytes = 4 * stack.layout.lanes
    hbm_bytes = moved.hbm_bytes + LINES_PER_REPEAT * line_bytes * repeats
    return {
        "devices": mesh.size,
        "exchange": stack.round_size(num_ids).kind,
        "hbm_bytes": hbm_bytes,
        "hbm_ratio": hbm_bytes / floor.hbm_bytes,
        "certain_repeats": repeats,
        "ici_bytes": moved.ici_bytes,
        "ici_ratio": moved.ici_bytes / floor.ici_bytes if floor.ici_bytes else None,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "hbm_bytes_by_class": by_class,
        "compile_seconds": seconds,
    }


def main() -> None:
    """Compiles all combinations; prints a line for each and writes JSON."""
    parser = argparse.ArgumentParser(description="Models the traffic of a step.")
    parser.add_argument("--topology", nargs="+", default=["v5p:2x2x1"])
    parser.add_argument("--dim", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--valence", nargs="+", type=int, default=[1])
    parser.add_argument("--optimizer", nargs="+", default=["adagrad"])
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    head = "topology        devices  dim  hot optimizer        exchange"
    print(f"{head}  HBM MB  ratio  ICI ratio  temp MB  compile s")
    results = []
    for case in itertools.product(
        arguments.topology, arguments.dim, arguments.valence, arguments.optimizer
    ):
        topology, dim, valence, optimizer = case
        result = measure(topology, dim, valence, optimizer)
        print(
            f"{topology:15} {result['devices']:7} {dim:4} {valence:4} {optimizer:16} "
            f"{result['exchange']:8} {result['hbm_bytes'] / 1e6:7.0f} "
            f"{result['hbm_ratio']:6.2f} {result['ici_ratio'] or 0:10.2f} "
            f"{result['temporary_bytes'] / 1e6:8.0f} "
            f"{result['compile_seconds']:10.1f}",
            flush=True,
        )
        names = ("topology", "dim", "valence", "optimizer")
        results.append(dict(zip(names, case, strict=True)) | result)
    if arguments.json is not None:
        versions = {"jax": jax.__version__}
        report = {"device": "compiled only", "versions": versions, "results": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
