"""Kernels that read rows, add to them and update them.

XLA moves whole lines of 128 lanes: to read a row of 8, it reads, writes and reads again
16 times as much. And what it gathers, computes with and scatters is written to memory
and read again each time. A SparseCore can address each row for itself, whether several
share a line or one fills some, compute with it and write it back.

A line of 128 float32 lanes lies in memory as its rows do, one after the other, so a
kernel takes `[lines, 128]` as `[rows, dim]` as it stands. Wider lines lie in tiles of
eight, each cut into parts of 128 lanes: a kernel moves these parts (`_parts_of`).

What a subcore does is in `_read`, `_write` and `_update`. Pallas' interpreter runs it
on any device (`subcores.py`), which is how tests compare it with NumPy and with XLA's
own gather and scatter.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jaxtyping import Array, Float, Int

from tpu_embedding.hardware import DMA_GRANULE_BYTES, GIBIBYTE
from tpu_embedding.layout.subcores import (
    Ref,
    Runner,
    Worker,
    copy_all,
    for_each_chunk,
    lanes_of,
    launch,
)

FEWEST_IDS: Final = 8
"""Numbers of ids are multiples of it, for ids are moved 32 bytes at a time."""

NOWHERE: Final = -1
"""Place of a row that `write_rows` leaves out."""

_LEAVES_WHOLE: Final = None
"""In place of a semaphore, which what leaves a SparseCore in one piece needs not."""

_MOST_IDS: Final = 128
"""Ids that one copy may name."""

_MOST_BYTES: Final = 16 * GIBIBYTE
"""Of an array that a SparseCore addresses."""

_CHUNK_BYTES: Final = 64 * 1024
"""Rows that a subcore has in hand at once; it has at least 256 KiB of memory."""

_UPDATE_BYTES: Final = 192 * 1024
"""The same of table, slots and gradient together."""

MOST_ARRAYS: Final = 16
"""Arrays that are updated at once, so that there is room for some rows of each."""

TILE_LINES: Final = 8
"""Lines of a tile, of which wide lines fill some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowRule:
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


_ADD: Final = RowRule(run=lambda sums, addition, row: [row + addition])


def kernels_reach(num_rows: int, dim: int, line_lanes: int | None) -> bool:
    """Whether they do, float32 `[num_rows, dim]` in lines of so many lanes.

    Rows must fill lines, and be as long as what SparseCores address at least, 32 bytes
    (`dma_granule_size_bytes` in JAX's `jax/_src/tpu_info.py`), so that no write touches
    a neighbour. An array of more than 16 GiB, spare rows and all, XLA refuses.
    """
    fill_lines = dim in (8, 16, 32, 64) or dim % 128 == 0
    num_bytes = 4 * (num_rows + TILE_LINES) * dim
    return line_lanes == 128 and fill_lines and num_bytes <= _MOST_BYTES


def read_rows(
    lines: Float[Array, "lines lanes"],
    row_ids: Int[Array, " ids"],
    dim: int,
    runner: Runner,
    *,
    sizes: Sequence[int] | None = None,
    valences: Sequence[int] | None = None,
    distance: int = 1,
) -> list[Float[Array, "_ lanes"]]:
    """Reads rows, or sums of rows, into lines of one or more arrays. Per shard.

    Args:
      lines: float32; rows of `dim` lie side by side in them, or fill one each, and then
        the number of lines is a multiple of 8 if `dim` is more than 128.
      row_ids: int32, a multiple of 8 of them, which fill lines; all must be there.
      dim: elements of a row, one of 8, 16, 32, 64 or a multiple of 128.
      runner: what runs the kernel.
      sizes: rows of each array, as many as fill lines, a multiple of 8; their ids lie
        array after array. None: there is one array.
      valences: how many ids each row of an array is the sum of: first come the first
        ids of all of its rows, then the second ones, and so on. None: one each.
      distance: what the rows of a line are apart. 1: rows lie in the order of their
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
    chunk = _chunk_size(math.gcd(*sizes) if distance == 1 else distance, dim)
    num_lanes = lanes_of(runner)
    buffer = pltpu.VMEM((chunk * dim // num_lanes, num_lanes), lines.dtype)
    results = launch(
        functools.partial(_read, valences=valences, dim=dim, distance=distance),
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
        runner=runner,
        name="read_rows",
    )
    return [_lines_of(parts, lanes) for parts in results]


def write_rows(
    sources: Sequence[Float[Array, "_ lanes"]],
    repetitions: Sequence[int],
    places: Sequence[Int[Array, " ids"]],
    sizes: Sequence[int],
    dim: int,
    runner: Runner,
) -> list[Float[Array, "_ lanes"]]:
    """Writes rows to their places in one or more new arrays. Per shard.

    It is the way back of `read_rows` with `distance` the lines of each source: ids are
    those of one source after the other, which are the rows at the first place of its
    lines, then those at their second place, and so on; all that as often as it is
    repeated.

    Args:
      sources: float32 lines, each array a multiple of 8.
      repetitions: how often the rows of each source are written.
      places: for each new array: int32, the row that takes the row of each id, or
        `NOWHERE`; no two ids the same.
      sizes: rows of each new array, a multiple of 8, which fill lines.
      dim: as in `read_rows`.
      runner: what runs the kernel.

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
        functools.partial(_write, repetitions=repetitions, dim=dim),
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
        runner=runner,
        name="write_rows",
    )
    return [_lines_of(parts, lanes) for parts in results]


