"""Kernels that read rows, add to them and update them.

XLA moves whole lines of 128 lanes: to read a row of 8, it reads, writes and reads again
16 times as much. And what it gathers, computes with and scatters is written to memory
and read again each time. A SparseCore can address each row for itself, whether several
share a line or one fills some, compute with it and write it back.

A line of 128 float32 lanes lies in memory as its rows do, one after the other, so a
kernel takes `[lines, 128]` as `[rows, dim]` as it stands. Wider lines lie in tiles of
eight, each cut into parts of 128 lanes: a kernel moves these parts (`_parts_of`).

What a subcore does is in `kernel_bodies.py`. Pallas' interpreter runs it on any device
(`backend.py`), which is how tests compare it with NumPy and with XLA's own gather and
scatter.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from tpu_embedding.hardware import DMA_GRANULE_BYTES, GIBIBYTE
from tpu_embedding.rows.kernels.backend import KernelBackend, launch, vector_lanes
from tpu_embedding.rows.kernels.kernel_bodies import (
    DROPPED_ROW,
    TILE_LINES,
    KernelBody,
    read_chunks,
    update_chunks,
    write_chunks,
)

ID_ALIGNMENT: Final = 8
"""Numbers of ids are multiples of it, for ids are moved 32 bytes at a time."""

_MAX_IDS: Final = 128
"""Ids that one copy may name."""

_MAX_BYTES: Final = 16 * GIBIBYTE
"""Of an array that a SparseCore addresses."""

_CHUNK_BYTES: Final = 64 * 1024
"""Rows that a subcore has in hand at once; it has at least 256 KiB of memory."""

_UPDATE_BYTES: Final = 192 * 1024
"""The same of table, slots and gradient together."""

MAX_ARRAYS: Final = 16
"""Arrays that are updated at once, so that there is room for some rows of each."""

_ADD: Final = KernelBody(run=lambda sums, addition, row: [row + addition])


def kernels_reach(num_rows: int, dim: int, line_lanes: int | None) -> bool:
    """Whether they do, float32 `[num_rows, dim]` in lines of so many lanes.

    Rows must fill lines, and be as long as what SparseCores address at least, 32 bytes
    (`dma_granule_size_bytes` in JAX's `jax/_src/tpu_info.py`), so that no write touches
    a neighbour. An array of more than 16 GiB, spare rows and all, XLA refuses.
    """
    fill_lines = dim in (8, 16, 32, 64) or dim % 128 == 0
    num_bytes = 4 * (num_rows + TILE_LINES) * dim
    return line_lanes == 128 and fill_lines and num_bytes <= _MAX_BYTES


def read_rows(
    lines: Float[Array, "lines lanes"],
    row_ids: Int[Array, " ids"],
    dim: int,
    backend: KernelBackend,
    *,
    sizes: Sequence[int] | None = None,
    valences: Sequence[int] | None = None,
    row_stride: int = 1,
) -> list[Float[Array, "_ lanes"]]:
    """Reads rows, or sums of rows, into lines of one or more arrays. Per shard.

    Args:
      lines: float32; rows of `dim` lie side by side in them, or fill one each, and then
        the number of lines is a multiple of 8 if `dim` is more than 128.
      row_ids: int32, a multiple of 8 of them, which fill lines; all must be there.
      dim: elements of a row, one of 8, 16, 32, 64 or a multiple of 128.
      backend: what runs the kernel.
      sizes: rows of each array, as many as fill lines, a multiple of 8; their ids lie
        array after array. None: there is one array.
      valences: how many ids each row of an array is the sum of: first come the first
        ids of all of its rows, then the second ones, and so on. None: one each.
      row_stride: what the rows of a line are apart. 1: rows lie in the order of their
        ids. Else a multiple of 8, and the size of each array one of `128 // dim` times
        as many: the first so many rows are at the first place of as many lines, the
        next so many at their second place, and so on.

    Returns:
      The rows, packed like those of `lines`.
    """
    sizes = [row_ids.shape[0]] if sizes is None else sizes
    valences = [1] * len(sizes) if valences is None else valences
    for size in sizes:
        _check_ids(size, dim)
    lanes = lines.shape[1]
    num_parts = lanes // 128
    row_ids, dim = _ids_of_parts(row_ids, dim), min(dim, 128)
    num_ids = row_ids.shape[0]
    sizes = [size * num_parts for size in sizes]
    chunk = _chunk_size(math.gcd(*sizes) if row_stride == 1 else row_stride, dim)
    num_lanes = vector_lanes(backend)
    buffer = pltpu.VMEM((chunk * dim // num_lanes, num_lanes), lines.dtype)
    results = launch(
        functools.partial(
            read_chunks, valences=valences, dim=dim, row_stride=row_stride
        ),
        (),
        (_parts_of(lines), row_ids),
        [jax.ShapeDtypeStruct((n * dim // 128, 128), lines.dtype) for n in sizes],
        scratch=[
            _ids_of_chunk(chunk),
            buffer,
            buffer,
            pltpu.SemaphoreType.DMA,
        ],
        num_bytes=num_ids * (4 + _bytes_of_row(dim)) + sum(sizes) * 4 * dim,
        backend=backend,
        name="read_rows",
    )
    return [_lines_of(parts, lanes) for parts in results]


def write_rows(
    sources: Sequence[Float[Array, "_ lanes"]],
    repetitions: Sequence[int],
    places: Sequence[Int[Array, " ids"]],
    sizes: Sequence[int],
    dim: int,
    backend: KernelBackend,
) -> list[Float[Array, "_ lanes"]]:
    """Writes rows to their places in one or more new arrays. Per shard.

    It is the way back of `read_rows` with `row_stride` the lines of each source: ids
    are those of one source after the other, which are the rows at the first place of its
    lines, then those at their second place, and so on; all that as often as it is
    repeated.

    Args:
      sources: float32 lines, each array a multiple of 8.
      repetitions: how often the rows of each source are written.
      places: for each new array: int32, the row that takes the row of each id, or
        `DROPPED_ROW`; no two ids the same.
      sizes: rows of each new array, a multiple of 8, which fill lines.
      dim: as in `read_rows`.
      backend: what runs the kernel.

    Returns:
      The new arrays, packed like the sources; anything where nothing was written.
    """
    for size in sizes:
        _check_ids(size, dim)
    lanes = sources[0].shape[1]
    num_parts = lanes // 128
    places = [_ids_of_parts(ids, dim) for ids in places]
    dim = min(dim, 128)
    num_lines = [source.shape[0] * num_parts for source in sources]
    chunk = _chunk_size(math.gcd(*num_lines), dim)
    num_ids = places[0].shape[0]
    results = launch(
        functools.partial(write_chunks, repetitions=repetitions, dim=dim),
        (),
        (*(_parts_of(source) for source in sources), *places),
        [
            jax.ShapeDtypeStruct((size * num_parts * dim // 128, 128), jnp.float32)
            for size in sizes
        ],
        scratch=[
            [_ids_of_chunk(chunk)] * len(sizes),
            pltpu.VMEM((chunk, dim), jnp.float32),
            pltpu.SemaphoreType.DMA,
        ],
        # For each id a row is written at most once, to one of the arrays.
        num_bytes=num_ids * (4 * len(sizes) + _bytes_of_row(dim))
        + sum(num_lines) * 4 * 128,
        backend=backend,
        name="write_rows",
    )
    return [_lines_of(parts, lanes) for parts in results]


def add_rows(
    lines: Float[Array, "lines lanes"],
    row_ids: Int[Array, " ids"],
    additions: Float[Array, "_ lanes"],
    dim: int,
    backend: KernelBackend,
) -> Float[Array, "lines lanes"]:
    """Adds to rows, in place where the caller donated. Per shard.

    Args:
      lines: as in `read_rows`.
      row_ids: int32, a multiple of 8 of them, which fill lines. All must be there,
        and each is named once, but for rows whose values nobody uses.
      additions: the values to add, packed in the order of the ids.
      dim: as in `read_rows`.
      backend: what runs the kernel.
    """
    (changed,), _ = update_rows(
        _ADD, [lines], row_ids, additions, dim, [], backend, name="add_rows"
    )
    return changed


def holds_whole_rows(dim: int, num_arrays: int, num_row_scalars: int) -> bool:
    """Whether a subcore has room for rows of so many arrays, tile by tile."""
    return _max_ids(dim, 1 + num_arrays, num_row_scalars) >= TILE_LINES


def update_rows(
    rule: KernelBody,
    arrays: Sequence[Float[Array, "lines lanes"]],
    row_ids: Int[Array, " ids"],
    gradients: Float[Array, "_ lanes"],
    dim: int,
    scalars: Sequence[Float[Array, ""]],
    backend: KernelBackend,
    row_scalars: Sequence[Float[Array, " ids"]] = (),
    *,
    name: str = "update_rows",
) -> tuple[list[Array], list[Array]]:
    """Replaces rows of several arrays by what a rule makes of them. Per shard.

    In place where the caller donated. Nothing but the new rows, and the new values of
    rows, is written to memory.

    Args:
      rule: what is done to each row. With sums or values, `holds_whole_rows` must hold.
      arrays: each as `lines` in `read_rows`.
      row_ids: as in `add_rows`.
      gradients: packed in the order of the ids.
      dim: as in `read_rows`.
      scalars: float32 scalars.
      backend: what runs the kernel.
      row_scalars: float32, of the row of each id.
      name: of the kernel, in what the compiler shows of it.

    Returns:
      The arrays with new rows, and the new values.
    """
    (num_rows,) = row_ids.shape
    _check_ids(num_rows, dim)
    lanes = gradients.shape[1]
    num_parts = lanes // 128
    row_ids, dim = _ids_of_parts(row_ids, dim), min(dim, 128)
    num_ids = row_ids.shape[0]
    # What looks at rows must have all parts of a row at hand.
    parts_together = num_parts if row_scalars or rule.num_sums else 1
    chunk = parts_together * _chunk_size(
        num_ids // parts_together,
        dim * parts_together,
        1 + len(arrays),
        len(row_scalars),
    )
    assert chunk % (parts_together * TILE_LINES) == 0
    num_lanes = vector_lanes(backend)
    buffer = pltpu.VMEM((chunk * dim // num_lanes, num_lanes), jnp.float32)
    # Vectors are read from it that begin at any row.
    of_values = pltpu.VMEM((chunk // num_parts + num_lanes,), jnp.float32)
    # A kernel has no scalars of its own; there is always one number, perhaps unused.
    repeated = jnp.repeat(jnp.stack([*scalars, jnp.float32(0)]), num_lanes)
    results = launch(
        functools.partial(
            update_chunks,
            rule=rule,
            dim=dim,
            num_arrays=len(arrays),
            num_parts=num_parts,
        ),
        tuple(_parts_of(lines) for lines in arrays),
        (row_ids, _parts_of(gradients), repeated, *row_scalars),
        [jax.ShapeDtypeStruct((num_rows,), jnp.float32)] * len(row_scalars),
        scratch=[
            _ids_of_chunk(chunk),
            buffer,
            [buffer] * len(arrays),
            [of_values] * len(row_scalars),
            pltpu.VMEM(repeated.shape, jnp.float32),
            pltpu.SemaphoreType.DMA,
        ],
        num_bytes=num_ids * (4 + 4 * dim + 2 * len(arrays) * _bytes_of_row(dim))
        + 2 * 4 * num_rows * len(row_scalars),
        backend=backend,
        name=name,
    )
    changed, new_values = results[: len(arrays)], results[len(arrays) :]
    return [_lines_of(parts, lanes) for parts in changed], list(new_values)


def _check_ids(num_ids: int, dim: int) -> None:
    if num_ids % ID_ALIGNMENT:
        raise ValueError(
            f"The number of ids must be a multiple of {ID_ALIGNMENT}, got {num_ids}."
        )
    if num_ids * dim % 128:
        raise ValueError(
            f"The number of ids must be a multiple of {128 // dim}, which fill lines, "
            f"got {num_ids}."
        )


def _chunk_size(
    num_ids: int, dim: int, num_buffers: int = 1, num_row_scalars: int = 0
) -> int:
    """Returns ids that a worker takes at once: a power of two that divides all."""
    return math.gcd(num_ids, _max_ids(dim, num_buffers, num_row_scalars))


def _max_ids(dim: int, num_buffers: int, num_row_scalars: int = 0) -> int:
    """Returns ids whose rows and values a worker has room for: a power of two, or 0."""
    of_rows = _CHUNK_BYTES // (4 * dim)
    of_all = _UPDATE_BYTES // (4 * (num_buffers * dim + num_row_scalars))
    most = min(of_rows, of_all)
    return 2 ** (most.bit_length() - 1) if most else 0


def _parts_of(lines: Float[Array, "lines lanes"]) -> Float[Array, "parts 128"]:
    """Cuts lines into parts of 128 lanes, as a TPU has them in memory.

    A TPU keeps eight lines at a time: their first 128 lanes, line after line, then the
    next 128. So on a TPU this changes nothing.
    """
    num_lines, lanes = lines.shape
    if lanes == 128:
        return lines
    tiles = lines.reshape(num_lines // TILE_LINES, TILE_LINES, lanes // 128, 128)
    return tiles.swapaxes(1, 2).reshape(-1, 128)


def _lines_of(
    parts: Float[Array, "parts 128"], lanes: int
) -> Float[Array, "lines lanes"]:
    """Puts lines together again; the inverse of `_parts_of`."""
    if lanes == 128:
        return parts
    tiles = parts.reshape(-1, lanes // 128, TILE_LINES, 128)
    return tiles.swapaxes(1, 2).reshape(-1, lanes)


def _ids_of_parts(row_ids: Int[Array, " ids"], dim: int) -> Int[Array, " parts"]:
    """Names the parts of rows, in the order in which `_parts_of` has those of lines."""
    if dim <= 128:
        return row_ids
    num_parts = dim // 128
    row_ids = row_ids.reshape(-1, 1, TILE_LINES)
    tile, line = jnp.divmod(row_ids, TILE_LINES)
    part = jnp.arange(num_parts, dtype=jnp.int32)[None, :, None]
    ids = (tile * num_parts + part) * TILE_LINES + line
    return jnp.where(row_ids == DROPPED_ROW, DROPPED_ROW, ids).reshape(-1)


def _ids_of_chunk(chunk: int) -> list[Any]:
    """Returns places for the ids of a chunk, in windows of what one copy may name."""
    window = math.gcd(chunk, _MAX_IDS)
    return [pltpu.VMEM((window,), jnp.int32)] * (chunk // window)


def _bytes_of_row(dim: int) -> int:
    """Returns bytes that memory moves for a row that lies anywhere."""
    return max(4 * dim, DMA_GRANULE_BYTES)
