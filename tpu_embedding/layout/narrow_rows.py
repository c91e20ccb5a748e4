"""Kernels that read rows, and add to them, where several rows share a line.

XLA moves whole lines of 128 lanes: to read a row of 8, it reads, writes and reads again
16 times as much. A SparseCore can address each row for itself. It takes an array
`[lines, 128]` as `[rows, dim]` as it stands, for a line of 128 float32 lanes lies in
memory as its rows do, one after the other.

What a subcore does is written once, in `_gather` and `_add`: Pallas runs it on
SparseCores, and Pallas' interpreter on any other device, which is how tests compare it
with XLA's own gather and scatter. The subcores take chunks of ids in turns and wait for
nobody, so no two of them may write to one row.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jaxtyping import Array, Float, Int

from tpu_embedding.hardware import DMA_GRANULE_BYTES, GIBIBYTE, HardwareInfo

Runner = Literal["sparse_core", "interpreter"]
"""What runs the kernels."""

KernelChoice = Literal["sparse_core", "interpreter", "none"]
KERNEL_CHOICES: Final[tuple[KernelChoice, ...]] = get_args(KernelChoice)
"""What `make_plan(kernels=...)` takes."""

Ref = Any
"""A reference to an array, as Pallas hands them to kernels; it has no type for them."""

FEWEST_IDS: Final = 8
"""Numbers of ids are multiples of it, for ids are moved 32 bytes at a time."""

_MOST_IDS: Final = 128
"""Ids that one copy may name."""

_MOST_BYTES: Final = 16 * GIBIBYTE
"""Of an array that a SparseCore addresses."""

_CHUNK_BYTES: Final = 64 * 1024
"""Rows that a subcore has in hand at once; it has at least 256 KiB of memory."""

_INTERPRETED_WORKERS: Final = 3
"""Subcores that the interpreter plays; they do not divide most numbers of chunks."""

_INTERPRETED_LANES: Final = 16
"""Numbers that they add at once; a TPU adds 8 or 16."""


def choose_runner(
    kernels: KernelChoice | None, device: jax.Device, hardware: HardwareInfo
) -> Runner | None:
    """Returns what runs the kernels of a plan; None: there are none.

    Args:
      kernels: the user's choice; None: SparseCores, where there are any.
      device: one of the plan's.
      hardware: that rows are laid out for.

    Raises:
      ValueError: if the choice is not known, or cannot be met.
    """
    if kernels is not None and kernels not in KERNEL_CHOICES:
        raise ValueError(
            f"kernels must be one of {KERNEL_CHOICES} or None, got {kernels!r}."
        )
    is_tpu = device.platform == "tpu"
    has_sparse_cores = is_tpu and hardware.num_sparse_cores > 0
    is_known = jax.__version_info__ >= (0, 12)
    if kernels is None:
        kernels = "sparse_core" if has_sparse_cores and is_known else "none"
    if kernels != "none" and not is_known:
        raise ValueError(
            f"kernels must be 'none' or None with jax {jax.__version__}, got "
            f"{kernels!r}: they need jax 0.12 or later."
        )
    if kernels == "interpreter" and hardware.line_lanes is None:
        raise ValueError(
            "kernels must be 'none' or None where rows do not share lines, got "
            f"'interpreter' for {hardware.name!r}: give hardware= of a TPU as well."
        )
    if kernels == "sparse_core" and not has_sparse_cores:
        raise ValueError(
            "kernels must be 'interpreter', 'none' or None without SparseCores, got "
            f"'sparse_core' on {device.device_kind!r}."
        )
    return None if kernels == "none" else kernels


def kernels_reach(num_rows: int, dim: int, line_lanes: int | None) -> bool:
    """Whether they do, float32 `[num_rows, dim]` that share lines of so many lanes.

    Rows must fill their lines, and be as long as what SparseCores address at least, 32
    bytes (`dma_granule_size_bytes` in JAX's `jax/_src/tpu_info.py`), so that no write
    touches a neighbour. An array of more than 16 GiB XLA refuses.
    """
    fill_lines = line_lanes == 128 and dim in (8, 16, 32, 64)
    return fill_lines and 4 * num_rows * dim < _MOST_BYTES


def gather_narrow_rows(
    lines: Float[Array, "lines 128"],
    row_ids: Int[Array, " ids"],
    dim: int,
    runner: Runner,
    *,
    distance: int = 1,
) -> Float[Array, "_ 128"]:
    """Reads rows that share lines, into lines. Per shard.

    Args:
      lines: float32; rows of `dim` lie side by side in them.
      row_ids: int32, a multiple of 8 of them, which fill lines; all must be there.
      dim: elements of a row, one of 8, 16, 32, 64.
      runner: what runs the kernel.
      distance: what the ids of the rows of a line are apart. 1: rows lie in the order
        of their ids. Else a multiple of 8, and the number of ids one of `128 // dim`
        times as many: the first so many rows are at the first place of as many lines,
        the next so many at their second place, and so on.

    Returns:
      The rows, `128 // dim` to a line.
    """
    num_ids = row_ids.shape[0]
    chunk = _chunk_size(num_ids if distance == 1 else distance, dim)
    out_type = jax.ShapeDtypeStruct((_num_lines(num_ids, dim), 128), lines.dtype)
    return _launch(
        functools.partial(_gather, dim=dim, distance=distance),
        (lines, row_ids),
        out_type,
        scratch=[
            _ids_of_chunk(chunk),
            pltpu.VMEM((chunk, dim), lines.dtype),
            pltpu.SemaphoreType.DMA,
        ],
        num_bytes=num_ids * (4 + 4 * dim + _bytes_of_row(dim)),
        runner=runner,
        name="gather_narrow_rows",
    )


def add_to_narrow_rows(
    lines: Float[Array, "lines 128"],
    row_ids: Int[Array, " ids"],
    additions: Float[Array, "_ 128"],
    dim: int,
    runner: Runner,
) -> Float[Array, "lines 128"]:
    """Adds to rows that share lines, in place where the caller donated. Per shard.

    Args:
      lines: float32; rows of `dim` lie side by side in them.
      row_ids: int32, a multiple of 8 of them, which fill lines. All must be there,
        and each is named once, but for rows whose values nobody uses.
      additions: the values to add, packed in the order of the ids.
      dim: elements of a row, one of 8, 16, 32, 64.
      runner: what runs the kernel.
    """
    num_ids = row_ids.shape[0]
    chunk = _chunk_size(num_ids, dim)
    num_lanes = _INTERPRETED_LANES
    if runner == "sparse_core":
        num_lanes = plsc.get_sparse_core_info().num_lanes
    return _launch(
        functools.partial(_add, dim=dim),
        (lines, row_ids, additions),
        None,
        scratch=[
            _ids_of_chunk(chunk),
            *[pltpu.VMEM((chunk * dim // num_lanes, num_lanes), lines.dtype)] * 2,
            pltpu.SemaphoreType.DMA,
        ],
        num_bytes=num_ids * (4 + 4 * dim + 2 * _bytes_of_row(dim)),
        runner=runner,
        name="add_to_narrow_rows",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Worker:
    """One of those that run a kernel.

    Attributes:
      number: from 0.
      num_workers: all of them.
    """

    number: Int[Array, ""]
    num_workers: int


def _gather(
    worker: _Worker,
    lines: Ref,
    row_ids: Ref,
    result: Ref,
    ids: list[Ref],
    rows: Ref,
    arrived: Ref,
    *,
    dim: int,
    distance: int,
) -> None:
    """What a worker does: the first three lie in the device's memory, the rest in its.

    A chunk of ids comes in, each of the rows that it names, and they go out together.
    """
    table = lines.reshape(lines.size // dim, dim)
    chunk = rows.shape[0]
    places = 128 // dim
    in_order = result.reshape(row_ids.size, dim)
    apart = result.reshape(result.shape[0], places, dim)

    def move(first):
        _copy_all(_windows(row_ids, ids, first), ids, arrived)
        _copy_all(_named_rows(table, ids), _windows(rows, ids), arrived)
        target = in_order.at[pl.ds(first, chunk)]
        if distance > 1:
            turn, line = jnp.divmod(first, distance)
            line += turn // places * distance
            target = apart.at[pl.ds(pl.multiple_of(line, chunk), chunk), turn % places]
        # What leaves a SparseCore in one piece needs no semaphore.
        pltpu.async_copy(rows, target, None).wait()

    _for_each_chunk(worker, row_ids.size, chunk, move)


def _add(
    worker: _Worker,
    lines: Ref,
    row_ids: Ref,
    additions: Ref,
    ids: list[Ref],
    sums: Ref,
    present: Ref,
    arrived: Ref,
    *,
    dim: int,
) -> None:
    """What a worker does: the first three lie in the device's memory, the rest in its.

    A chunk of ids comes in, what is to be added, and each of the rows that it names;
    the sums go out to each of the rows.
    """
    table = lines.reshape(lines.size // dim, dim)
    additions = additions.reshape(row_ids.size, dim)
    num_vectors, num_lanes = sums.shape
    chunk = num_vectors * num_lanes // dim
    present_rows = present.reshape(chunk, dim)
    sum_rows = sums.reshape(chunk, dim)

    def move(first):
        _copy_all(
            [*_windows(row_ids, ids, first), additions.at[pl.ds(first, chunk)]],
            [*ids, sum_rows],
            arrived,
        )
        _copy_all(_named_rows(table, ids), _windows(present_rows, ids), arrived)

        @pl.loop(0, num_vectors)
        def _(vector):
            sums[vector] = present[vector] + sums[vector]

        # JAX awaits that the sums are read, no more; the end of the kernel, that they
        # are written. Nobody reads these rows before: each is named once.
        _copy_all(_windows(sum_rows, ids), _named_rows(table, ids), arrived)

    _for_each_chunk(worker, row_ids.size, chunk, move)


def _for_each_chunk(
    worker: _Worker,
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


def _named_rows(table: Ref, ids: list[Ref]) -> list[Ref]:
    return [table.at[window] for window in ids]


def _windows(rows: Ref, ids: list[Ref], first: Any = 0) -> list[Ref]:
    """Cuts what belongs to each window of a chunk out of rows, or ids."""
    starts = [first + number * window.size for number, window in enumerate(ids)]
    return [
        rows.at[pl.ds(pl.multiple_of(start, window.size), window.size)]
        for start, window in zip(starts, ids, strict=True)
    ]


def _copy_all(sources: Sequence[Ref], targets: Sequence[Ref], arrived: Ref) -> None:
    """Has all copies under way at once, and waits until the worker's side is free."""
    copies = [
        pltpu.async_copy(source, target, arrived)
        for source, target in zip(sources, targets, strict=True)
    ]
    for copy in copies:
        copy.wait()


def _chunk_size(num_ids: int, dim: int) -> int:
    """Returns ids that a worker takes at once: a power of two that divides all."""
    chunk = math.gcd(num_ids, _CHUNK_BYTES // (4 * dim))
    if chunk < FEWEST_IDS:
        raise ValueError(
            f"The number of ids must be a multiple of {FEWEST_IDS}, got {num_ids}."
        )
    return chunk


def _num_lines(num_ids: int, dim: int) -> int:
    if num_ids * dim % 128:
        raise ValueError(
            f"The number of ids must be a multiple of {128 // dim}, which fill lines, "
            f"got {num_ids}."
        )
    return num_ids * dim // 128


def _ids_of_chunk(chunk: int) -> list[Any]:
    """Returns places for the ids of a chunk, in windows of what one copy may name."""
    window = min(chunk, _MOST_IDS)
    return [pltpu.VMEM((window,), jnp.int32)] * (chunk // window)


def _bytes_of_row(dim: int) -> int:
    """Returns bytes that memory moves for a row that lies anywhere."""
    return max(4 * dim, DMA_GRANULE_BYTES)


def _launch(
    body: Callable[..., None],
    operands: tuple[Array, ...],
    out_type: jax.ShapeDtypeStruct | None,
    *,
    scratch: list[Any],
    num_bytes: int,
    runner: Runner,
    name: str,
) -> Array:
    """Runs a kernel; without a result of its own, it changes its first operand."""
    if runner == "interpreter":
        return _interpret(body, operands, out_type, scratch)
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def kernel(*refs):
        core, subcore = jax.lax.axis_index("core"), jax.lax.axis_index("subcore")
        number = core * mesh.num_subcores + subcore
        body(_Worker(number=number, num_workers=mesh.size), *refs)

    run = pl.kernel(
        kernel,
        () if out_type is None else out_type,
        mesh=mesh,
        scratch_types=scratch,
        compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=num_bytes
        ),
        name=name,
    )
    if out_type is not None:
        result: Any = run(*operands)
        return result
    changed = jax.new_ref(operands[0])
    run(changed, *operands[1:])
    return jax.freeze(changed)


def _interpret(
    body: Callable[..., None],
    operands: tuple[Array, ...],
    out_type: jax.ShapeDtypeStruct | None,
    scratch: list[Any],
) -> Array:
    """Runs the workers of a kernel one after the other, on any device."""
    is_in_place = out_type is None
    if out_type is None:
        out_type = jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)

    def kernel(*refs):
        worker = _Worker(number=pl.program_id(0), num_workers=_INTERPRETED_WORKERS)
        inputs, (result, *rest) = refs[: len(operands)], refs[len(operands) :]
        inputs = (result, *inputs[1:]) if is_in_place else (*inputs, result)
        body(worker, *inputs, *rest)

    run = pl.pallas_call(
        kernel,
        out_shape=out_type,
        grid=(_INTERPRETED_WORKERS,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=scratch,
        input_output_aliases={0: 0} if is_in_place else {},
        interpret=True,
    )
    result: Any = run(*operands)
    return result
