"""The bodies of the row kernels: they read, write or update one chunk after another.

`row_kernels.py` prepares the arrays and launches a body; every worker runs it
(`backend.py`). Arrays lie in HBM. A worker copies one *chunk* at a time into buffers in
its own memory, computes there, and copies the result back:

               1. copy in      2. indirect copy         3. compute      4. copy out
    HBM        row ids         rows that ids name                       results
                  |                   |                                    ^
                  v                   v                                    |
    worker     id buffers      row buffers  ------->  row buffers  --------+

One indirect copy takes at most 128 ids, so the ids of a chunk lie in several buffers. A
*window* is the part of a chunk that belongs to one id buffer.

Row buffers are `[vectors, lanes]`: a subcore computes with vectors of 8 or 16 elements,
so a vector holds several short rows, or a row takes several vectors. Rows of more than
128 elements come as parts of 128, which `row_kernels.py` draws.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jaxtyping import Array, Int

from tpu_embedding.rows.kernels.backend import Ref, Worker, copy_all, for_each_chunk
from tpu_embedding.rows.kernels.kernel_access import KernelBody
from tpu_embedding.rows.kernels.kernel_limits import TILE_LINES
from tpu_embedding.rows.kernels.sections import Sections

DROPPED_ROW: Final = -1
"""Target of a row that `write_rows` leaves out."""

_NO_SEMAPHORE: Final = None
"""Passed instead of a semaphore: a single outgoing DMA needs none."""


def read_chunks(
    worker: Worker, *refs: Any, valences: Sequence[int], dim: int, row_stride: int
) -> None:
    """Reads, and sums, the rows of each chunk of results: the body of `read_rows`.

    Args:
      worker: the worker that runs the body.
      *refs: lines, row ids, the results; then buffers: ids, rows, sums, a semaphore.
      valences: see `read_rows`.
      dim: elements of a row, or of a part of a wide row.
      row_stride: see `read_rows`.
    """
    lines, row_ids, *results, ids, rows, sums, semaphore = refs
    table = lines.reshape(lines.size // dim, dim)
    num_vectors, num_lanes = rows.shape
    chunk = num_vectors * num_lanes // dim
    sections = Sections([result.size // dim for result in results], valences)
    is_pooled = any(valence > 1 for valence in valences)
    result_rows = (sums if is_pooled else rows).reshape(chunk, dim)

    def fetch(first_id):
        copy_all(_windows(row_ids, ids, first_id), ids, semaphore)
        buffers = _buffered_rows([rows], ids, dim)
        copy_all(_indexed_rows([table], ids), buffers, semaphore)

    def pool(first_id, size, valence):
        @pl.loop(0, valence)
        def _(k):
            fetch(pl.multiple_of(first_id + k * size, chunk))

            @pl.loop(0, num_vectors)
            def _(i):
                sums[i] = jnp.where(k == 0, rows[i], sums[i] + rows[i])

    def send(result, first):
        target = _strided_rows(result, first, chunk, dim, row_stride)
        pltpu.async_copy(result_rows, target, _NO_SEMAPHORE).wait()

    def read_chunk(first):
        if is_pooled:
            start, size, first_id, valence = sections.find(first)
            pool(first_id + first - start, size, valence)
        else:
            fetch(first)
        for i, result in enumerate(results):
            is_here = sections.contains(i, first)
            first_row = pl.multiple_of(first - sections.starts[i], chunk)
            pl.when(is_here)(functools.partial(send, result, first_row))

    for_each_chunk(worker, sections.num_rows, chunk, read_chunk)


def write_chunks(
    worker: Worker, *refs: Any, repetitions: Sequence[int], dim: int
) -> None:
    """Writes each chunk of rows to its targets: the body of `write_rows`.

    Args:
      worker: the worker that runs the body.
      *refs: sources, target ids of each result, the results; then buffers: ids for each
        result, rows, a semaphore.
      repetitions: see `write_rows`.
      dim: elements of a row, or of a part of a wide row.
    """
    *arrays, id_buffers, rows, semaphore = refs
    num_sources, num_results = len(repetitions), len(id_buffers)
    sources = arrays[:num_sources]
    target_ids, results = arrays[num_sources:-num_results], arrays[-num_results:]
    chunk = rows.shape[0]
    sections = Sections([source.size // dim for source in sources], repetitions)

    def fetch(source, first):
        place, line = jnp.divmod(first, source.shape[0])
        lines = pl.ds(pl.multiple_of(line, chunk), chunk)
        by_place = source.reshape(source.shape[0], 128 // dim, dim)
        is_whole_line = dim == 128
        source_rows = source.at[lines] if is_whole_line else by_place.at[lines, place]
        copy_all([source_rows], [rows], semaphore)

    def write_chunk(first):
        for i, source in enumerate(sources):
            is_here = sections.contains(i, first)
            first_row = first - sections.starts[i]
            pl.when(is_here)(functools.partial(fetch, source, first_row))
        start, size, first_id, count = sections.find(first)

        @pl.loop(0, count)
        def _(k):
            first_target = pl.multiple_of(first_id + first - start + k * size, chunk)
            for result, targets, ids in zip(
                results, target_ids, id_buffers, strict=True
            ):
                copy_all(_windows(targets, ids, first_target), ids, semaphore)
                table = result.reshape(result.size // dim, dim)
                for window, new in zip(ids, _windows(rows, ids), strict=True):
                    _write_kept_rows(worker, new, table, window, semaphore)

    for_each_chunk(worker, sections.num_rows, chunk, write_chunk)


def _write_kept_rows(
    worker: Worker, rows: Ref, table: Ref, ids: Ref, semaphore: Ref
) -> None:
    """Writes each row to the row of the table that its id names.

    Rows whose id is `DROPPED_ROW` are left out.
    """
    if worker.backend == "sparse_core":
        targets = plsc.Indices(ids, ignored_value=DROPPED_ROW)
        pltpu.async_copy(rows, table.at[targets], semaphore).wait()
        return

    # Pallas' interpreter does not support ignored ids.
    @pl.loop(0, ids.size)
    def _(i):
        @pl.when(ids[i] != DROPPED_ROW)
        def _():
            row, target = rows.at[pl.ds(i, 1)], table.at[pl.ds(ids[i], 1)]
            pltpu.async_copy(row, target, semaphore).wait()


def update_chunks(
    worker: Worker,
    *refs: Any,
    kernel_body: KernelBody,
    dim: int,
    num_arrays: int,
    num_parts: int,
) -> None:
    """Applies a rule to the rows of each chunk of ids: the body of `update_rows`.

    Args:
      worker: the worker that runs the body.
      *refs: those of `_UpdateArrays`; then buffers: ids, gradients, rows of each array,
        row scalars, repeated scalars, a semaphore.
      kernel_body: the rule.
      dim: elements of a row, or of a part of a wide row.
      num_arrays: arrays that are updated.
      num_parts: parts of a row.
    """
    *hbm_refs, ids, gradient, rows, row_scalars, scalars, semaphore = refs
    arrays = _UpdateArrays.from_refs(hbm_refs, num_arrays, dim)
    chunk = gradient.size // dim
    num_rows = chunk // num_parts
    copy_all([arrays.scalars], [scalars], semaphore)
    layout = _VectorLayout(num_lanes=gradient.shape[1], dim=dim, num_parts=num_parts)
    row_scalar_buffers = [buffer.at[pl.ds(0, num_rows)] for buffer in row_scalars]

    def slice_of_chunk(row_scalar, first):
        first_row = pl.multiple_of(first // num_parts, TILE_LINES)
        return row_scalar.at[pl.ds(first_row, num_rows)]

    def update_chunk(first):
        hbm_ids = _windows(arrays.row_ids, ids, first)
        hbm_gradient = arrays.gradients.at[pl.ds(first, chunk)]
        gradient_rows = gradient.reshape(chunk, dim)
        copy_all([*hbm_ids, hbm_gradient], [*ids, gradient_rows], semaphore)
        hbm_rows = _indexed_rows(arrays.tables, ids)
        buffered_rows = _buffered_rows(rows, ids, dim)
        old = [slice_of_chunk(array, first) for array in arrays.old_row_scalars]
        buffers = [*buffered_rows, *row_scalar_buffers]
        copy_all([*hbm_rows, *old], buffers, semaphore)
        _update_buffers(kernel_body, layout, gradient, rows, row_scalars, scalars)
        # These waits free the buffers only; HBM has the data when the kernel ends. That
        # is early enough: no worker reads these rows again, as each is named once.
        for buffer, new in zip(row_scalar_buffers, arrays.new_row_scalars, strict=True):
            pltpu.async_copy(buffer, slice_of_chunk(new, first), _NO_SEMAPHORE).wait()
        copy_all(buffered_rows, hbm_rows, semaphore)

    for_each_chunk(worker, arrays.row_ids.size, chunk, update_chunk)


class _UpdateArrays(NamedTuple):
    """The arrays of `update_rows` in HBM.

    Attributes:
      tables: `[rows, dim]` for each updated array, the table and slot variables.
      row_ids: `[ids]`.
      gradients: `[ids, dim]`.
      scalars: each scalar repeated over the lanes of a vector.
      old_row_scalars: `[ids / num_parts]` for each row scalar.
      new_row_scalars: the same shapes, to be written.
    """

    tables: list[Ref]
    row_ids: Ref
    gradients: Ref
    scalars: Ref
    old_row_scalars: Sequence[Ref]
    new_row_scalars: Sequence[Ref]

    @classmethod
    def from_refs(
        cls, refs: Sequence[Ref], num_arrays: int, dim: int
    ) -> "_UpdateArrays":
        """Names the references to HBM that `launch` passes.

        Args:
          refs: the updated arrays, row ids, gradients, scalars, old row scalars, new
            row scalars.
          num_arrays: updated arrays.
          dim: elements of a row, or of a part of a wide row.
        """
        arrays, operands = refs[:num_arrays], refs[num_arrays:]
        row_ids, gradients, scalars, *row_scalars = operands
        num_row_scalars = len(row_scalars) // 2
        return cls(
            tables=[array.reshape(array.size // dim, dim) for array in arrays],
            row_ids=row_ids,
            gradients=gradients.reshape(row_ids.size, dim),
            scalars=scalars,
            old_row_scalars=row_scalars[:num_row_scalars],
            new_row_scalars=row_scalars[num_row_scalars:],
        )


def _update_buffers(
    kernel_body: KernelBody,
    layout: "_VectorLayout",
    gradient: Ref,
    rows: Sequence[Ref],
    row_scalars: Sequence[Ref],
    scalars: Ref,
) -> None:
    """Applies a rule to the rows and row scalars of a chunk, in the buffers.

    Args:
      kernel_body: the rule.
      layout: places of the rows among the vectors.
      gradient: `[vectors, lanes]`.
      rows: `[vectors, lanes]` for each array.
      row_scalars: `[rows + lanes]` for each row scalar.
      scalars: `[scalars * lanes]`, each scalar repeated over the lanes; a zero follows.
    """
    num_vectors, num_lanes = gradient.shape
    num_scalars = scalars.shape[0] // num_lanes - 1
    scalar_vectors = [
        scalars[pl.ds(i * num_lanes, num_lanes)] for i in range(num_scalars)
    ]

    def run(sums, i, row_scalar_vectors):
        vectors = [gradient[i], *(buffer[i] for buffer in rows)]
        return kernel_body.run(sums, *vectors, *row_scalar_vectors, *scalar_vectors)

    def write(i, new):
        for buffer, vector in zip(rows, new, strict=True):
            buffer[i] = vector

    if row_scalars or kernel_body.num_sums:
        num_rows = num_vectors * num_lanes // (layout.dim * layout.num_parts)
        update = functools.partial(
            _update_group, run, write, layout, row_scalars, kernel_body.num_sums
        )
        pl.loop(0, num_rows // layout.rows_per_group)(update)
    else:
        pl.loop(0, num_vectors)(lambda i: write(i, run([], i, [])))


def _update_group(
    run: Callable[..., Any],
    write: Callable[[Int[Array, ""], Sequence[Array]], None],
    layout: "_VectorLayout",
    row_scalars: Sequence[Ref],
    num_sums: int,
    group: Int[Array, ""],
) -> None:
    """Applies a rule to a group: the rows of one vector, or the vectors of one row.

    Args:
      run: the rule; takes sums, the index of a vector and the row scalars' vectors.
      write: takes the index of a vector and the new vectors of all arrays.
      layout: places of the rows among the vectors.
      row_scalars: see `_update_buffers`.
      num_sums: sums over a row that the rule takes.
      group: index of the group.
    """
    old = [layout.read(buffer, group) for buffer in row_scalars]
    sums: list[Array] = []
    for _ in range(num_sums):
        summands = functools.partial(run, list(sums), row_scalar_vectors=old)
        sums.append(layout.sum_rows(summands, group))

    def update(i, _):
        new = run(sums, i, old)
        num_arrays = len(new) - len(row_scalars)
        write(i, new[:num_arrays])
        return tuple(new[num_arrays:])

    # Every vector of a row gives the same new row scalars; the last ones are kept.
    new_row_scalars = layout.fold(group, update, tuple(old))
    for buffer, vector in zip(row_scalars, new_row_scalars, strict=True):
        layout.write(buffer, group, vector)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _VectorLayout:
    """The places of rows among the vectors of a chunk.

    Rows come in groups: the rows that share one vector, or one row of several vectors.
    With 16 lanes:

        dim 8    group 0:  vector 0  | row 0 | row 1 |
        dim 32   group 0:  vector 0  | row 0         |
                           vector 1  | row 0         |

    Attributes:
      num_lanes: elements of a vector.
      dim: elements of a row, or of a part of a wide row.
      num_parts: parts of a row; a tile has the first parts of its eight rows, then the
        second ones, and so on.
    """

    num_lanes: int
    dim: int
    num_parts: int

    @property
    def rows_per_group(self) -> int:
        """Rows of a group."""
        return max(1, self.num_lanes // self.dim)

    def fold(self, group: Int[Array, ""], body: Callable[..., Any], carry: Any) -> Any:
        """Calls `carry = body(index, carry)` for each vector of a group."""
        vectors_per_part = max(1, self.dim // self.num_lanes)

        def vector_index(j):
            part, i = jnp.divmod(j, vectors_per_part)
            tile, line = jnp.divmod(group, TILE_LINES)
            part = (tile * self.num_parts + part) * TILE_LINES + line
            return part * vectors_per_part + i

        num_vectors = self.num_parts * vectors_per_part
        if num_vectors == 1:
            return body(group, carry)
        return jax.lax.fori_loop(
            0, num_vectors, lambda j, carry: body(vector_index(j), carry), carry
        )

    def sum_rows(
        self, summands: Callable[[Int[Array, ""]], Array], group: Int[Array, ""]
    ) -> Array:
        """Sums over each row of a group.

        Args:
          summands: returns the vector of summands for the index of a vector.
          group: index of the group.

        Returns:
          A vector with the sum of a row in each of the row's lanes.
        """
        zeros = jnp.zeros(self.num_lanes, jnp.float32)
        total = self.fold(group, lambda i, total: total + summands(i), zeros)
        # Adding the lane whose index differs in one bit, bit by bit, sums all lanes.
        lane_bit = min(self.dim, self.num_lanes) // 2
        while lane_bit > 0:
            total = total + _pick_lanes(total, self._lanes ^ lane_bit)
            lane_bit //= 2
        return total

    def read(self, row_scalars: Ref, group: Int[Array, ""]) -> Array:
        """Returns a vector with the scalar of a row in each of the row's lanes."""
        scalars = row_scalars[self._slice_of(group)]
        return _pick_lanes(scalars, self._lanes // self.dim)

    def write(self, row_scalars: Ref, group: Int[Array, ""], vector: Array) -> None:
        """Stores the scalars of a group's rows; the inverse of `read`."""
        place = self._slice_of(group)
        first_lanes = jnp.minimum(self._lanes * self.dim, self.num_lanes - 1)
        is_of_group = self._lanes < self.rows_per_group
        new = _pick_lanes(vector, first_lanes)
        row_scalars[place] = jnp.where(is_of_group, new, row_scalars[place])

    @property
    def _lanes(self) -> Int[Array, " lanes"]:
        return jax.lax.iota(jnp.int32, self.num_lanes)

    def _slice_of(self, group: Int[Array, ""]) -> Any:
        """Returns the slice of one vector that starts at the group's first row."""
        return pl.ds(group * self.rows_per_group, self.num_lanes)


def _strided_rows(
    lines: Ref, first: Int[Array, ""], chunk: int, dim: int, row_stride: int
) -> Ref:
    """Returns the places in lines for a chunk of rows, from row `first` on.

    See `row_stride` of `read_rows`.
    """
    if row_stride == 1:
        return lines.reshape(lines.size // dim, dim).at[pl.ds(first, chunk)]
    rows_per_line = 128 // dim
    by_place = lines.reshape(lines.shape[0], rows_per_line, dim)
    block, line = jnp.divmod(first, row_stride)
    line += block // rows_per_line * row_stride
    return by_place.at[pl.ds(pl.multiple_of(line, chunk), chunk), block % rows_per_line]


def _indexed_rows(tables: Sequence[Ref], ids: list[Ref]) -> list[Ref]:
    """Returns the rows that ids name in each table: for each window one copy."""
    return [table.at[window] for table in tables for window in ids]


def _buffered_rows(buffers: Sequence[Ref], ids: list[Ref], dim: int) -> list[Ref]:
    """Returns the places of the same rows in the buffer of each table."""
    by_row = [buffer.reshape(buffer.size // dim, dim) for buffer in buffers]
    return [window for rows in by_row for window in _windows(rows, ids)]


def _windows(rows: Ref, ids: list[Ref], first: Any = 0) -> list[Ref]:
    """Cuts rows or ids, from `first` on, into windows as long as the id buffers."""
    starts = [first + number * window.size for number, window in enumerate(ids)]
    return [
        rows.at[pl.ds(pl.multiple_of(start, window.size), window.size)]
        for start, window in zip(starts, ids, strict=True)
    ]


def _pick_lanes(vector: Array, lanes: Int[Array, " lanes"]) -> Array:
    """Returns `vector[lanes]`; all lanes are in bounds."""
    return jnp.take_along_axis(vector, lanes, axis=0, mode="promise_in_bounds")
