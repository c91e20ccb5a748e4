"""Faults that tests plant into kernels, to show that the doctor finds them.

Every kernel is launched by one function. `planted` replaces it, so all cases that run
the kernel of one direction get the fault, and no others.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tpu_embedding.kernel_verdicts import Direction
from tpu_embedding.rows.kernels import row_kernels

FaultName = Literal[
    "wrong_row",
    "zero_rows",
    "off_by_one_subcore",
    "lost_update",
    "bf16",
    "untouched_row_changed",
    "hang",
    "crash",
    "slower",
]

_UPDATES: Final = ("update", "write")
_OF_UPDATES: Final = ("lost_update", "untouched_row_changed")
_DELAY_TURNS: Final = 4000
_DELAY_SIZE: Final = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault in the kernel of one direction.

    Attributes:
      name: of the fault.
      direction: whose kernel has it.
    """

    name: FaultName
    direction: Direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launch:
    """A launch of a kernel.

    Attributes:
      direction: that the kernel serves.
      dim: elements of a row, or of a part of a wide row.
      row_ids: of an update, `[ids]`; of others, anything.
      old: the arrays before the update.
    """

    direction: Direction
    dim: int
    row_ids: Array
    old: tuple[Array, ...]


def parse_fault(text: str) -> Fault:
    """Returns the fault of a text such as "wrong_row:pool".

    Raises:
      ValueError: if the name or the direction is unknown, or they do not fit.

    Example:
      >>> parse_fault("wrong_row:pool")
      Fault(name='wrong_row', direction='pool')
    """
    name, _, direction = text.partition(":")
    if name not in get_args(FaultName) or direction not in get_args(Direction):
        raise ValueError(
            f"a fault must be NAME:DIRECTION with a name of {get_args(FaultName)} and "
            f"a direction of {get_args(Direction)}, got {text!r}."
        )
    if name in _OF_UPDATES and direction not in _UPDATES:
        raise ValueError(f"{name} must be a fault of update or write, got {text!r}.")
    return Fault(name=name, direction=direction)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def planted(fault: Fault | None) -> Iterator[None]:
    """Plants a fault into all kernels of its direction that are traced within.

    Args:
      fault: to plant; None: nothing changes.
    """
    if fault is None:
        yield
        return
    launch = row_kernels.launch
    jax.clear_caches()
    row_kernels.launch = _faulty(launch, fault)
    try:
        yield
    finally:
        row_kernels.launch = launch
        jax.clear_caches()


def _faulty(launch: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    """Returns a launch whose kernels of the fault's direction have the fault."""

    def run(body: Any, updated: Any, operands: Any, *args: Any, **options: Any) -> Any:
        this = _Launch(
            direction=_direction(options["name"], body.keywords),
            dim=body.keywords["dim"],
            row_ids=operands[0],
            old=updated,
        )
        if this.direction != fault.direction:
            return launch(body, updated, operands, *args, **options)
        if fault.name == "crash":
            os.abort()
        if fault.name == "off_by_one_subcore":
            body = _shifted(body)
        if fault.name == "bf16" and this.direction in _UPDATES:
            row_ids, gradient, *scalars = operands
            operands = (row_ids, *_round(this, [gradient]), *scalars)
            return launch(body, updated, operands, *args, **options)
        results = launch(body, updated, operands, *args, **options)
        change = _CHANGES.get(fault.name)
        if change is None:
            return results
        arrays = [x for x in results if x.ndim == 2]
        changed = iter(change(this, arrays))
        return tuple(next(changed) if x.ndim == 2 else x for x in results)

    return run


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


def _swap_rows(launch: _Launch, arrays: list[Array]) -> list[Array]:
    def swap(array: Array) -> Array:
        rows = array.reshape(-1, launch.dim)
        return rows.at[:2].set(rows[:2][::-1]).reshape(array.shape)

    return list(map(swap, arrays))


def _clear(launch: _Launch, arrays: list[Array]) -> list[Array]:
    del launch
    return list(map(jnp.zeros_like, arrays))


def _lose_update(launch: _Launch, arrays: list[Array]) -> list[Array]:
    """Gives a row its old value, where two updated rows share a line."""
    ids = launch.row_ids
    lines = ids // (128 // launch.dim)
    place = jnp.argmax(lines == jnp.roll(lines, 1))

    def undo(new: Array, old: Array) -> Array:
        rows, old_rows = (x.reshape(-1, launch.dim) for x in (new, old))
        return rows.at[ids[place]].set(old_rows[ids[place]]).reshape(new.shape)

    return list(map(undo, arrays, launch.old))


def _round(launch: _Launch, arrays: list[Array]) -> list[Array]:
    del launch
    return [jax.lax.reduce_precision(x, 8, 7) for x in arrays]


def _change_untouched(launch: _Launch, arrays: list[Array]) -> list[Array]:
    """Adds a little to the first row that is not updated."""

    def change(array: Array) -> Array:
        rows = array.reshape(-1, launch.dim)
        is_touched = jnp.zeros(rows.shape[0], bool).at[launch.row_ids].set(True)
        row = jnp.argmin(is_touched)
        return rows.at[row].add(np.float32(2**-18)).reshape(array.shape)

    return list(map(change, arrays))


def _hang(launch: _Launch, arrays: list[Array]) -> list[Array]:
    """Runs a loop on the device that never ends: no even number is -1."""
    del launch
    first, *others = arrays
    start = first[0, 0].astype(jnp.int32) * 2
    # The results depend on the loop, or XLA removes it.
    count = jax.lax.while_loop(
        lambda count: count != -1, lambda count: count + 2, start
    )
    return [first + 0 * count.astype(first.dtype), *others]


def _delay(launch: _Launch, arrays: list[Array]) -> list[Array]:
    """Computes for some time first."""
    del launch
    first, *others = arrays
    start = jnp.full((_DELAY_SIZE,), first[0, 0])
    waste = jax.lax.fori_loop(0, _DELAY_TURNS, lambda _, x: x * 0.5, start)
    return [first + 0 * waste[0], *others]


_CHANGES: Final[dict[str, Callable[[_Launch, list[Array]], list[Array]]]] = {
    "wrong_row": _swap_rows,
    "zero_rows": _clear,
    "lost_update": _lose_update,
    "bf16": _round,
    "untouched_row_changed": _change_untouched,
    "hang": _hang,
    "slower": _delay,
}
