"""Runs a rule on a few rows, to find out how it treats them.

A table's gradient reaches its owner as `[rows, dim]` with the touched rows only, in
several pieces if ids are skewed. A rule is right on such pieces if it is row-local:
what it does to a row depends on that row of gradient, slot variables and table, and on
values that belong to no row.

The probe runs two steps on 136 rows, and again on three of them alone, in another
order: early and late in training, with small, large, missing and broken gradients.
Updates that differ mean that rows are mixed, and so do values that belong to no row. It
is evidence and no proof: a rule may mix rows where values are of a size that the probe
does not have.

A rule is traced once for each number of rows, and then evaluated by NumPy. To compile
it would take most of the time of a plan.
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

from tpu_embedding.optimizers.numpy_evaluation import trace
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

_NUM_ROWS: Final = 136
"""An even number above 128, from which on `optax.adafactor` factors its moments."""

_BAD_ROW: Final = 1
"""The row of large values whose gradient is NaN in one step, and large in another."""

_PART: Final = np.asarray([5, 3, 0], np.int32)
"""Rows that are given alone: an odd number, in another order, without the bad one."""

_SMALL: Final = 1e-3
_LARGE: Final = 1e10
"""Sizes of gradients: most bounds lie between them."""

_ROW_SIZES: Final = (1e-2, 10.0)
"""Sizes of rows."""

_EMPTY_ROWS: Final = slice(100, None)
"""Rows without values and gradient, as padding has them. The part has none."""

_LATE: Final = 1000
"""Added to the counts of a rule, which may change with the step."""

_SLOT_VALUES: Final = (-2, 15)
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
    asked: list[str] = []
    with on_its_own(), np.errstate(all="ignore"):
        with _says_why_it_does_not_run(dim):
            whole = _trace_rule(rule, (_NUM_ROWS, dim), asked)
            of_whole = [whole.run(*case) for case in _cases(dim)]
        row_shapes = slot_row_shapes(rule, (dim,))
        rows = jax.tree.structure(of_whole[0].first).flatten_up_to(row_shapes)
        try:
            part = _trace_rule(rule, (len(_PART), dim), asked)
            of_part = [part.run(g[:, _PART], x[_PART], n) for g, x, n in _cases(dim)]
        except (TypeError, ValueError) as error:
            # Shapes of the part that do not fit what all rows have left.
            raise _mixes_rows() from error
        is_slot = [row is not None for row in rows]
        for case, *runs in zip(_cases(dim), of_whole, of_part, strict=True):
            _check_row_local(case, runs, is_slot)
        starts = [_late(of_whole[0].first, steps) for steps in (0, _LATE)]
        moved = [
            is_slot[i] and all(_is_moved_by_adding(whole, x, i, dim) for x in starts)
            for i in range(len(rows))
        ]
    first = [_leaves(run.first) for run in of_whole + of_part]
    leaves = [
        None
        if row is None
        else ProbedSlot(
            row=row,
            initial_value=_one_value(values),
            # The third run has other rows than the first.
            starts_from_rows=not np.array_equal(values[0], values[2]),
            is_moved_by_adding=is_moved,
        )
        for row, is_moved, *values in zip(rows, moved, *first, strict=True)
    ]
    return ProbedRule(leaves=tuple(leaves), takes_totals=bool(asked))


class _Run(NamedTuple):
    """Two steps of a rule: the first and the last state, and both steps' updates."""

    first: Any
    last: Any
    updates: np.ndarray


