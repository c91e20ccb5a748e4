"""What a subcore does to rows: reads, writes and updates some of them at a time.

Arrays lie in the device's memory, and a worker takes *chunks* of ids in turns with the
others (`backend.py`): what belongs to a chunk comes into buffers of its own memory,
and leaves from there. `row_kernels.py` says what arrays and buffers there are.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jaxtyping import Array, Int

from tpu_embedding.rows.kernels.backend import Ref, Worker, copy_all, for_each_chunk

DROPPED_ROW: Final = -1
"""Place of a row that `write_rows` leaves out."""

TILE_LINES: Final = 8
"""Lines of a tile, of which wide lines fill some."""

_LEAVES_WHOLE: Final = None
"""In place of a semaphore, which what leaves a SparseCore in one piece needs not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelBody:
    """What `update_rows` does to each row, a vector at a time.

    Attributes:
      run: given a list of sums, and vectors: of the gradient, of the row of each array,
        of each value of the row and of each number, both repeated. It returns the
        vector whose elements the next sum over the row is of; if no sum is missing,
        the new vectors of the row of each array, and of each value. By operations that
        `kernel_rules.py` knows.
      num_sums: over the elements of a row, that it takes.
    """

    run: Callable[..., Any]
    num_sums: int = 0


def read_chunks(
    worker: Worker,
    *refs: Any,
    valences: Sequence[int],
    dim: int,
    row_stride: int,
) -> None:
    """Reads rows that ids name, as `read_rows` does.

    Ids of a chunk of results come in, the rows that they name, are summed if there are
    several for a result, and go out together.
    """
    lines, row_ids, *results, ids, rows, sums, arrived = refs
    table = lines.reshape(lines.size // dim, dim)
    num_vectors, num_lanes = rows.shape
    chunk = num_vectors * num_lanes // dim
    places = 128 // dim
    sizes = [result.size // dim for result in results]
    starts = _starts(sizes)
    id_starts = _starts(map(operator.mul, sizes, valences))
    is_pooled = any(valence > 1 for valence in valences)
    result_rows = (sums if is_pooled else rows).reshape(chunk, dim)

    def fetch(first):
        copy_all(_windows(row_ids, ids, first), ids, arrived)
        of_ids = _windows(rows.reshape(chunk, dim), ids)
        copy_all(_named_rows(table, ids), of_ids, arrived)

    def pool(first, size, valence):
        @pl.loop(0, valence)
        def _(turn):
            fetch(pl.multiple_of(first + turn * size, chunk))

            @pl.loop(0, num_vectors)
            def _(i):
                sums[i] = jnp.where(turn == 0, rows[i], sums[i] + rows[i])

    def send(result, first):
        target = result.reshape(result.size // dim, dim).at[pl.ds(first, chunk)]
        if row_stride > 1:
            apart = result.reshape(result.shape[0], places, dim)
            turn, line = jnp.divmod(first, row_stride)
            line += turn // places * row_stride
            target = apart.at[pl.ds(pl.multiple_of(line, chunk), chunk), turn % places]
        pltpu.async_copy(result_rows, target, _LEAVES_WHOLE).wait()

    def move(first):
        if is_pooled:
            start, size, first_id, valence = _pick(
                first, starts, sizes, id_starts, valences
            )
            pool(first_id + first - start, size, valence)
        else:
            fetch(first)
        for result, start, end in zip(results, starts, starts[1:], strict=False):
            pl.when((start <= first) & (first < end))(
                functools.partial(send, result, pl.multiple_of(first - start, chunk))
            )

    for_each_chunk(worker, starts[-1], chunk, move)


def write_chunks(
    worker: Worker, *refs: Any, repetitions: Sequence[int], dim: int
) -> None:
    """Writes rows to their places, as `write_rows` does.

    A chunk of rows of a source comes in, and where each belongs, as often as they are
    repeated; they go there.
    """
    num_sources = len(repetitions)
    *arrays, ids_of_results, rows, arrived = refs
    num_results = len(ids_of_results)
    sources = arrays[:num_sources]
    places, results = arrays[num_sources:-num_results], arrays[-num_results:]
    chunk = rows.shape[0]
    of_line = 128 // dim
    sizes = [source.size // dim for source in sources]
    starts = _starts(sizes)
    id_starts = _starts(map(operator.mul, sizes, repetitions))

    def fetch(source, first):
        place, line = jnp.divmod(first, source.shape[0])
        lines = pl.ds(pl.multiple_of(line, chunk), chunk)
        apart = source.reshape(source.shape[0], of_line, dim)
        copy_all(
            [source.at[lines] if dim == 128 else apart.at[lines, place]],
            [rows],
            arrived,
        )

    def move(first):
        for source, start, end in zip(sources, starts, starts[1:], strict=False):
            pl.when((start <= first) & (first < end))(
                functools.partial(fetch, source, first - start)
            )
        start, size, first_id, count = _pick(
            first, starts, sizes, id_starts, repetitions
        )

        @pl.loop(0, count)
        def _(turn):
            ids_from = pl.multiple_of(first_id + first - start + turn * size, chunk)
            for result, of_result, ids in zip(
                results, places, ids_of_results, strict=True
            ):
                copy_all(_windows(of_result, ids, ids_from), ids, arrived)
                table = result.reshape(result.size // dim, dim)
                for window, part in zip(ids, _windows(rows, ids), strict=True):
                    _write_somewhere(worker, part, table, window, arrived)

    for_each_chunk(worker, starts[-1], chunk, move)


def _write_somewhere(
    worker: Worker, rows: Ref, table: Ref, ids: Ref, arrived: Ref
) -> None:
    """Writes rows that belong into a table, and none of those that belong nowhere."""
    if worker.backend == "sparse_core":
        somewhere = plsc.Indices(ids, ignored_value=DROPPED_ROW)
        pltpu.async_copy(rows, table.at[somewhere], arrived).wait()
        return

    # Pallas' interpreter does not know of ids that are ignored.
    @pl.loop(0, ids.size)
    def _(i):
        @pl.when(ids[i] != DROPPED_ROW)
        def _():
            row, place = rows.at[pl.ds(i, 1)], table.at[pl.ds(ids[i], 1)]
            pltpu.async_copy(row, place, arrived).wait()


def update_chunks(
    worker: Worker,
    *refs: Any,
    rule: KernelBody,
    dim: int,
    num_arrays: int,
    num_parts: int,
) -> None:
    """Replaces rows by what a rule makes of them, as `update_rows` does.

    A chunk of ids comes in, their gradients, and each of the rows that they name; what
    the rule makes of them goes out to each of the rows.
    """
    *in_memory, ids, gradient, rows, values, numbers, arrived = refs
    arrays, (row_ids, gradients, repeated, *of_ids) = (
        in_memory[:num_arrays],
        in_memory[num_arrays:],
    )
    old_values, new_values = of_ids[: len(values)], of_ids[len(values) :]
    tables = [array.reshape(array.size // dim, dim) for array in arrays]
    gradients = gradients.reshape(row_ids.size, dim)
    num_vectors, num_lanes = gradient.shape
    chunk = num_vectors * num_lanes // dim
    rows_in_chunk = chunk // num_parts
    copy_all([repeated], [numbers], arrived)
    num_numbers = numbers.shape[0] // num_lanes - 1
    vectors = _VectorsOfRows(num_lanes=num_lanes, dim=dim, num_parts=num_parts)
    values_at_hand = [value.at[pl.ds(0, rows_in_chunk)] for value in values]

    def of_chunk(value, first):
        first_row = pl.multiple_of(first // num_parts, TILE_LINES)
        return value.at[pl.ds(first_row, rows_in_chunk)]

    def move(first):
        copy_all(
            [*_windows(row_ids, ids, first), gradients.at[pl.ds(first, chunk)]],
            [*ids, gradient.reshape(chunk, dim)],
            arrived,
        )
        away = [row for table in tables for row in _named_rows(table, ids)]
        at_hand = [
            row for buffer in rows for row in _windows(buffer.reshape(chunk, dim), ids)
        ]
        copy_all(
            [*away, *(of_chunk(value, first) for value in old_values)],
            [*at_hand, *values_at_hand],
            arrived,
        )
        constants = [
            numbers[pl.ds(i * num_lanes, num_lanes)] for i in range(num_numbers)
        ]

        def run(sums, i, of_values):
            at_vector = [gradient[i], *(buffer[i] for buffer in rows)]
            return rule.run(sums, *at_vector, *of_values, *constants)

        def write(i, new):
            for buffer, vector in zip(rows, new, strict=True):
                buffer[i] = vector

        if values or rule.num_sums:
            update = functools.partial(
                _update_group, run, write, vectors, values, rule.num_sums
            )
            pl.loop(0, rows_in_chunk // vectors.rows_together)(update)
        else:
            pl.loop(0, num_vectors)(lambda i: write(i, run([], i, [])))

        # JAX awaits that these are read, no more; the end of the kernel, that they are
        # written. Nobody reads these rows before: each is named once.
        for value, new in zip(values_at_hand, new_values, strict=True):
            pltpu.async_copy(value, of_chunk(new, first), _LEAVES_WHOLE).wait()
        copy_all(at_hand, away, arrived)

    for_each_chunk(worker, row_ids.size, chunk, move)


def _update_group(
    run: Callable[..., Any],
    write: Callable[[Int[Array, ""], Sequence[Array]], None],
    vectors: "_VectorsOfRows",
    values: Sequence[Ref],
    num_sums: int,
    group: Int[Array, ""],
) -> None:
    """Updates the rows of one vector, or the vectors of one row.

    Args:
      run: the rule, given sums, a vector's number and the vectors of values.
      write: takes a vector's number, and its new rows.
      vectors: those of the chunk.
      values: of its rows.
      num_sums: that the rule takes.
      group: which of the groups of `vectors`.
    """
    of_values = [vectors.read(value, group) for value in values]
    sums: list[Array] = []
    for _ in range(num_sums):
        summands = functools.partial(run, list(sums), of_values=of_values)
        sums.append(vectors.sum_of(summands, group))

    def update(i, _):
        new = run(sums, i, of_values)
        num_arrays = len(new) - len(values)
        write(i, new[:num_arrays])
        return tuple(new[num_arrays:])

    # What is made of a row's values is the same in each vector.
    new_values = vectors.for_each(group, update, tuple(of_values))
    for value, vector in zip(values, new_values, strict=True):
        vectors.write(value, group, vector)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _VectorsOfRows:
    """Where the elements of rows are, among the vectors of a chunk.

    Rows come in groups: those of one vector, or one row of several vectors.

    Attributes:
      num_lanes: elements of a vector.
      dim: elements of a part of a row.
      num_parts: of a row; parts of a tile's rows lie as `row_kernels.py` says.
    """

    num_lanes: int
    dim: int
    num_parts: int

    @property
    def rows_together(self) -> int:
        """Rows of a group."""
        return max(1, self.num_lanes // self.dim)

    def for_each(
        self, group: Int[Array, ""], body: Callable[..., Any], carry: Any
    ) -> Any:
        """Calls `body` with each vector of a group and what it returned before."""
        of_part = max(1, self.dim // self.num_lanes)

        def vector_at(j):
            part, i = jnp.divmod(j, of_part)
            tile, line = jnp.divmod(group, TILE_LINES)
            part = (tile * self.num_parts + part) * TILE_LINES + line
            return part * of_part + i

        num_vectors = self.num_parts * of_part
        if num_vectors == 1:
            return body(group, carry)
        return jax.lax.fori_loop(
            0, num_vectors, lambda j, carry: body(vector_at(j), carry), carry
        )

    def sum_of(
        self, summands: Callable[[Int[Array, ""]], Array], group: Int[Array, ""]
    ) -> Array:
        """Sums over each row of a group, and gives all of its lanes the sum."""
        nothing = jnp.zeros(self.num_lanes, jnp.float32)
        total = self.for_each(group, lambda i, total: total + summands(i), nothing)
        distance = min(self.dim, self.num_lanes) // 2
        while distance > 0:
            total = total + _pick_lanes(total, self._lanes ^ distance)
            distance //= 2
        return total

    def read(self, values: Ref, group: Int[Array, ""]) -> Array:
        """Returns the value of each lane's row."""
        return _pick_lanes(values[self._of_group(group)], self._lanes // self.dim)

    def write(self, values: Ref, group: Int[Array, ""], vector: Array) -> None:
        """Sets the values of a group's rows, which their lanes have."""
        place = self._of_group(group)
        first_lanes = jnp.minimum(self._lanes * self.dim, self.num_lanes - 1)
        is_of_group = self._lanes < self.rows_together
        new = _pick_lanes(vector, first_lanes)
        values[place] = jnp.where(is_of_group, new, values[place])

    @property
    def _lanes(self) -> Int[Array, " lanes"]:
        return jax.lax.iota(jnp.int32, self.num_lanes)

    def _of_group(self, group: Int[Array, ""]) -> Any:
        return pl.ds(group * self.rows_together, self.num_lanes)


def _pick_lanes(vector: Array, lanes: Int[Array, " lanes"]) -> Array:
    return jnp.take_along_axis(vector, lanes, axis=0, mode="promise_in_bounds")


def _starts(sizes: Iterable[int]) -> list[int]:
    """Returns where each of some parts begins, and the end of the last."""
    return [0, *itertools.accumulate(sizes)]


def _pick(
    first: Int[Array, ""], starts: Sequence[int], *values: Sequence[int]
) -> list[Int[Array, ""]]:
    """Returns the start of the part that `first` lies in, and its values."""
    picked = [jnp.int32(of_parts[0]) for of_parts in (starts, *values)]
    for i in range(1, len(values[0])):
        is_there = first >= starts[i]
        picked = [
            jnp.where(is_there, of_parts[i], value)
            for of_parts, value in zip((starts, *values), picked, strict=True)
        ]
    return picked


def _named_rows(table: Ref, ids: list[Ref]) -> list[Ref]:
    return [table.at[window] for window in ids]


def _windows(rows: Ref, ids: list[Ref], first: Any = 0) -> list[Ref]:
    """Cuts what belongs to each window of a chunk out of rows, or ids."""
    starts = [first + number * window.size for number, window in enumerate(ids)]
    return [
        rows.at[pl.ds(pl.multiple_of(start, window.size), window.size)]
        for start, window in zip(starts, ids, strict=True)
    ]
