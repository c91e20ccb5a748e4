"""Estimates the time of sorting raw ids into the buffers of SparseCores, by compiling.

    pip install '.[tpu]'
    python benchmarks/partition_estimate.py [--topology v5p:2x2x1 ...] [--json FILE]
    python benchmarks/record.py FILE

The part of a step of `backend="sparse_core"` before the lookup, for a device's share of
a batch: one-hot ids of 26 features, or one feature of 20 ids per sample, with and
without weights. libtpu compiles it for a slice that need not be there. Both estimates
are the compiler's: cycles of a TensorCore, with the iterations of loops, and the
`optimal_seconds` of XLA's cost analysis, which counts the body of each loop once. Sorts
on SparseCores cost almost nothing in either. They are models; nothing ran.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from embedding_step import make_plan
from jax.sharding import NamedSharding, PartitionSpec
from list_options import AllValues

import tpu_embedding as te
from tpu_embedding.lookup._forward import PoolingSpec
from tpu_embedding.tools import compile_report

jax.config.update("jax_platforms", "cpu")  # TPUs are only compiled for.

TOPOLOGIES = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
NUM_SAMPLES = 4096
CASES: dict[str, dict[str, Any]] = {
    "one-hot": dict(num_features=26, valence=1, weighted=False),
    "20-hot": dict(num_features=1, valence=20, weighted=False),
    "20-hot with weights": dict(num_features=1, valence=20, weighted=True),
}


def compile_partition(
    topology: str, num_features: int, valence: int, weighted: bool
) -> Any:
    """Compiles the sort of the ids of all features, `NUM_SAMPLES` per device each."""
    mesh = compile_report.topology_mesh(topology)
    plan = make_plan(
        mesh,
        num_tables=num_features,
        vocabulary_size=100_000,
        dim=128,
        optimizer=te.optimizers.adagrad(0.1),
        backend="sparse_core",
    )
    (stack,) = plan.stacks
    num_ids = NUM_SAMPLES * valence

    def partition(keys: jax.Array, weights: jax.Array) -> Any:
        poolings = [
            PoolingSpec(
                gains=weights[i * num_ids : (i + 1) * num_ids] if weighted else None,
                scales=None,
                sample_ids=None,
                num_samples=NUM_SAMPLES,
                valence=valence,
            )
            for i in range(num_features)
        ]
        return stack.backend.prepare_ids(keys, poolings, stack)

    split = PartitionSpec(mesh.axis_names)
    program = jax.shard_map(
        partition, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    shape = (mesh.size * num_features * num_ids,)
    sharding = NamedSharding(mesh, split)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for dtype in (jnp.int32, jnp.float32)
    ]
    return jax.jit(program).lower(*arguments).compile()


def main() -> None:
    """Compiles each case for each topology; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Estimates the sort of ids.")
    parser.add_argument("--topology", nargs="+", action=AllValues, default=TOPOLOGIES)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    results = []
    for topology in arguments.topology:
        for name, case in CASES.items():
            compiled = compile_partition(topology, **case)
            milliseconds = 1e3 * compiled.cost_analysis()["optimal_seconds"]
            cycles = compile_report.count_cycles(compiled.as_text())
            print(
                f"{topology:12} {name:20} {cycles.total:10,} cycles in "
                f"{cycles.num_operations:5,} operations  {milliseconds:6.3f} ms",
                flush=True,
            )
            result = {"topology": topology, "case": name, "cycles": cycles.total}
            result["operations"] = cycles.num_operations
            results.append(result | {"optimal_ms": milliseconds})
    if arguments.json is not None:
        report = {
            "benchmark": "partition_estimate",
            "device": "compiled only",
            "versions": {"jax": jax.__version__},
            "shapes": {"samples_per_device": NUM_SAMPLES, "vocabulary_size": 100_000},
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
