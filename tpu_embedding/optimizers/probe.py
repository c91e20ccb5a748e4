"""Runs a rule on a few rows, to find out how it treats them.

A table's gradient reaches its owner as `[rows, dim]` with the touched rows only, in
several pieces if ids are skewed. A rule is right on such pieces if it is row-local:
what it does to a row depends on that row of gradient, slot variables and table, and on
values that belong to no row.

The probe runs two steps on 260 rows, and again on some of these rows alone, in another
order: early and late in training, with small, large, missing and broken gradients.
Updates that differ mean that rows are mixed, and so do values that belong to no row. It
is evidence and no proof: a rule may mix rows where values are of a size that the probe
does not have.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import eval_context
from jax.sharding import AbstractMesh, use_abstract_mesh
from jaxtyping import Array

from tpu_embedding.optimizers.row_optimizer import (
    NotRowLocalError,
    RowOptimizer,
    row_optimizer_of,
)
from tpu_embedding.optimizers.slots import slot_row_shapes
from tpu_embedding.optimizers.table_rows import (
    TableRows,
    model_gradient_context,
    some_rows,
    table_rows_context,
)

LOOKAHEAD: Final = (
    "optax.lookahead, whose parameters are pairs of fast and slow ones, "
    "optax.LookaheadParams"
)

_NUM_ROWS: Final = 260
"""Above 128 rows `optax.adafactor` factors its moments."""

_BAD_ROW: Final = 1
"""The row of large values whose gradient is NaN in one step, and large in another."""

_PARTS: Final = (np.asarray([3, 0], np.int32), np.arange(138, 1, -1).astype(np.int32))
"""Rows that are given alone: two, and an odd number above 128. None is the bad one."""

_SMALL: Final = 1e-3
_LARGE: Final = 1e10
"""Sizes of gradients: most bounds lie between them."""

_ROW_SIZES: Final = (1e-2, 10.0)
"""Sizes of rows."""

_EMPTY_ROWS: Final = slice(200, None)
"""Rows without values and gradient, as padding has them. No part has one."""

_LATE: Final = 1000
"""Added to the counts of a rule, which may change with the step."""

_SLOT_VALUES: Final = (-6, 15)
"""Powers of ten between which slot variables lie while their changes are probed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedSlot:
    """A slot variable, as a run of its rule has shown it.

    Attributes:
      row: shape and dtype of one row of it, `(dim,)` or `()`.
      initial_value: value of all its elements before the first step; None if they
        differ.
      starts_from_rows: True if it starts from the values of the table.
      is_moved_by_adding: True if the new value is the old one, or at least half of it,
        plus something. Then the difference of both, added to the old value, gives the
        new one to the precision that the rule itself has. Another rule may forget the
        old value, and a difference would lose a small new one.
    """

    row: jax.ShapeDtypeStruct
    initial_value: float | None
    starts_from_rows: bool
    is_moved_by_adding: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedRule:
    """What a run of a rule has shown.

    Attributes:
      leaves: for each leaf of the state, the slot variable that it is, or None.
      takes_totals: True if the rule asks for totals over the rows of a table.
    """

    leaves: tuple[ProbedSlot | None, ...]
    takes_totals: bool

    @property
    def slots(self) -> tuple[ProbedSlot, ...]:
        """The slot variables."""
        return tuple(leaf for leaf in self.leaves if leaf is not None)


def probe_rule(
    rule: optax.GradientTransformation | RowOptimizer, dim: int
) -> ProbedRule:
    """Runs a rule on rows of a dim, once for each dim.

    Args:
      rule: a transformation of rows `[rows, dim]`.
      dim: columns of the table.

    Raises:
      NotRowLocalError: if the rule mixes rows, or cannot be run on an array of rows.
      ValueError: if its state is not one entry per row.
    """
    return _probe(row_optimizer_of(rule).transformation, dim)


