"""Kernels that read, write and update rows on SparseCores.

They move less data than XLA's gather and scatter. XLA moves whole lines of 128 lanes:
16 times the bytes of a row of dim 8. It also writes every intermediate result to HBM
and reads it again. A SparseCore addresses each row on its own, computes with it in its
own memory, and writes only the result.

**Narrow rows share lines.** A line is 128 float32 lanes. Rows of dim 32 lie four to a
line, and HBM holds them in order:

    lanes     0..31   32..63  64..95  96..127
    line 0  | row 0 | row 1 | row 2 | row 3 |        HBM: row 0, row 1, row 2, ...
    line 1  | row 4 | row 5 | row 6 | row 7 |

So a kernel takes `[lines, 128]` as `[rows, dim]` without a copy. With a `row_stride`,
the rows that share a line are not neighbours. Rows of dim 32 with a stride of 8:

    line 0  | row 0 | row 8  | row 16 | row 24 |
    line 1  | row 1 | row 9  | row 17 | row 25 |
    ...
    line 7  | row 7 | row 15 | row 23 | row 31 |
    line 8  | row 32, and so on with the next 32 rows in the next 8 lines

**Wide rows are cut into parts.** A row of dim 256 fills one line of 256 lanes, two
*parts* of 128. A TPU stores lines in tiles of eight, part after part:

              part 0       part 1
    row 0  | lanes 0.. | lanes 128.. |     HBM: tile 0: part 0 of rows 0 to 7,
    row 1  | lanes 0.. | lanes 128.. |                  part 1 of rows 0 to 7,
    ...                                         tile 1: part 0 of rows 8 to 15, ...

So a kernel takes such lines as `[parts, 128]` in the order of HBM (`_split_lines`), and
its ids name parts (`_part_ids`).

`kernel_bodies.py` has the code that a subcore runs, and `backend.py` launches it.
Tests run it in Pallas' interpreter and compare it with NumPy.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from tpu_embedding.hardware import DMA_GRANULE_BYTES
from tpu_embedding.rows.kernels.backend import launch, vector_lanes
from tpu_embedding.rows.kernels.kernel_access import KernelBackend, KernelBody
from tpu_embedding.rows.kernels.kernel_bodies import (
    DROPPED_ROW,
    read_chunks,
    update_chunks,
    write_chunks,
)
from tpu_embedding.rows.kernels.kernel_limits import (
    BUFFER_BYTES,
    ID_ALIGNMENT,
    TILE_LINES,
    UPDATE_BUFFERS_BYTES,
)

_MAX_IDS_PER_COPY: Final = 128
"""Maximum ids that one indirect copy takes."""

_ADD: Final = KernelBody(run=lambda sums, addition, row: [row + addition])


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
    """Reads rows, or sums of rows, into lines of one or more results. Per shard.

    Args:
      lines: float32 rows, packed as the module's docstring shows. With dim above 128
        the number of lines is a multiple of 8.
      row_ids: int32, in bounds. Their number is a multiple of 8 and fills lines. The
        ids of one result follow those of another. Within a result come the first ids
        of all its rows, then the second ids, and so on.
      dim: elements of a row: 8, 16, 32, 64 or a multiple of 128.
      backend: backend that runs the kernel.
      sizes: rows of each result, a multiple of 8 that fills lines; None: one result.
      valences: ids that each row of a result sums; None: one.
      row_stride: stride between the rows of a result that share a line, as the module's
        docstring shows. 1: rows lie in order. Otherwise it is a multiple of 8, and each
        size is a multiple of `128 // dim * row_stride`.

    Returns:
      The results, in lines as wide as those of `lines`.
    """
    sizes = [row_ids.shape[0]] if sizes is None else sizes
    valences = [1] * len(sizes) if valences is None else valences
    _check_ids(sizes, dim)
    lanes = lines.shape[1]
    row_ids, dim = _part_ids(row_ids, dim), min(dim, 128)
    sizes = [size * (lanes // 128) for size in sizes]
    chunk = _chunk_size(math.gcd(*sizes) if row_stride == 1 else row_stride, dim)
    buffer = _row_buffer(chunk, dim, vector_lanes(backend), lines.dtype)
    results = launch(
        functools.partial(
            read_chunks, valences=valences, dim=dim, row_stride=row_stride
        ),
        (),
        (_split_lines(lines), row_ids),
        _line_types(sizes, dim, lines.dtype),
        scratch=[_id_buffers(chunk), buffer, buffer, pltpu.SemaphoreType.DMA],
        bytes_moved=row_ids.size * (4 + _access_bytes(dim)) + sum(sizes) * 4 * dim,
        backend=backend,
        name="read_rows",
    )
    return [_join_parts(parts, lanes) for parts in results]


def write_rows(
    sources: Sequence[Float[Array, "_ lanes"]],
    repetitions: Sequence[int],
    target_ids: Sequence[Int[Array, " ids"]],
    sizes: Sequence[int],
    dim: int,
    backend: KernelBackend,
) -> list[Float[Array, "_ lanes"]]:
    """Writes rows to given places in one or more new arrays. Per shard.

    This is the reverse of `read_rows` with the lines of each source as its
    `row_stride`. The ids of one source follow those of another. Within a source come
    the rows at the first place of its lines, then those at the second place, and so
    on. All these ids are repeated as often as the source.

    Args:
      sources: float32 rows in lines; each source has a multiple of 8 lines.
      repetitions: ids per row of each source.
      target_ids: int32 `[ids]` per new array: the row to write for each id, or
        `DROPPED_ROW`. No row is named twice.
      sizes: rows of each new array, a multiple of 8 that fills lines.
      dim: see `read_rows`.
      backend: backend that runs the kernel.

    Returns:
      The new arrays, in lines as wide as those of the sources. Rows that no id names
      are undefined.
    """
    _check_ids(sizes, dim)
    lanes = sources[0].shape[1]
    num_parts = lanes // 128
    target_ids = [_part_ids(ids, dim) for ids in target_ids]
    dim = min(dim, 128)
    num_lines = [source.shape[0] * num_parts for source in sources]
    chunk = _chunk_size(math.gcd(*num_lines), dim)
    # One array takes the row of an id, or none does.
    bytes_per_id = 4 * len(sizes) + _access_bytes(dim)
    buffer = pltpu.VMEM((chunk, dim), jnp.float32)
    results = launch(
        functools.partial(write_chunks, repetitions=repetitions, dim=dim),
        (),
        (*map(_split_lines, sources), *target_ids),
        _line_types([size * num_parts for size in sizes], dim, jnp.float32),
        scratch=[[_id_buffers(chunk)] * len(sizes), buffer, pltpu.SemaphoreType.DMA],
        bytes_moved=target_ids[0].size * bytes_per_id + sum(num_lines) * 4 * 128,
        backend=backend,
        name="write_rows",
    )
    return [_join_parts(parts, lanes) for parts in results]


def add_rows(
    lines: Float[Array, "lines lanes"],
    row_ids: Int[Array, " ids"],
    additions: Float[Array, "_ lanes"],
    dim: int,
    backend: KernelBackend,
) -> Float[Array, "lines lanes"]:
    """Adds to rows, in place where the caller donated the lines. Per shard.

    Args:
      lines: see `read_rows`.
      row_ids: int32, in bounds. Their number is a multiple of 8 and fills lines. No row
        is named twice, except spare rows, which are undefined afterwards.
      additions: the rows to add, packed in the order of the ids.
      dim: see `read_rows`.
      backend: backend that runs the kernel.

    Returns:
      The lines with the sums.
    """
    (updated,), _ = update_rows(
        _ADD, [lines], row_ids, additions, dim, [], backend, name="add_rows"
    )
    return updated


def update_rows(
    body: KernelBody,
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
    """Applies an optimizer's rule to the same rows of several arrays. Per shard.

    Only new rows and new row scalars are written to HBM. Arrays are updated in place
    where the caller donated them.

    Args:
      body: the rule. If it takes sums or row scalars, a subcore must have room for
        whole rows (`no_room_reason`).
      arrays: the table and slot variables, each as `lines` in `read_rows`.
      row_ids: see `add_rows`.
      gradients: packed in the order of the ids.
      dim: see `read_rows`.
      scalars: float32 scalars that belong to no row, such as the learning rate.
      backend: backend that runs the kernel.
      row_scalars: float32, one value for each id, such as a row-wise accumulator.
      name: name of the kernel in compiled programs and profiles.

    Returns:
      The updated arrays, and the new row scalars.
    """
    _check_ids([row_ids.shape[0]], dim)
    lanes = gradients.shape[1]
    row_ids, dim = _part_ids(row_ids, dim), min(dim, 128)
    # Kernels take no scalars. The zero at the end avoids an empty array.
    repeated = jnp.repeat(jnp.stack([*scalars, jnp.float32(0)]), vector_lanes(backend))
    results = _launch_update(
        body,
        tuple(map(_split_lines, arrays)),
        (row_ids, _split_lines(gradients), repeated, *row_scalars),
        dim=dim,
        num_parts=lanes // 128,
        backend=backend,
        name=name,
    )
    updated, new_row_scalars = results[: len(arrays)], results[len(arrays) :]
    return [_join_parts(parts, lanes) for parts in updated], list(new_row_scalars)


def _launch_update(
    body: KernelBody,
    arrays: tuple[Array, ...],
    operands: tuple[Array, ...],
    *,
    dim: int,
    num_parts: int,
    backend: KernelBackend,
    name: str,
) -> tuple[Array, ...]:
    """Launches the kernel of `update_rows`.

    Args:
      body: see `update_rows`.
      arrays: the table and slot variables, cut into parts.
      operands: ids of parts, gradients cut into parts, scalars repeated over the lanes
        of a vector, and the row scalars.
      dim: elements of a part.
      num_parts: parts of a row.
      backend: see `update_rows`.
      name: see `update_rows`.
    """
    row_ids, _, _, *row_scalars = operands
    num_ids, num_rows = row_ids.size, row_ids.size // num_parts
    # A rule that takes whole rows needs all parts of a row in the same chunk.
    parts_in_chunk = num_parts if row_scalars or body.num_sums else 1
    chunk = parts_in_chunk * _chunk_size(
        num_ids // parts_in_chunk,
        dim * parts_in_chunk,
        num_buffers=1 + len(arrays),
        num_row_scalars=len(row_scalars),
    )
    assert chunk % (parts_in_chunk * TILE_LINES) == 0
    bytes_per_id = 4 + 4 * dim + 2 * len(arrays) * _access_bytes(dim)
    sizes = {"dim": dim, "num_arrays": len(arrays), "num_parts": num_parts}
    return launch(
        functools.partial(update_chunks, kernel_body=body, **sizes),
        arrays,
        operands,
        [jax.ShapeDtypeStruct((num_rows,), jnp.float32)] * len(row_scalars),
        scratch=_update_scratch(chunk, operands, vector_lanes(backend), **sizes),
        bytes_moved=num_ids * bytes_per_id + 2 * 4 * num_rows * len(row_scalars),
        backend=backend,
        name=name,
    )


def _update_scratch(
    chunk: int,
    operands: tuple[Array, ...],
    num_lanes: int,
    *,
    dim: int,
    num_arrays: int,
    num_parts: int,
) -> list[Any]:
    """Returns the types of the buffers of `update_chunks`."""
    _, _, repeated_scalars, *row_scalars = operands
    row_buffer = _row_buffer(chunk, dim, num_lanes, jnp.float32)
    # A whole vector is loaded from any row on, so the last row needs lanes behind it.
    row_scalar_buffer = pltpu.VMEM((chunk // num_parts + num_lanes,), jnp.float32)
    return [
        _id_buffers(chunk),
        row_buffer,
        [row_buffer] * num_arrays,
        [row_scalar_buffer] * len(row_scalars),
        pltpu.VMEM(repeated_scalars.shape, jnp.float32),
        pltpu.SemaphoreType.DMA,
    ]


def _check_ids(sizes: Sequence[int], dim: int) -> None:
    """Raises a ValueError if numbers of ids are not aligned, or do not fill lines."""
    for num_ids in sizes:
        if num_ids % ID_ALIGNMENT:
            raise ValueError(
                f"The number of ids must be a multiple of {ID_ALIGNMENT}, got "
                f"{num_ids}."
            )
        if num_ids * dim % 128:
            raise ValueError(
                f"The number of ids must be a multiple of {128 // dim}, which fill "
                f"lines, got {num_ids}."
            )


def _chunk_size(
    num_ids: int, dim: int, *, num_buffers: int = 1, num_row_scalars: int = 0
) -> int:
    """Returns the ids of a chunk: the largest power of two that fits and divides."""
    return math.gcd(num_ids, _max_chunk_ids(dim, num_buffers, num_row_scalars))


def _max_chunk_ids(dim: int, num_buffers: int, num_row_scalars: int) -> int:
    """Returns the ids whose rows fit into a subcore: a power of two, or 0."""
    in_one_buffer = BUFFER_BYTES // (4 * dim)
    in_all = UPDATE_BUFFERS_BYTES // (4 * (num_buffers * dim + num_row_scalars))
    max_ids = min(in_one_buffer, in_all)
    return 2 ** (max_ids.bit_length() - 1) if max_ids else 0


def _split_lines(lines: Float[Array, "lines lanes"]) -> Float[Array, "parts 128"]:
    """Cuts wide lines into parts of 128 lanes, in the order of HBM.

    On a TPU the data stays in place; the module's docstring shows the order.
    """
    num_lines, lanes = lines.shape
    if lanes == 128:
        return lines
    tiles = lines.reshape(num_lines // TILE_LINES, TILE_LINES, lanes // 128, 128)
    return tiles.swapaxes(1, 2).reshape(-1, 128)


def _join_parts(
    parts: Float[Array, "parts 128"], lanes: int
) -> Float[Array, "lines lanes"]:
    """Joins parts into lines; the inverse of `_split_lines`."""
    if lanes == 128:
        return parts
    tiles = parts.reshape(-1, lanes // 128, TILE_LINES, 128)
    return tiles.swapaxes(1, 2).reshape(-1, lanes)


def _part_ids(row_ids: Int[Array, " ids"], dim: int) -> Int[Array, " parts"]:
    """Returns the ids of the parts of rows, ordered as `_split_lines` orders parts.

    `DROPPED_ROW` stays `DROPPED_ROW` for each part.
    """
    if dim <= 128:
        return row_ids
    num_parts = dim // 128
    row_ids = row_ids.reshape(-1, 1, TILE_LINES)
    tile, line = jnp.divmod(row_ids, TILE_LINES)
    part = jnp.arange(num_parts, dtype=jnp.int32)[None, :, None]
    ids = (tile * num_parts + part) * TILE_LINES + line
    return jnp.where(row_ids == DROPPED_ROW, DROPPED_ROW, ids).reshape(-1)


def _line_types(sizes: Sequence[int], dim: int, dtype: Any) -> list[Any]:
    """Returns the types of new lines of 128 lanes for so many rows, or parts, each."""
    return [jax.ShapeDtypeStruct((size * dim // 128, 128), dtype) for size in sizes]


def _id_buffers(chunk: int) -> list[Any]:
    """Returns the types of the id buffers of a chunk, each for one indirect copy."""
    window = math.gcd(chunk, _MAX_IDS_PER_COPY)
    return [pltpu.VMEM((window,), jnp.int32)] * (chunk // window)


def _row_buffer(chunk: int, dim: int, num_lanes: int, dtype: Any) -> Any:
    """Returns the type of a buffer for the rows of a chunk, as vectors of lanes."""
    return pltpu.VMEM((chunk * dim // num_lanes, num_lanes), dtype)


def _access_bytes(dim: int) -> int:
    """Returns the HBM bytes that move when one row is read or written on its own."""
    return max(4 * dim, DMA_GRANULE_BYTES)
