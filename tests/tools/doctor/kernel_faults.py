"""Faults that tests plant into kernels, to show that the doctor finds them.

Every kernel is launched by one function. `planted` replaces it, so all cases that run
the kernel of one direction get the fault, and no others.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tpu_embedding.kernel_verdicts import Direction
from tpu_embedding.rows.kernels import row_kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of a kernel.

    Attributes:
      direction: the direction that the kernel serves.
      dim: elements of a row, or of a part of a wide row.
      row_ids: row ids of an update, `[ids]`; anything for other directions.
      old: the arrays before the update.
    """

    direction: Direction
    dim: int
    row_ids: Array
    old: tuple[Array, ...]


@contextlib.contextmanager
def planted(name: str, direction: Direction):
    """Plants a fault into all kernels of a direction that are traced within.

    Args:
      name: key of `CHANGES`, "bf16", or "off_by_one_subcore".
      direction: the direction whose kernel has the fault.
    """
    launch = row_kernels.launch
    jax.clear_caches()

    def run(body: Any, updated: Any, operands: Any, *args: Any, **options: Any) -> Any:
        this = Launch(
            direction=_direction(options["name"], body.keywords),
            dim=body.keywords["dim"],
            row_ids=operands[0],
            old=updated,
        )
        if this.direction != direction:
            return launch(body, updated, operands, *args, **options)
        if name == "off_by_one_subcore":
            body = _shifted(body)
        if name == "bf16" and direction in ("update", "write"):
            row_ids, gradient, *scalars = operands
            operands = (row_ids, *_round(this, [gradient]), *scalars)
            return launch(body, updated, operands, *args, **options)
        results = launch(body, updated, operands, *args, **options)
        if name not in CHANGES:
            return results
        arrays = [x for x in results if x.ndim == 2]
        changed = iter(CHANGES[name](this, arrays))
        return tuple(next(changed) if x.ndim == 2 else x for x in results)

    row_kernels.launch = run
    try:
        yield
    finally:
        row_kernels.launch = launch
        jax.clear_caches()


def _direction(name: str, sizes: dict[str, Any]) -> Direction:
    """Returns the direction that a kernel serves, by its name and sizes."""
    if name == "read_rows":
        is_pool = sizes["row_stride"] != 1 or max(sizes["valences"]) > 1
        return "pool" if is_pool else "read"
    directions: dict[str, Direction] = {
        "write_rows": "spread",
        "update_rows": "update",
        "add_rows": "write",
    }
    return directions[name]


def _shifted(body: Callable[..., None]) -> Callable[..., None]:
    """Gives each worker the chunks of the one before; the first keeps its own."""

    def run(worker: Any, *refs: Any) -> None:
        number = jnp.maximum(worker.number - 1, 0)
        body(dataclasses.replace(worker, number=number), *refs)

    return run


def _swap_rows(launch: Launch, arrays: list[Array]) -> list[Array]:
    def swap(array: Array) -> Array:
        rows = array.reshape(-1, launch.dim)
        return rows.at[:2].set(rows[:2][::-1]).reshape(array.shape)

    return list(map(swap, arrays))


def _clear(launch: Launch, arrays: list[Array]) -> list[Array]:
    del launch
    return list(map(jnp.zeros_like, arrays))


def _lose_update(launch: Launch, arrays: list[Array]) -> list[Array]:
    """Gives a row its old value, where two updated rows share a line."""
    ids = launch.row_ids
    lines = ids // (128 // launch.dim)
    place = jnp.argmax(lines == jnp.roll(lines, 1))

    def undo(new: Array, old: Array) -> Array:
        rows, old_rows = (x.reshape(-1, launch.dim) for x in (new, old))
        return rows.at[ids[place]].set(old_rows[ids[place]]).reshape(new.shape)

    return list(map(undo, arrays, launch.old))


def _round(launch: Launch, arrays: list[Array]) -> list[Array]:
    del launch
    return [jax.lax.reduce_precision(x, 8, 7) for x in arrays]


def _change_untouched(launch: Launch, arrays: list[Array]) -> list[Array]:
    """Adds a little to the first row that is not updated."""

    def change(array: Array) -> Array:
        rows = array.reshape(-1, launch.dim)
        is_touched = jnp.zeros(rows.shape[0], bool).at[launch.row_ids].set(True)
        row = jnp.argmin(is_touched)
        return rows.at[row].add(np.float32(2**-18)).reshape(array.shape)

    return list(map(change, arrays))


def _delay(launch: Launch, arrays: list[Array]) -> list[Array]:
    """Computes for some time first."""
    del launch
    first, *others = arrays
    start = jnp.full((2**16,), first[0, 0])
    waste = jax.lax.fori_loop(0, 4000, lambda _, x: x * 0.5, start)
    return [first + 0 * waste[0], *others]


CHANGES: dict[str, Callable[[Launch, list[Array]], list[Array]]] = {
    "wrong_row": _swap_rows,
    "zero_rows": _clear,
    "lost_update": _lose_update,
    "bf16": _round,
    "untouched_row_changed": _change_untouched,
    "slower": _delay,
}