def add_rows(
    lines: Float[Array, "lines lanes"],
    row_ids: Int[Array, " ids"],
    additions: Float[Array, "_ lanes"],
    dim: int,
    runner: Runner,
) -> Float[Array, "lines lanes"]:
    """Adds to rows, in place where the caller donated. Per shard.

    Args:
      lines: as in `read_rows`.
      row_ids: int32, a multiple of 8 of them, which fill lines. All must be there,
        and each is named once, but for rows whose values nobody uses.
      additions: the values to add, packed in the order of the ids.
      dim: as in `read_rows`.
      runner: what runs the kernel.
    """
    (changed,), _ = update_rows(
        _ADD, [lines], row_ids, additions, dim, [], runner, name="add_rows"
    )
    return changed


def holds_whole_rows(dim: int, num_arrays: int, num_values: int) -> bool:
    """Whether a subcore has room for rows of so many arrays, tile by tile."""
    return _most_ids(dim, 1 + num_arrays, num_values) >= TILE_LINES


def update_rows(
    rule: RowRule,
    arrays: Sequence[Float[Array, "lines lanes"]],
    row_ids: Int[Array, " ids"],
    gradients: Float[Array, "_ lanes"],
    dim: int,
    numbers: Sequence[Float[Array, ""]],
    runner: Runner,
    *,
    values: Sequence[Float[Array, " ids"]] = (),
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
      numbers: float32 scalars.
      runner: what runs the kernel.
      values: float32, of the row of each id.
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
    parts_together = num_parts if values or rule.num_sums else 1
    chunk = parts_together * _chunk_size(
        num_ids // parts_together, dim * parts_together, 1 + len(arrays), len(values)
    )
    assert chunk % (parts_together * TILE_LINES) == 0
    num_lanes = lanes_of(runner)
    buffer = pltpu.VMEM((chunk * dim // num_lanes, num_lanes), jnp.float32)
    # Vectors are read from it that begin at any row.
    of_values = pltpu.VMEM((chunk // num_parts + num_lanes,), jnp.float32)
    # A kernel has no scalars of its own; there is always one number, perhaps unused.
    repeated = jnp.repeat(jnp.stack([*numbers, jnp.float32(0)]), num_lanes)
    results = launch(
        functools.partial(
            _update, rule=rule, dim=dim, num_arrays=len(arrays), num_parts=num_parts
        ),
        tuple(_parts_of(lines) for lines in arrays),
        (row_ids, _parts_of(gradients), repeated, *values),
        [jax.ShapeDtypeStruct((num_rows,), jnp.float32)] * len(values),
        scratch=[
            _ids_of_chunk(chunk),
            buffer,
            [buffer] * len(arrays),
            [of_values] * len(values),
            pltpu.VMEM(repeated.shape, jnp.float32),
            pltpu.SemaphoreType.DMA,
        ],
        num_bytes=num_ids * (4 + 4 * dim + 2 * len(arrays) * _bytes_of_row(dim))
        + 2 * 4 * num_rows * len(values),
        runner=runner,
        name=name,
    )
    changed, new_values = results[: len(arrays)], results[len(arrays) :]
    return [_lines_of(parts, lanes) for parts in changed], list(new_values)


def _read(
    worker: Worker,
    *refs: Any,
    valences: Sequence[int],
    dim: int,
    distance: int,
) -> None:
    """What a worker does. Arrays lie in the device's memory, buffers in its own.

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
        if distance > 1:
            apart = result.reshape(result.shape[0], places, dim)
            turn, line = jnp.divmod(first, distance)
            line += turn // places * distance
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


def _write(worker: Worker, *refs: Any, repetitions: Sequence[int], dim: int) -> None:
    """What a worker does. Arrays lie in the device's memory, buffers in its own.

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
    if worker.runner == "sparse_core":
        somewhere = plsc.Indices(ids, ignored_value=NOWHERE)
        pltpu.async_copy(rows, table.at[somewhere], arrived).wait()
        return

    # Pallas' interpreter does not know of ids that are ignored.
    @pl.loop(0, ids.size)
    def _(i):
        @pl.when(ids[i] != NOWHERE)
        def _():
            row, place = rows.at[pl.ds(i, 1)], table.at[pl.ds(ids[i], 1)]
            pltpu.async_copy(row, place, arrived).wait()


def _update(
    worker: Worker,
    *refs: Any,
    rule: RowRule,
    dim: int,
    num_arrays: int,
    num_parts: int,
) -> None:
    """What a worker does. Arrays lie in the device's memory, buffers in its own.

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

    def move(first):
        copy_all(
            [*_windows(row_ids, ids, first), gradients.at[pl.ds(first, chunk)]],
            [*ids, gradient.reshape(chunk, dim)],
            arrived,
        )
        of_chunk = pl.ds(pl.multiple_of(first // num_parts, TILE_LINES), rows_in_chunk)
        away = [row for table in tables for row in _named_rows(table, ids)]
        at_hand = [
            row for buffer in rows for row in _windows(buffer.reshape(chunk, dim), ids)
        ]
        copy_all(
            [*away, *(value.at[of_chunk] for value in old_values)],
            [*at_hand, *values_at_hand],
            arrived,
        )
        constants = [
            numbers[pl.ds(i * num_lanes, num_lanes)] for i in range(num_numbers)
        ]

        def run(sums, i, of_rows):
            at_vector = [gradient[i], *(buffer[i] for buffer in rows)]
            return rule.run(sums, *at_vector, *of_rows, *constants)

        def write(i, new):
            for buffer, vector in zip(rows, new, strict=True):
                buffer[i] = vector

        def update_together(group):
            """Updates the rows of one vector, or the vectors of one row."""
            of_rows = [vectors.read(value, group) for value in values]
            sums = []
            for _ in range(rule.num_sums):
                summands = functools.partial(run, list(sums), of_rows=of_rows)
                sums.append(vectors.sum_of(summands, group))

            def update(i, of_rows):
                new = run(sums, i, of_rows)
                write(i, new[: len(rows)])
                return new[len(rows) :]

            # What is made of a row's values is the same in each vector.
            new = vectors.for_each(
                group, lambda i, _: tuple(update(i, of_rows)), tuple(of_rows)
            )
            for value, vector in zip(values, new, strict=True):
                vectors.write(value, group, vector)

        if values or rule.num_sums:
            pl.loop(0, rows_in_chunk // vectors.rows_together)(update_together)
        else:
            pl.loop(0, num_vectors)(lambda i: write(i, run([], i, [])))

        # JAX awaits that these are read, no more; the end of the kernel, that they are
        # written. Nobody reads these rows before: each is named once.
        for of_rows, new in zip(values_at_hand, new_values, strict=True):
            pltpu.async_copy(of_rows, new.at[of_chunk], _LEAVES_WHOLE).wait()
        copy_all(at_hand, away, arrived)

    for_each_chunk(worker, row_ids.size, chunk, move)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _VectorsOfRows:
    """Where the elements of rows are, among the vectors of a chunk.

    Rows come in groups: those of one vector, or one row of several vectors.

    Attributes:
      num_lanes: elements of a vector.
      dim: elements of a part of a row.
      num_parts: of a row; parts of a tile's rows lie as in `_parts_of`.
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


def _check_ids(num_ids: int, dim: int) -> None:
    if num_ids % FEWEST_IDS:
        raise ValueError(
            f"The number of ids must be a multiple of {FEWEST_IDS}, got {num_ids}."
        )
    if num_ids * dim % 128:
        raise ValueError(
            f"The number of ids must be a multiple of {128 // dim}, which fill lines, "
            f"got {num_ids}."
        )


def _chunk_size(
    num_ids: int, dim: int, num_buffers: int = 1, num_values: int = 0
) -> int:
    """Returns ids that a worker takes at once: a power of two that divides all."""
    return math.gcd(num_ids, _most_ids(dim, num_buffers, num_values))


def _most_ids(dim: int, num_buffers: int, num_values: int = 0) -> int:
    """Returns ids whose rows and values a worker has room for: a power of two, or 0."""
    of_rows = _CHUNK_BYTES // (4 * dim)
    of_all = _UPDATE_BYTES // (4 * (num_buffers * dim + num_values))
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
    return jnp.where(row_ids == NOWHERE, NOWHERE, ids).reshape(-1)


def _ids_of_chunk(chunk: int) -> list[Any]:
    """Returns places for the ids of a chunk, in windows of what one copy may name."""
    window = math.gcd(chunk, _MOST_IDS)
    return [pltpu.VMEM((window,), jnp.int32)] * (chunk // window)


def _bytes_of_row(dim: int) -> int:
    """Returns bytes that memory moves for a row that lies anywhere."""
    return max(4 * dim, DMA_GRANULE_BYTES)