class _TracedRule(NamedTuple):
    """A rule that was traced for a number of rows, as a layer calls it.

    Attributes:
      init: rows to state.
      update: gradients, state and rows to updates and state.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]

    def run(self, gradients: np.ndarray, rows: np.ndarray, later: int) -> _Run:
        """Takes two steps, after so many others.

        Args:
          gradients: `[2, rows, dim]`.
          rows: `[rows, dim]`.
          later: is added to each count, an integer scalar of the state.
        """
        first, all_updates = self.init(rows), []
        state = _late(first, later)
        for gradient in gradients:
            updates, state = self.update(gradient, state, rows)
            all_updates.append(updates)
        return _Run(first, state, np.stack(all_updates))


def _trace_rule(
    rule: optax.GradientTransformation, shape: tuple[int, int], asked: list[str]
) -> _TracedRule:
    """Traces a rule, with totals that say nothing.

    Args:
      rule: the rule.
      shape: `(rows, dim)`.
      asked: gets an item for each total that the rule asks for.
    """
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    init, state = trace(_in_layer(rule.init, shape[0], asked), rows)
    update = functools.partial(_checked_update, rule, asked)
    return _TracedRule(init, trace(update, rows, state, rows)[0])


def _checked_update(
    rule: optax.GradientTransformation,
    asked: list[str],
    gradients: Array,
    state: Any,
    rows: Array,
) -> tuple[Array, Any]:
    """Returns updates and state of a step, if they are of the form that a layer needs.

    Raises:
      NotRowLocalError: if updates change after the rule asked how the table stores
        them.
      TypeError: if updates are not one array.
      ValueError: if the new state has another structure.
    """
    stored: list[Any] = []
    update = _in_layer(rule.update, len(rows), asked, stored)
    updates, new_state = update(gradients, state, rows)
    if getattr(updates, "shape", None) != rows.shape:
        raise TypeError(f"its update does not return one array of shape {rows.shape}")
    if stored and stored[-1] is not updates:
        raise NotRowLocalError(
            "adafactor must be the last of a chain, and not be wrapped by what changes "
            "its updates: it follows the scale of the table by them. Put clipping "
            "before it; learning rate and weight decay are its arguments."
        )
    tree = jax.tree.structure(state)
    return updates, tree.unflatten(tree.flatten_up_to(new_state))


def _late(state: Any, steps: int) -> Any:
    """Returns a state after so many more steps: its counts, integer scalars, change."""

    def advance(leaf: Any) -> Any:
        is_count = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)
        return (leaf + np.int64(steps)).astype(leaf.dtype) if is_count else leaf

    return jax.tree.map(advance, state)


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


@contextlib.contextmanager
def _says_why_it_does_not_run(dim: int) -> Iterator[None]:
    """Refuses a rule that raises an error on an array of rows of a dim."""
    try:
        yield
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


def _check_row_local(
    case: tuple[np.ndarray, np.ndarray, int],
    runs: Sequence[_Run],
    is_slot: Sequence[bool],
) -> None:
    """Compares what all rows and the part have made of the same rows."""
    of_whole, of_part = runs
    given = case[0][:, _PART], case[1][_PART]
    if not _are_equal(of_part.updates, of_whole.updates[:, _PART], given):
        raise _mixes_rows()
    leaves = zip(_leaves(of_whole.last), _leaves(of_part.last), is_slot, strict=True)
    if not all(
        of_rows or np.array_equal(*pair, equal_nan=True) for *pair, of_rows in leaves
    ):
        raise NotRowLocalError(
            "The optimizer is not row-local: a value of its state that belongs to no "
            "row depends on the rows of this step's ids, and each device has others. "
            "Norms are such values, and the flags of optax.zero_nans: write "
            "optax.stateless(lambda gradient, rows: jnp.nan_to_num(gradient)) in its "
            "place. Or apply this optimizer to the dense parameters only."
        )


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


def _is_moved_by_adding(rule: _TracedRule, state: Any, number: int, dim: int) -> bool:
    """Tells if a slot variable is `ProbedSlot.is_moved_by_adding`.

    It is doubled, and the new one should grow by half to all of that.

    Args:
      rule: the rule, traced for all rows.
      state: a state in which no row was touched yet. A rule may forget the more, the
        later a row is touched again.
      number: place of the slot variable among the leaves of the state.
      dim: columns of the table.
    """
    start, tree = jax.tree.flatten(state)
    if not jnp.issubdtype(start[number].dtype, jnp.floating):
        return False
    rows, values = _random((_NUM_ROWS, dim)), _slot_values(dim)
    old = [
        values[:, : leaf.size // _NUM_ROWS].reshape(leaf.shape).astype(leaf.dtype)
        if leaf.shape[:1] == (_NUM_ROWS,) and jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for leaf in start
    ]

    def new_leaf(leaves: list[Any]) -> np.ndarray:
        _, new = rule.update(rows, tree.unflatten(leaves), rows)
        return np.asarray(jax.tree.leaves(new)[number], np.float64)

    before = np.float64(old[number])
    new = new_leaf(old)
    larger = new_leaf([*old[:number], 2 * old[number], *old[number + 1 :]])
    rounding = 2 * jnp.finfo(old[number].dtype).eps * (np.abs(larger) + before)
    error = np.abs(larger - new - 0.75 * before)
    return bool(np.all(error <= 0.26 * before + rounding))


def _leaves(state: Any) -> list[np.ndarray]:
    """Returns the leaves of a state on the host; random keys by their words."""
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for leaf in jax.tree.leaves(state)
    ]


def _random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def _slot_values(dim: int) -> np.ndarray:
    """Returns positive values of many sizes, `[rows, dim]`."""
    powers = np.random.default_rng(0).uniform(*_SLOT_VALUES, size=(_NUM_ROWS, dim))
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
