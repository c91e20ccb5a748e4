"""Runs a kernel body on the subcores of SparseCores, or in Pallas' interpreter.

A kernel body is written once, as a function of a `Worker` and of references to arrays
and buffers. On a TPU each subcore of the SparseCores is a worker. On any other device
Pallas' interpreter runs three workers, one after the other, so tests need no TPU.

A body handles *chunks* of ids, which the workers take in turns:

    ids      | chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 | chunk 5 | ...
    worker   |    0    |    1    |    2    |    0    |    1    |    2    | ...

Workers do not synchronise, so no two of them may write to the same row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jaxtyping import Array, Int

from tpu_embedding.rows.kernels.kernel_access import KernelBackend

Ref = Any
"""A reference to an array or buffer in a kernel; Pallas has no public type for it."""

_INTERPRETED_WORKERS: Final = 3
"""Workers of the interpreter. 3 does not divide most numbers of chunks, so in tests
some workers handle fewer chunks than others."""

_INTERPRETED_LANES: Final = 16
"""Elements of a vector in the interpreter; vectors of a TPU have 8 or 16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """One subcore, or one of the workers that the interpreter runs.

    Attributes:
      number: rank of the worker, from 0.
      num_workers: workers that run the kernel.
      backend: backend that runs the worker.
    """

    number: Int[Array, ""]
    num_workers: int
    backend: KernelBackend


def launch(
    body: Callable[..., None],
    updated: tuple[Array, ...],
    operands: tuple[Array, ...],
    out_types: list[jax.ShapeDtypeStruct],
    *,
    scratch: list[Any],
    bytes_moved: int,
    backend: KernelBackend,
    name: str,
) -> tuple[Array, ...]:
    """Runs a kernel body on all workers of a backend. Per shard.

    Args:
      body: called by each worker with its `Worker`, then with references to `updated`,
        `operands`, the outputs and the scratch buffers, in this order.
      updated: arrays that the kernel changes, in place where the caller donated them.
      operands: arrays that the kernel only reads.
      out_types: types of the outputs, the arrays that the kernel creates.
      scratch: types of the buffers and semaphores that each worker owns.
      bytes_moved: HBM traffic of all workers; the compiler and reports read it.
      backend: backend that runs the kernel.
      name: name of the kernel in compiled programs and profiles.

    Returns:
      The updated arrays, then the outputs.
    """
    if backend == "interpreter":
        return _run_in_interpreter(body, updated, operands, out_types, scratch)
    cost = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=bytes_moved)
    return _run_on_sparse_cores(
        body, updated, operands, out_types, scratch, cost=cost, name=name
    )


def for_each_chunk(
    worker: Worker,
    num_ids: int,
    chunk: int,
    process: Callable[[Int[Array, ""]], None],
) -> None:
    """Calls `process` with the first id of each chunk that the worker handles.

    Args:
      worker: the worker that runs the loop.
      num_ids: ids of all chunks, a multiple of `chunk`.
      chunk: ids of a chunk.
      process: takes the first id of a chunk, a traced integer.
    """
    num_chunks = num_ids // chunk

    @pl.loop(0, pl.cdiv(num_chunks, worker.num_workers))
    def _(step):
        number = step * worker.num_workers + worker.number

        @pl.when(number < num_chunks)
        def _():
            process(pl.multiple_of(number * chunk, chunk))


def copy_all(sources: Sequence[Ref], targets: Sequence[Ref], semaphore: Ref) -> None:
    """Starts all copies, then waits for all, so that their latencies overlap.

    A copy into a buffer of the worker is complete on return. A copy out of a buffer has
    read it, so the buffer is free; HBM has all of the data when the kernel ends.
    """
    copies = [
        pltpu.async_copy(source, target, semaphore)
        for source, target in zip(sources, targets, strict=True)
    ]
    for copy in copies:
        copy.wait()


def vector_lanes(backend: KernelBackend) -> int:
    """Returns the elements of a vector, with which a worker computes at once."""
    if backend == "interpreter":
        return _INTERPRETED_LANES
    return plsc.get_sparse_core_info().num_lanes


def _run_on_sparse_cores(
    body: Callable[..., None],
    updated: tuple[Array, ...],
    operands: tuple[Array, ...],
    out_types: list[jax.ShapeDtypeStruct],
    scratch: list[Any],
    *,
    cost: pl.CostEstimate,
    name: str,
) -> tuple[Array, ...]:
    """Runs the body on every subcore of the device, all at the same time."""
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def kernel(*refs):
        core, subcore = jax.lax.axis_index("core"), jax.lax.axis_index("subcore")
        number = core * mesh.num_subcores + subcore
        worker = Worker(number=number, num_workers=mesh.size, backend="sparse_core")
        body(worker, *refs)

    run = pl.kernel(
        kernel,
        out_types,
        mesh=mesh,
        scratch_types=scratch,
        compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False),
        cost_estimate=cost,
        name=name,
    )
    refs = [jax.new_ref(array) for array in updated]
    outputs: Any = run(*refs, *operands)
    return *map(jax.freeze, refs), *outputs


def _run_in_interpreter(
    body: Callable[..., None],
    updated: tuple[Array, ...],
    operands: tuple[Array, ...],
    out_types: list[jax.ShapeDtypeStruct],
    scratch: list[Any],
) -> tuple[Array, ...]:
    """Runs the body for one worker after the other, on any device."""
    updated_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated]
    num_updated, num_inputs = len(updated), len(updated) + len(operands)

    def kernel(*refs):
        worker = Worker(
            number=pl.program_id(0),
            num_workers=_INTERPRETED_WORKERS,
            backend="interpreter",
        )
        # Updated arrays are aliased: they come as inputs and again as outputs.
        inputs, outputs = refs[num_updated:num_inputs], refs[num_inputs:]
        body(worker, *outputs[:num_updated], *inputs, *outputs[num_updated:])

    run = pl.pallas_call(
        kernel,
        out_shape=[*updated_types, *out_types],
        grid=(_INTERPRETED_WORKERS,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * num_inputs,
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (num_updated + len(out_types)),
        scratch_shapes=scratch,
        input_output_aliases={i: i for i in range(num_updated)},
        interpret=True,
    )
    results: Any = run(*updated, *operands)
    return tuple(results)
