"""Models the HBM and link traffic of a compiled step, beside its minimum.

    pip install 'tpu-embedding[tpu]'
    python benchmarks/compiled_traffic.py [--topology v5p:2x2x1 ...] [--dim 16 128 ...]
        [--valence 1 20] [--optimizer adagrad rowwise_adagrad]
        [--dtype float32 bfloat16] [--kernels xla sparse_core] [--json FILE]
    python benchmarks/record.py FILE

The program is the embedding part of a train step: 8 tables, 4,096 samples per device.
It is compiled for a TPU slice that need not be there, and nothing runs. The bytes come
from the model in `traffic.py` of `tpu_embedding/tools/compile_report/`, and the minimum
from `floor.py` there. Both assume that no id repeats. A batch with more ids than the
tables have rows must repeat some; the traffic of these repeats is added.

`--topology v5p:2x2x2 v5p:16x16x16` shows how the traffic of one device grows with the
number of devices.
"""

import argparse
import itertools
import json
import pathlib
import time
from typing import Any

import jax
from embedding_step import abstract_ids, compile_step, make_plan
from list_options import AllValues

import tpu_embedding as te
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report import cost, hlo
from tpu_embedding.tools.compile_report.floor import embedding_floor

jax.config.update("jax_platforms", "cpu")  # TPUs are only compiled for.

NUM_TABLES, SAMPLES_PER_DEVICE, ROWS_PER_DEVICE = 8, 4096, 488_281
LINES_PER_REPEAT = 5  # Gathered: 2. Added: itself, its sum before and after.
CASE_FIELDS = ("topology", "dim", "valence", "optimizer", "dtype", "kernels")


def measure(
    topology: str, dim: int, valence: int, optimizer: str, dtype: str, kernels: str
) -> dict[str, Any]:
    """Compiles one step; returns its figures per device."""
    mesh = compile_report.topology_mesh(topology)
    plan = make_plan(
        mesh,
        num_tables=NUM_TABLES,
        vocabulary_size=ROWS_PER_DEVICE * mesh.size // NUM_TABLES,
        dim=dim,
        dtype=dtype,
        optimizer=getattr(te.optimizers, optimizer)(0.1),
        kernels=kernels,
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
        "least_hbm_bytes": floor.hbm_bytes,
        "hbm_ratio": hbm_bytes / floor.hbm_bytes,
        "certain_repeats": repeats,
        "ici_bytes": moved.ici_bytes,
        "ici_ratio": moved.ici_bytes / floor.ici_bytes if floor.ici_bytes else None,
        "table_and_slot_bytes": (
            plan.table_bytes_per_device + plan.slot_bytes_per_device
        ),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "hbm_bytes_by_class": by_class,
        "compile_seconds": seconds,
    }


def main() -> None:
    """Compiles all combinations; prints a line for each and writes JSON."""
    parser = argparse.ArgumentParser(description="Models the traffic of a step.")
    parser.add_argument(
        "--topology", nargs="+", action=AllValues, default=["v5p:2x2x1"]
    )
    parser.add_argument(
        "--dim", nargs="+", action=AllValues, type=int, default=[16, 128]
    )
    parser.add_argument("--valence", nargs="+", action=AllValues, type=int, default=[1])
    parser.add_argument("--optimizer", nargs="+", action=AllValues, default=["adagrad"])
    parser.add_argument("--dtype", nargs="+", action=AllValues, default=["float32"])
    parser.add_argument(
        "--kernels", nargs="+", action=AllValues, default=["xla", "sparse_core"]
    )
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    head = "topology        dim  hot optimizer        dtype    kernels     devices"
    print(f"{head} exchange  HBM MB  ratio  ICI ratio  temp MB  compile s")
    results = []
    for case in itertools.product(
        arguments.topology,
        arguments.dim,
        arguments.valence,
        arguments.optimizer,
        arguments.dtype,
        arguments.kernels,
    ):
        result = measure(*case)
        topology, dim, valence, *others = case
        print(
            f"{topology:15} {dim:3} {valence:4} {'{:16} {:8} {:11}'.format(*others)} "
            f"{result['devices']:7} {result['exchange']:8} "
            f"{result['hbm_bytes'] / 1e6:7.0f} {result['hbm_ratio']:6.2f} "
            f"{result['ici_ratio'] or 0:10.2f} {result['temporary_bytes'] / 1e6:8.0f} "
            f"{result['compile_seconds']:10.1f}",
            flush=True,
        )
        results.append(dict(zip(CASE_FIELDS, case, strict=True)) | result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_report(results), indent=2) + "\n")


def _report(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "benchmark": "compiled_traffic",
        "device": "compiled only",
        "versions": {"jax": jax.__version__},
        "shapes": {
            "tables": NUM_TABLES,
            "samples_per_device": SAMPLES_PER_DEVICE,
            "rows_per_device": ROWS_PER_DEVICE,
        },
        "results": results,
    }


if __name__ == "__main__":
    main()
