"""The compiler's estimate of a step, beside that of jax-tpu-embedding for the same.

    pip install jax-tpu-embedding 'tpu-embedding[tpu]'
    python benchmarks/compiler_estimate.py [--topology v5p:2x2x1 ...] [--json FILE]

26 tables of dim 128, one id per sample and table, global batch 16,384, Adagrad. Both
are compiled for a TPU slice that need not be there, and the compiler's own
`optimal_seconds` is read. That figure charges whole tables for each gather and scatter,
so each program is compiled for two vocabulary sizes, and the line through both is
followed to size 0 ("intercept").

What the estimate does not see, and which way that leans:

* jax-tpu-embedding's work on SparseCore is in custom calls, which are charged nothing:
  its gathers, scatters, sums over duplicates and exchanges are free. Charged is only
  what the TensorCore does around them.
* Our kernels are charged for their operands, twice, and their results, five times, not
  for the rows that they move. (v5p, `read_rows`: 10^5 more rows of a table that it
  reads from, or 32,768 more of a result.)
* Its ids come sorted and deduplicated from the host, some 20 ns of a core per id and
  three times the bytes to the device; here raw ids go into the step.
* A gather of rows by XLA is charged a tile of eight rows for each, 4 KiB for 512 bytes;
  so is a scatter, for reading and for writing, unless XLA has fused the gather of its
  updates into it. "no tiles" is the intercept without these other seven rows: their
  bytes by the rate that the estimate itself uses.
* Further rounds of the exchange, which do not run without skew, would be charged as if
  they did; `--rounds` keeps them in, else they are left out. The loops that add
  repeated ids are charged as if they turned, whether ids repeat or not.
"""

import argparse
import dataclasses
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

import tpu_embedding as te
from tpu_embedding import aot
from tpu_embedding.aot import hlo
from tpu_embedding.hardware import hardware_of_device
from tpu_embedding.plan import capacity
from tpu_embedding.plan import plan as plan_module

TOPOLOGIES = ("v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")
NUM_TABLES, DIM, BATCH_SIZE = 26, 128, 16_384
VOCABULARY_SIZES = (100_000, 400_000)
TILE_ROWS = 8  # of a TPU tile of 128 lanes
NAMES = [f"t{i:02d}" for i in range(NUM_TABLES)]


def compile_ours(
    vocabulary_size: int, mesh: Any, keeps_rounds: bool = False
) -> list[Any]:
    """Compiles lookup and update in one step; activations leave, cotangents enter."""
    plan = make_plan(
        mesh,
        num_tables=NUM_TABLES,
        vocabulary_size=vocabulary_size,
        dim=DIM,
        optimizer=te.optimizers.adagrad(0.1),
    )
    round_size = capacity.round_size
    if not keeps_rounds:

        def round_size(*arguments, **options):
            size = capacity.round_size(*arguments, **options)
            return dataclasses.replace(size, holds_all=True)

    with mock.patch.object(plan_module, "round_size", round_size):
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


def unused_tile_bytes(program: Any) -> int:
    """Returns what the estimate charges for the other rows of gathered tiles."""
    module = hlo.parse_module(program.as_text())
    num_rows = 0
    for instruction in module.unfused_instructions():
        callee = instruction.called("calls") if instruction.opcode == "fusion" else None
        inside = [instruction]
        if callee is not None:
            inside = list(module.computations[callee].instructions.values())
        gathers = [i for i in inside if i.opcode == "gather" and _has_rows(i)]
        num_rows += sum(i.shapes[0].dims[0] for i in gathers)
        if callee is None or gathers:
            continue
        for scatter in (i for i in inside if i.opcode == "scatter" and _has_rows(i)):
            updates = module.computations[callee].instructions[scatter.operands[-1]]
            num_rows += 2 * updates.shapes[0].dims[0]
    return num_rows * (TILE_ROWS - 1) * 4 * DIM


def _has_rows(instruction: Any) -> bool:
    dims = instruction.shapes[0].dims
    return len(dims) == 2 and dims[1] == DIM


def estimated_bytes_per_second(mesh: Any) -> float:
    """Returns the rate at which the estimate lets bytes pass, off one gather."""
    device = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
    table = jax.ShapeDtypeStruct((8192, DIM), jnp.float32, sharding=device)
    ids = jax.ShapeDtypeStruct((65_536,), jnp.int32, sharding=device)
    gather = jax.jit(lambda table, ids: table.at[ids].get(mode="promise_in_bounds"))
    cost = gather.lower(table, ids).compile().cost_analysis()
    assert cost is not None
    return cost["bytes accessed"] / cost["optimal_seconds"]


def measure(compile_programs: Any, mesh: Any) -> dict[str, float]:
    """Compiles for both vocabulary sizes; returns milliseconds at size 0."""
    totals, compile_seconds, argument_bytes, tile_bytes = [], [], [], []
    for vocabulary_size in VOCABULARY_SIZES:
        start = time.perf_counter()
        programs = compile_programs(vocabulary_size, mesh)
        compile_seconds.append(time.perf_counter() - start)
        totals.append(sum(p.cost_analysis()["optimal_seconds"] for p in programs))
        tile_bytes.append(sum(map(unused_tile_bytes, programs)))
        # The last program takes table and slots, and the ids.
        argument_bytes.append(programs[-1].memory_analysis().argument_size_in_bytes)
    small, large = VOCABULARY_SIZES
    slope = (totals[1] - totals[0]) / (large - small)
    intercept = totals[0] - slope * small
    tiles = tile_bytes[0] / estimated_bytes_per_second(mesh)
    return {
        "intercept_ms": 1e3 * intercept,
        "no_tiles_ms": 1e3 * (intercept - tiles),
        "at_100k_rows_ms": 1e3 * totals[0],
        "argument_mib": argument_bytes[0] / 2**20,
        "compile_seconds": compile_seconds[0],
    }


def main() -> None:
    """Compares for each topology; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Compares estimates.")
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", action="store_true", help="charge further rounds")
    arguments = parser.parse_args()
    ours = lambda size, mesh: compile_ours(size, mesh, arguments.rounds)  # noqa: E731
    results = []
    heads = ("ms", "no tiles", "ms, 100k", "MiB", "compile s")
    print(" " * 32 + "".join(f"{head:>10}" for head in heads))
    for topology in arguments.topology:
        mesh = aot.topology_mesh(topology)
        for name, compile_programs in (
            ("tpu-embedding", ours),
            ("jax-tpu-embedding", compile_theirs),
        ):
            try:
                result: dict[str, Any] = measure(compile_programs, mesh)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
                print(f"{topology:12}{name:20}{result['error'][:60]}", flush=True)
            else:
                cells = [f"{value:10.3f}" for value in result.values()]
                print(f"{topology:12}{name:20}{''.join(cells)}", flush=True)
            results.append({"topology": topology, "library": name, **result})
    if arguments.json is not None:
        versions = {"jax": jax.__version__}
        report = {"device": "compiled only", "versions": versions, "results": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
