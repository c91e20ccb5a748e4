"""The subcores of SparseCores, and what plays them elsewhere.

What a subcore does is written once, as a function of a `Worker` and of references to
arrays and buffers. Pallas runs it on SparseCores, and Pallas' interpreter on any other
device. The subcores take chunks of ids in turns and wait for nobody, so no two of them
may write to one row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jaxtyping import Array, Int

KernelBackend = Literal["sparse_core", "interpreter"]
"""What runs the kernels."""

Ref = Any
"""A reference to an array, as Pallas hands them to kernels; it has no type for them."""

_INTERPRETED_WORKERS: Final = 3
"""Subcores that the interpreter plays; they do not divide most numbers of chunks."""

_INTERPRETED_LANES: Final = 16
"""Numbers that they add at once; a TPU adds 8 or 16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """One of those that run a kernel.

    Attributes:
      number: from 0.
      num_workers: all of them.
      backend: what they are.
    """

    number: Int[Array, ""]
    num_workers: int
    backend: KernelBackend


def launch(
    body: Callable[..., None],
    changed: tuple[Array, ...],
    operands: tuple[Array, ...],
    out_types: list[jax.ShapeDtypeStruct],
    *,
    scratch: list[Any],
    num_bytes: int,
    backend: KernelBackend,
    name: str,
) -> tuple[Array, ...]:
    """Runs a kernel. Per shard.

    Args:
      body: what a worker does, given itself and references to what follows.
      changed: arrays that it changes, in place where the caller donated.
      operands: arrays that it reads.
      out_types: of arrays that it makes.
      scratch: types of its buffers, semaphores among them.
      num_bytes: that memory moves for all workers, for the compiler and reports.
      backend: what runs it.
      name: in what the compiler shows.

    Returns:
      The arrays that it changed, then those that it made.
    """
    if backend == "interpreter":
        return _interpret(body, changed, operands, out_types, scratch)
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def kernel(*refs):
        core, subcore = jax.lax.axis_index("core"), jax.lax.axis_index("subcore")
        number = core * mesh.num_subcores + subcore
        worker = Worker(number=number, num_workers=mesh.size, backend=backend)
        body(worker, *refs)

    run = pl.kernel(
        kernel,
        out_types,
        mesh=mesh,
        scratch_types=scratch,
        compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=num_bytes
        ),
        name=name,
    )
    refs = [jax.new_ref(array) for array in changed]
    made: Any = run(*refs, *operands)
    return *map(jax.freeze, refs), *made


def for_each_chunk(
    worker: Worker,
    num_ids: int,
    chunk: int,
    move: Callable[[Int[Array, ""]], None],
) -> None:
    """Calls `move` with the first id of each chunk that is the worker's."""
    num_chunks = num_ids // chunk

    @pl.loop(0, pl.cdiv(num_chunks, worker.num_workers))
    def _(turn):
        number = turn * worker.num_workers + worker.number

        @pl.when(number < num_chunks)
        def _():
            move(pl.multiple_of(number * chunk, chunk))


def copy_all(sources: Sequence[Ref], targets: Sequence[Ref], arrived: Ref) -> None:
    """Has all copies under way at once, and waits until the worker's side is free."""
    copies = [
        pltpu.async_copy(source, target, arrived)
        for source, target in zip(sources, targets, strict=True)
    ]
    for copy in copies:
        copy.wait()


def vector_lanes(backend: KernelBackend) -> int:
    """Returns the numbers that a worker adds at once."""
    if backend == "interpreter":
        return _INTERPRETED_LANES
    return plsc.get_sparse_core_info().num_lanes


def _interpret(
    body: Callable[..., None],
    changed: tuple[Array, ...],
    operands: tuple[Array, ...],
    out_types: list[jax.ShapeDtypeStruct],
    scratch: list[Any],
) -> tuple[Array, ...]:
    """Runs the workers of a kernel one after the other, on any device."""
    changed_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed]
    num_changed, num_inputs = len(changed), len(changed) + len(operands)

    def kernel(*refs):
        worker = Worker(
            number=pl.program_id(0),
            num_workers=_INTERPRETED_WORKERS,
            backend="interpreter",
        )
        # What is changed comes as an input, too.
        inputs, results = refs[num_changed:num_inputs], refs[num_inputs:]
        body(worker, *results[:num_changed], *inputs, *results[num_changed:])

    run = pl.pallas_call(
        kernel,
        out_shape=[*changed_types, *out_types],
        grid=(_INTERPRETED_WORKERS,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * num_inputs,
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (num_changed + len(out_types)),
        scratch_shapes=scratch,
        input_output_aliases={i: i for i in range(num_changed)},
        interpret=True,
    )
    results: Any = run(*changed, *operands)
    return tuple(results)