@functools.lru_cache(maxsize=4096)
def _probe(rule: optax.GradientTransformation, dim: int) -> ProbedRule:
    rows = _slot_rows(rule, dim)
    asked: list[str] = []
    is_slot = [row is not None for row in rows]
    run = _compiled(functools.partial(_run_whole_and_parts, rule, is_slot, asked))
    move = _compiled(functools.partial(_slot_derivatives, rule, is_slot))
    with on_its_own():
        states = _check_row_local(run, dim)
        derivatives = jax.device_get(move(_random((2, 8, dim)), _slot_values(dim)))
    leaves = [
        None
        if row is None
        else ProbedSlot(
            row=row,
            initial_value=_one_value(values),
            starts_from_rows=not np.array_equal(values[0], values[len(values) // 2]),
            is_moved_by_adding=derivative is not None
            and bool(np.all((derivative >= 0.5) & (derivative <= 1.0 + 1e-6))),
        )
        for row, derivative, *values in zip(rows, derivatives, *states, strict=True)
    ]
    return ProbedRule(leaves=tuple(leaves), takes_totals=bool(asked))


class _Run(NamedTuple):
    """The leaves of the first and of the last state, and the updates of both steps."""

    first_state: list[Array]
    last_state: list[Array]
    updates: Array


def _run(
    rule: optax.GradientTransformation,
    gradients: Array,
    rows: Array,
    asked: list[str],
    later: Array | int = 0,
) -> _Run:
    """Takes two steps, after so many others.

    Args:
      rule: the rule.
      gradients: `[2, rows, dim]`.
      rows: `[rows, dim]`.
      asked: gets an item for each total that the rule asks for.
      later: is added to each count, an integer scalar of the state.
    """
    stored: list[Any] = []
    init = _in_layer(rule.init, rows.shape[0], asked)
    update = _in_layer(rule.update, rows.shape[0], asked, stored)
    state = init(rows)
    first_state, all_updates = jax.tree.leaves(state), []
    state = jax.tree.map(lambda leaf: _advanced(leaf, later), state)
    for gradient in gradients:
        updates, state = update(gradient, state, rows)
        all_updates.append(updates)
    if getattr(all_updates[-1], "shape", None) != rows.shape:
        raise TypeError(f"its update does not return one array of shape {rows.shape}")
    if stored and stored[-1] is not all_updates[-1]:
        raise NotRowLocalError(
            "adafactor must be the last of a chain, and not be wrapped by what changes "
            "its updates: it follows the scale of the table by them. Put clipping "
            "before it; learning rate and weight decay are its arguments."
        )
    return _Run(first_state, jax.tree.leaves(state), jnp.stack(all_updates))


def _advanced(leaf: Any, steps: Array | int) -> Any:
    """Returns a count after so many more steps; other leaves as they are."""
    is_count = getattr(leaf, "shape", None) == () and jnp.issubdtype(
        leaf.dtype, jnp.integer
    )
    return leaf + jnp.asarray(steps, leaf.dtype) if is_count else leaf


def _in_layer(
    function: Callable[..., Any],
    num_rows: int,
    asked: list[str],
    stored: list[Any] | None = None,
) -> Callable[..., Any]:
    """Returns a function of a rule as a layer calls it, with totals that say nothing.

    Args:
      function: `init` or `update`.
      num_rows: rows that the function is given.
      asked: gets an item for each total that the function asks for.
      stored: gets the updates that the function asks to see as the table stores them.
    """

    def call(*arguments: Any) -> Any:
        known = _rows_to_ask(num_rows, asked, [] if stored is None else stored)
        with (
            table_rows_context(known, inlines_jit=False),
            model_gradient_context(lambda: jnp.ones(())),
        ):
            return function(*arguments)

    return call


def _rows_to_ask(num_rows: int, asked: list[str], stored: list[Any]) -> TableRows:
    """Returns facts about rows, whose totals do not depend on them."""
    outside = jex.core.get_opaque_trace_state(convention="nnx")

    def all_reduce(totals: Array, reduction: str) -> Array:
        if jex.core.get_opaque_trace_state(convention="nnx") != outside:
            raise NotRowLocalError(
                "The optimizer asks for totals over the rows of a table within "
                "lax.cond or another wrapper that traces it, such as "
                "optax.apply_if_finite or MultiSteps. Put clipping of elements before "
                "it, or use every_row(rule, gradient_steps=...) and "
                "the rule's own options."
            )
        asked.append(reduction)
        return jnp.ones_like(totals)

    def stored_rows(rows: Array, updates: Array) -> Array:
        stored.append(updates)
        return rows + updates

    return dataclasses.replace(
        some_rows(num_rows),
        table_sizes=jnp.full((1,), 1000.0),
        all_reduce=all_reduce,
        occurrence_squares=jnp.ones((1,)),
        stored=stored_rows,
    )


def _slot_rows(
    rule: optax.GradientTransformation, dim: int
) -> list[jax.ShapeDtypeStruct | None]:
    """Returns one row of each leaf of the state that is a slot variable; else None.

    Raises:
      NotRowLocalError: if the rule cannot be run on an array of rows.
    """
    rows = jax.ShapeDtypeStruct((5, dim), jnp.float32)
    gradients = jax.ShapeDtypeStruct((2, 5, dim), jnp.float32)
    try:
        with on_its_own():
            jax.eval_shape(functools.partial(_run, rule, asked=[]), gradients, rows)
            tree = jax.tree.structure(jax.eval_shape(rule.init, rows))
    except NotRowLocalError:
        raise
    except Exception as error:  # The rule may be any function, and raise anything.
        reason = f"{type(error).__name__}: {error}"
        if "no attribute fast" in reason:
            reason = f"it is {LOOKAHEAD}; give the table its fast_optimizer alone."
        if "takes 0 positional arguments" in reason:
            reason += (
                ". A schedule is a function of the step, counted from 0; for a "
                "function without arguments, see te.nn.set_each_step"
            )
        raise NotRowLocalError(
            "The optimizer is not row-local: it cannot be applied to a single array "
            f"of shape [rows, {dim}] by update(gradient, state, rows), without the "
            f"loss or other arguments; {reason}"
        ) from error
    return tree.flatten_up_to(slot_row_shapes(rule, (dim,)))


def _run_whole_and_parts(
    rule: optax.GradientTransformation,
    is_slot: Sequence[bool],
    asked: list[str],
    gradients: Array,
    rows: Array,
    later: Array,
) -> list[_Run]:
    """Runs a rule on all rows, and on each of the parts.

    The last states are those of no row: slot variables are left out.
    """
    pieces = [(gradients, rows)]
    pieces += [(gradients[:, part], rows[part]) for part in _PARTS]
    runs = [_run(rule, *piece, asked, later) for piece in pieces]
    return [
        run._replace(
            last_state=[
                jax.random.key_data(leaf)
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                else leaf
                for leaf, of_rows in zip(run.last_state, is_slot, strict=True)
                if not of_rows
            ]
        )
        for run in runs
    ]


def _cases(dim: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yields gradients `[2, rows, dim]`, rows, and the steps before them."""
    random, (small_rows, large_rows) = _random((2, _NUM_ROWS, dim)), _ROW_SIZES
    rows = _random((_NUM_ROWS, dim), seed=1)
    rows[_BAD_ROW] *= 1e6
    small = np.float32(_SMALL) * random
    small[0, _BAD_ROW], small[1, _BAD_ROW] = np.nan, _LARGE
    yield small, np.float32(small_rows) * rows, 0
    yield np.float32(_LARGE) * random, np.float32(small_rows) * rows[::-1], 0
    some, large = random.copy(), np.float32(large_rows) * rows
    some[:, _EMPTY_ROWS], large[_EMPTY_ROWS] = 0, 0
    yield some, large, 0
    yield small[::-1], large, _LATE


def _check_row_local(run: Any, dim: int) -> list[list[Any]]:
    """Compares the updates of rows; returns the initial states of all runs."""
    states = []
    for gradients, rows, later in _cases(dim):
        try:
            whole, *parts = jax.device_get(run(gradients, rows, later))
        except (TypeError, ValueError) as error:
            # Shapes of a part that fit those of the state of another one.
            raise _mixes_rows() from error
        states += [x.first_state for x in (whole, *parts)]
        for part, of_part in zip(_PARTS, parts, strict=True):
            given = gradients[:, part], rows[part]
            if not _are_equal(of_part.updates, whole.updates[:, part], given):
                raise _mixes_rows()
            values = zip(of_part.last_state, whole.last_state, strict=True)
            if not all(np.array_equal(*pair, equal_nan=True) for pair in values):
                raise NotRowLocalError(
                    "The optimizer is not row-local: a value of its state that belongs "
                    "to no row depends on the rows of this step's ids, and each device "
                    "has others. Norms are such values, and the flags of "
                    "optax.zero_nans: write optax.stateless(lambda gradient, rows: "
                    "jnp.nan_to_num(gradient)) in its place. Or apply this optimizer "
                    "to the dense parameters only."
                )
    return states


def _mixes_rows() -> NotRowLocalError:
    return NotRowLocalError(
        "The optimizer is not row-local: it mixes rows of a table, but only the rows "
        "of this step's ids, spread over shards, are there. Global norms, means over "
        "rows, trust ratios, factored moments, noise and counts of finite values do "
        "this. Clip the gradients of the model before the step: "
        "te.gradients.clip_by_global_norm(gradients, 1.0). For factored moments there "
        "is te.optimizers.adafactor, for trust ratios te.optimizers.lamb, and for "
        "apply_if_finite te.gradients.update_if. Or apply this optimizer to the dense "
        "parameters only."
    )


def _are_equal(
    first: np.ndarray, second: np.ndarray, given: tuple[np.ndarray, np.ndarray]
) -> bool:
    """Compares updates `[2, rows, dim]` up to the rounding of each row.

    Args:
      first: updates.
      second: updates of the same rows.
      given: gradients and rows that they are made from.
    """
    updates = np.nan_to_num(np.abs(second), posinf=0).max(-1, keepdims=True)
    # A rule may subtract the old row from a new one, which rounds by 1e-7 of the row.
    rows = np.abs(given[1]).max(-1, keepdims=True)
    tolerance = 1e-5 * updates + 5e-7 * rows
    with np.errstate(invalid="ignore"):
        is_close = np.abs(first - second) <= tolerance
    is_same = (first == second) | (np.isnan(first) & np.isnan(second))
    return bool(np.all(is_close | is_same))


def _slot_derivatives(
    rule: optax.GradientTransformation,
    is_slot: Sequence[bool],
    gradients: Array,
    values: Array,
) -> list[Any]:
    """Returns d new / d old of each float slot variable; None for other leaves."""
    num_rows, dim = values.shape
    state, tree = jax.tree.flatten(_in_layer(rule.init, num_rows, [])(gradients[0]))
    moved = [
        values[:, : leaf.size // num_rows].reshape(leaf.shape).astype(leaf.dtype)
        if of_rows and jnp.issubdtype(leaf.dtype, jnp.floating)
        else None
        for leaf, of_rows in zip(state, is_slot, strict=True)
    ]
    old = [x if y is None else y for x, y in zip(state, moved, strict=True)]

    def new_leaf(number: int, leaf: Array) -> Array:
        leaves = [*old[:number], leaf, *old[number + 1 :]]
        update = _in_layer(rule.update, num_rows, [])
        _, new = update(gradients[1], tree.unflatten(leaves), gradients[0])
        return tree.flatten_up_to(new)[number]

    def derivative(number: int, leaf: Array | None) -> Any:
        if leaf is None:
            return None
        function = functools.partial(new_leaf, number)
        try:
            return jax.jvp(function, (leaf,), (jnp.ones_like(leaf),))[1]
        except Exception:  # An operation of the rule may have no derivative.
            return None

    return [derivative(number, leaf) for number, leaf in enumerate(moved)]


def _random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def _slot_values(dim: int) -> np.ndarray:
    """Returns positive values of many sizes, `[8, dim]`."""
    powers = np.random.default_rng(0).uniform(*_SLOT_VALUES, size=(8, dim))
    return np.asarray(10.0**powers, np.float32)


def _one_value(leaves: Sequence[np.ndarray]) -> float | None:
    """Returns the value of all elements of some arrays, if there is one."""
    elements = np.concatenate([np.float64(leaf).ravel() for leaf in leaves])
    return float(elements[0]) if np.all(elements == elements[0]) else None


@contextlib.contextmanager
def on_its_own() -> Iterator[None]:
    """Runs the probe apart from a trace, a mesh and checks for NaN, on a CPU."""
    with (
        eval_context(),
        use_abstract_mesh(AbstractMesh((), ())),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.default_device(_cpu()),
    ):
        yield


def _cpu() -> jax.Device | None:
    """Returns a CPU, where programs compile fast; None if JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that runs a few times only, so that compiling it is fast."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=options if _cpu() else None)
