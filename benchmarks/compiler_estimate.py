"""Compares the compiler's estimate of a step with jax-tpu-embedding's estimate.

    pip install jax-tpu-embedding '.[tpu]'
    python benchmarks/compiler_estimate.py [--topology v5p:2x2x1 ...] [--json FILE]
    python benchmarks/record.py FILE

26 tables of dim 128, one id per sample and table, global batch 16,384, Adagrad. Both
libraries compile for a TPU slice that need not be there. There are two estimates, both
by the compiler:

* `cycles` of a TensorCore, times the iterations of the loops around each operation, and
  the number of `operations`; see `tpu_embedding/tools/compile_report/cycles.py`. Loops
  whose length depends on data count once.
* `optimal_seconds` of XLA's cost analysis. It counts the body of each loop once, and
  charges whole tables for each gather and scatter. So each program is compiled for two
  vocabulary sizes, and the line through both is followed to size 0 (the intercept).

Limits of both:

* jax-tpu-embedding does its work on SparseCore in custom calls, which cost nothing in
  either estimate, and so does `backend="sparse_core"`. So their gathers, scatters, sums
  over duplicates and exchanges are free, and only the TensorCore's work around them is
  charged: here, sorting the ids, and the exchange for batches beyond the limit.
* jax-tpu-embedding receives ids that the host has sorted and deduplicated. That takes
  some 20 ns of a core per id, and three times the bytes to the device. Here raw ids go
  into the step.
* XLA's gather of a row is charged a tile of eight rows: 4 KiB for 512 bytes. So is a
  scatter, once for reading and once for writing, unless XLA fused the gather of its
  updates into it.
* Further rounds of the exchange do not run without skew, but would be charged. They are
  left out. The loops that add repeated ids are charged as if they ran.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from embedding_step import abstract_ids, compile_step, make_plan
from jax.sharding import NamedSharding, PartitionSpec
from list_options import AllValues

import tpu_embedding as te
from tpu_embedding.hardware import hardware_of_device
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.tools import compile_report

jax.config.update("jax_platforms", "cpu")  # TPUs are only compiled for.

TOPOLOGIES = ("v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")
NUM_TABLES, DIM, BATCH_SIZE = 26, 128, 16_384
VOCABULARY_SIZES = (100_000, 400_000)
NAMES = [f"t{i:02d}" for i in range(NUM_TABLES)]


def compile_ours(vocabulary_size: int, mesh: Any, backend: Any = "xla") -> list[Any]:
    """Compiles lookup and update in one step; activations leave, cotangents enter."""
    plan = make_plan(
        mesh,
        num_tables=NUM_TABLES,
        vocabulary_size=vocabulary_size,
        dim=DIM,
        optimizer=te.optimizers.adagrad(0.1),
        backend=backend,
    )

    with_rounds = StackPlan.round_size

    def round_size(stack: StackPlan, max_unique_ids: int) -> Any:
        size = with_rounds(stack, max_unique_ids)
        return dataclasses.replace(size, holds_all=True)

    with mock.patch.object(StackPlan, "round_size", round_size):
        return [compile_step(plan, abstract_ids(plan, BATCH_SIZE))]


def compile_theirs(vocabulary_size: int, mesh: Any) -> list[Any]:
    """Compiles the forward and the backward program on preprocessed ids."""
    from jax_tpu_embedding.sparsecore.lib.nn import (  # pyright: ignore[reportMissingImports]
        embedding,
        embedding_spec,
    )

    hardware = hardware_of_device(mesh.devices.flat[0])
    num_cores = hardware.num_sparse_cores // hardware.devices_per_chip
    optimizer = embedding_spec.AdagradOptimizerSpec(learning_rate=0.1)
    specs = {
        name: embedding_spec.FeatureSpec(
            name=name,
            table_spec=embedding_spec.TableSpec(
                name=name,
                vocabulary_size=vocabulary_size,
                embedding_dim=DIM,
                initializer=jax.nn.initializers.zeros,
                optimizer=optimizer,
                combiner="sum",
                max_ids_per_partition=4096,
                max_unique_ids_per_partition=4096,
            ),
            input_shape=(BATCH_SIZE, 1),
            output_shape=(BATCH_SIZE, DIM),
        )
        for name in NAMES
    }
    counts = dict(global_device_count=mesh.size, num_sc_per_device=num_cores)
    embedding.auto_stack_tables(
        specs,
        **counts,
        stack_to_max_ids_per_partition=lambda *_: 4096,
        stack_to_max_unique_ids_per_partition=lambda *_: 4096,
    )
    embedding.prepare_feature_specs_for_training(specs, **counts)
    generator = np.random.default_rng(0)
    ids = {
        name: generator.integers(0, vocabulary_size, (BATCH_SIZE, 1)).astype(np.int32)
        for name in NAMES
    }
    _, stats = embedding.preprocess_sparse_dense_matmul_input(
        ids, None, specs, mesh.size, **counts
    )
    embedding.update_preprocessing_parameters(specs, stats, num_cores)
    inputs = embedding.eval_preprocess_sparse_dense_matmul_input_shape(
        specs, mesh.size, **counts
    )
    split = NamedSharding(mesh, PartitionSpec("shard"))
    place = lambda leaf, sharding=split: jax.ShapeDtypeStruct(  # noqa: E731
        leaf.shape, leaf.dtype, sharding=sharding
    )
    inputs = jax.tree.map(place, inputs)
    stacks = embedding.get_stacked_table_specs(specs)
    rows = NamedSharding(mesh, PartitionSpec("shard", None))
    table = lambda s: jax.ShapeDtypeStruct(  # noqa: E731
        (s.stack_vocab_size, s.stack_embedding_dim), jnp.float32, sharding=rows
    )
    variables = {
        name: embedding.EmbeddingVariables(table=table(s), slot=(table(s),))
        for name, s in stacks.items()
    }
    gradients = {
        name: jax.ShapeDtypeStruct((BATCH_SIZE, DIM), jnp.float32, sharding=rows)
        for name in NAMES
    }

    def shard(function, num_inputs):
        return jax.jit(
            jax.shard_map(
                function,
                mesh=mesh,
                in_specs=(PartitionSpec("shard"),) * num_inputs,
                out_specs=PartitionSpec("shard"),
                check_vma=False,
            ),
            donate_argnums=(num_inputs - 1,) if num_inputs == 3 else (),
        )

    forward = shard(
        lambda inputs, variables: embedding.tpu_sparse_dense_matmul(
            inputs, variables, specs, **counts
        ),
        2,
    )
    backward = shard(
        lambda gradients, inputs, variables: embedding.tpu_sparse_dense_matmul_grad(
            gradients, inputs, variables, specs, **counts
        ),
        3,
    )
    return [
        forward.lower(inputs, variables).compile(),
        backward.lower(gradients, inputs, variables).compile(),
    ]


def measure(compile_programs: Any, mesh: Any) -> dict[str, float]:
    """Compiles for both vocabulary sizes; returns cycles, and time at size 0."""
    totals, compile_seconds, argument_bytes, counts = [], [], [], []
    for vocabulary_size in VOCABULARY_SIZES:
        start = time.perf_counter()
        programs = compile_programs(vocabulary_size, mesh)
        compile_seconds.append(time.perf_counter() - start)
        totals.append(sum(p.cost_analysis()["optimal_seconds"] for p in programs))
        counts.append([compile_report.count_cycles(p.as_text()) for p in programs])
        # The last program takes table and slots, and the ids.
        argument_bytes.append(programs[-1].memory_analysis().argument_size_in_bytes)
    small, large = VOCABULARY_SIZES
    slope = (totals[1] - totals[0]) / (large - small)
    intercept = totals[0] - slope * small
    return {
        "intercept_ms": 1e3 * intercept,
        "argument_mib": argument_bytes[0] / 2**20,
        "compile_seconds": compile_seconds[0],
        "cycles": sum(x.total for x in counts[0]),
        "operations": sum(x.num_operations for x in counts[0]),
    }


def main() -> None:
    """Compares for each topology; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Compares estimates.")
    parser.add_argument("--topology", nargs="+", action=AllValues, default=TOPOLOGIES)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    libraries = {
        "tpu-embedding": compile_ours,
        "tpu-embedding, SparseCores": functools.partial(
            compile_ours, backend="sparse_core"
        ),
        "tpu-embedding, no exchange": functools.partial(
            compile_ours, backend=te.SparseCore(exchange=False)
        ),
        "jax-tpu-embedding": compile_theirs,
    }
    results = []
    heads = ("ms", "MiB", "compile s", "cycles", "operations")
    print(" " * 40 + "".join(f"{head:>13}" for head in heads))
    for topology in arguments.topology:
        mesh = compile_report.topology_mesh(topology)
        for name, compile_programs in libraries.items():
            label = f"{topology:12}{name:28}"
            try:
                result: dict[str, Any] = measure(compile_programs, mesh)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
                print(f"{label}{result['error'][:60]}", flush=True)
            else:
                cells = [
                    f"{x:13,}" if isinstance(x, int) else f"{x:13.3f}"
                    for x in result.values()
                ]
                print(f"{label}{''.join(cells)}", flush=True)
            case = {"topology": topology, "library": name}
            results.append(case | result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_report(results), indent=2) + "\n")


def _report(results: list[dict[str, Any]]) -> dict[str, Any]:
    shapes = {"tables": NUM_TABLES, "dim": DIM, "batch": BATCH_SIZE, "valence": 1}
    return {
        "benchmark": "compiler_estimate",
        "device": "compiled only",
        "versions": {"jax": jax.__version__},
        "shapes": shapes,
        "results": [result for result in results if "error" not in result],
    }


if __name__ == "__main__":
    main()
