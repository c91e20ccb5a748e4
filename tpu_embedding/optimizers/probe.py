"""Runs a rule on a few rows, to find out how it treats them.

A table's gradient reaches its owner as `[rows, dim]` with the touched rows only, in
several pieces if ids are skewed. A rule is right on such pieces if it is row-local:
what it does to a row depends on that row of gradient, slot variables and table, and on
values that belong to no row.

The probe runs two steps on 136 rows, and again on rows among which three of them occur
alone, in another order: early and late in training, with small, large, missing and
broken gradients. Updates that differ mean that rows are mixed. So does a value of the
new state that belongs to no row, if the program computes it from rows. This is evidence
and no proof: a rule may mix rows where values are of a size that the probe does not
have.

A rule is traced once, and then evaluated by NumPy. To compile it would take most of the
time of a plan. The trace is split into values of a step and arithmetic on rows, which
the layer uses from then on.
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
from tpu_embedding.optimizers.rule_split import (
    Program,
    SplitRule,
    evaluate_by_numpy,
    split_program,
    trace_program,
)
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

_SOME_ROWS: Final = np.asarray([5, 3, 0], np.int32)
"""Rows that are given alone, in another order, without the bad one."""

_OTHER_NUM_ROWS: Final = len(_SOME_ROWS)
"""A number of rows that `init` is also traced for. It is odd, and below 128."""

_SMALL: Final = 1e-3
_LARGE: Final = 1e10
"""Sizes of gradients: most bounds lie between them."""

_ROW_SIZES: Final = (1e-2, 10.0)
"""Sizes of rows."""

_EMPTY_ROWS: Final = slice(100, None)
"""Rows without values and gradient, as padding has them. None is given alone."""

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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProbedRule:
    """What a run of a rule has shown.

    Attributes:
      state: the state of a rule for some rows, as shapes and dtypes.
      leaves: for each leaf of the state, the slot variable that it is, or None.
      takes_totals: True if the rule asks for totals over the rows of a table.
      split: the rule, traced for some rows, in two halves. A rule that asks for totals
        got ones.
    """

    state: Any
    leaves: tuple[ProbedSlot | None, ...]
    takes_totals: bool
    split: SplitRule

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
def split_rule(
    rule: optax.GradientTransformation, dim: int, num_rows: int
) -> SplitRule:
    """Traces a rule that asks for no totals for a number of rows, and splits it.

    It has the same hyperparameters as `probe_rule(rule, dim).split`.

    Args:
      rule: a transformation of rows, which `probe_rule` accepts.
      dim: columns of the table.
      num_rows: rows of each array.

    Raises:
      NotRowLocalError: if the rule does something else for another number of rows.
    """
    probed = _probe(rule, dim)
    if num_rows == _NUM_ROWS:
        return probed.split

    def resized(leaf: Any, slot: ProbedSlot | None) -> Any:
        if slot is None:
            return leaf
        return jax.ShapeDtypeStruct((num_rows, *slot.row.shape), slot.row.dtype)

    leaves, tree = jax.tree.flatten(probed.state)
    state = tree.unflatten(map(resized, leaves, probed.leaves))
    with on_its_own():
        program = _trace_update(rule, state, (num_rows, dim), [])
    split = split_program(program, [slot is not None for slot in probed.leaves])
    # With a single row, JAX has nothing to broadcast along rows.
    if num_rows > 1 and not split.has_operations_of(probed.split):
        raise _mixes_rows()
    return split


def check_any_number_of_rows(
    rule: optax.GradientTransformation | RowOptimizer, dim: int
) -> None:
    """Rejects a rule that does something else for another number of rows.

    A step finds it out, at the latest. A rule that asks for totals may do so.
    """
    if not probe_rule(rule, dim).takes_totals:
        try:
            split_rule(row_optimizer_of(rule).transformation, dim, _OTHER_NUM_ROWS)
        except (TypeError, ValueError) as error:
            # Shapes that do not fit another number of rows.
            raise _mixes_rows() from error


def rates_are_finite(
    rule: optax.GradientTransformation | RowOptimizer, dim: int, scalars: Sequence[Any]
) -> Array | None:
    """Returns False if the next step has a learning rate that is NaN or infinite.

    The hyperparameters of the step are applied to rows of ones: a rate that is not
    finite makes all of their updates NaN or infinite. A hyperparameter that is not
    finite need not: a bound may be infinite, and the value of a branch that the rule
    does not take may be NaN, as in the first steps of `optax.radam`.

    Args:
      rule: the rule.
      dim: columns of the table.
      scalars: leaves of its state that belong to no row.

    Returns:
      A bool scalar. None if rows need no value that may change: constants are checked
      when the rule is made.

    Example:
      >>> rule = optax.sgd(lambda count: 0.1 / count)
      >>> [bool(rates_are_finite(rule, 8, [count])) for count in (0, 1)]
      [False, True]
    """
    probed = probe_rule(rule, dim)
    if not (scalars and probed.split.num_hyperparameters):
        return None
    # Totals are one per table, and the probe knows one table.
    known = [
        jnp.asarray(now) if x.aval.shape == () else jnp.ones(x.aval.shape, x.aval.dtype)
        for x, now in zip(probed.split.value_program.inputs, scalars, strict=True)
    ]
    hyperparameters, _ = probed.split.values(known)
    ones = jnp.ones((_NUM_ROWS, dim), jnp.float32)
    slots = [
        jnp.full(
            (_NUM_ROWS, *slot.row.shape),
            1 if slot.initial_value is None else slot.initial_value,
            slot.row.dtype,
        )
        for slot in probed.slots
    ]
    updates, new_slots = probed.split.rows(
        ones, ones, jnp.ones(_NUM_ROWS, bool), slots, hyperparameters
    )
    is_finite = [jnp.any(jnp.isfinite(x)) for x in (updates, *new_slots)]
    return jnp.all(jnp.stack(is_finite))


@functools.lru_cache(maxsize=4096)
def _probe(rule: optax.GradientTransformation, dim: int) -> ProbedRule:
    asked: list[str] = []
    with on_its_own(), np.errstate(all="ignore"):
        with _says_why_it_does_not_run(dim):
            init, state = _trace_init(rule, (_NUM_ROWS, dim), asked)
            update = _trace_update(rule, state, (_NUM_ROWS, dim), asked)
            traced = _TracedRule(init, update)
            runs = [traced.run(*case) for case in _cases(dim)]
        try:
            init_other, other_state = _trace_init(rule, (_OTHER_NUM_ROWS, dim), asked)
        except (TypeError, ValueError) as error:
            # Shapes that do not fit another number of rows.
            raise _mixes_rows() from error
        rows = _slot_rows((state, other_state), (_NUM_ROWS, _OTHER_NUM_ROWS))
        is_slot = [row is not None for row in rows]
        split = split_program(update, is_slot)
        _check_row_local(traced, runs, dim)
        if split.scalars_depend_on_rows:
            raise _scalar_depends_on_rows()
        starts = [_late(runs[0].first, steps) for steps in (0, _LATE)]
        moved = [
            is_slot[i] and all(_is_moved_by_adding(traced, x, i, dim) for x in starts)
            for i in range(len(rows))
        ]
        some_rows = next(_cases(dim))[1][_SOME_ROWS]
        firsts = [run.first for run in runs]
        firsts.append(evaluate_by_numpy(init_other, some_rows))
        firsts = [[_words(leaf) for leaf in first] for first in firsts]
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
        for row, is_moved, *values in zip(rows, moved, *firsts, strict=True)
    ]
    return ProbedRule(
        state=state,
        leaves=tuple(leaves),
        takes_totals=bool(asked),
        split=split,
    )


def slot_row_shapes(
    rule: optax.GradientTransformation | RowOptimizer, row_shape: tuple[int, ...]
) -> Any:
    """Finds the slot variables of a rule, without a run of it.

    A rule's state may hold arrays with one entry per row. They are those whose shapes
    differ between tables of two sizes. So any transformation will do, without marks.

    Args:
      rule: transformation of float32 rows `[rows, *row_shape]`.
      row_shape: the shape of one row, `(dim,)`.

    Returns:
      The state's pytree with, for each leaf that is a slot variable, the
      `jax.ShapeDtypeStruct` of one row of it (shape `(dim,)` or `()`), and None
      for every other leaf.

    Raises:
      ValueError: if a part of the state grows with the table in another way than one
        entry per row along the first axis.
    """
    sizes = (_NUM_ROWS, _OTHER_NUM_ROWS)
    states = [
        jax.eval_shape(
            _in_layer(rule.init, size, []),
            jax.ShapeDtypeStruct((size, *row_shape), jnp.float32),
        )
        for size in sizes
    ]
    return jax.tree.structure(states[0]).unflatten(_slot_rows(states, sizes))


def _slot_rows(
    states: Sequence[Any], sizes: Sequence[int]
) -> list[jax.ShapeDtypeStruct | None]:
    """Returns for each leaf of a state the row of a slot variable, or None.

    Args:
      states: the states, as shapes and dtypes, for two numbers of rows.
      sizes: these numbers.
    """
    tree = jax.tree.structure(states[0])
    paths = jax.tree_util.tree_leaves_with_path(states[0])
    others = tree.flatten_up_to(states[1])
    return [
        _slot_row(jax.tree_util.keystr(path), (first, second), sizes)
        for (path, first), second in zip(paths, others, strict=True)
    ]


def _slot_row(
    name: str, leaves: tuple[Any, Any], sizes: Sequence[int]
) -> jax.ShapeDtypeStruct | None:
    first, second = leaves
    if first.shape == second.shape:
        return None
    starts = [leaf.shape[:1] for leaf in leaves]
    if name.endswith((".v_row", ".v_col")):  # Factored moments of optax.
        raise _mixes_rows()
    if (
        starts != [(size,) for size in sizes]
        or first.shape[1:] != second.shape[1:]
        or len(first.shape) > 2
    ):
        raise ValueError(
            "An optimizer's state must have one entry per row of the table along its "
            f"first axis, or not depend on the number of rows; the part {name} has "
            f"shape {first.shape} for a table of {sizes[0]} rows. Use a "
            "transformation that works row by row."
        )
    if not jnp.issubdtype(first.dtype, jnp.number):
        raise ValueError(
            "A slot variable must be of a float or integer type, because it is updated "
            f"by adding; the part {name} of the optimizer's state has dtype "
            f"{first.dtype}. Keep it as int8, say."
        )
    return jax.ShapeDtypeStruct(first.shape[1:], first.dtype)


class _Run(NamedTuple):
    """Two steps of a rule: the leaves of the first state, and both steps' updates."""

    first: list[Any]
    updates: np.ndarray


class _TracedRule(NamedTuple):
    """A rule that was traced for `_NUM_ROWS` rows, as a layer calls it.

    Attributes:
      init: maps rows to the leaves of the state.
      update: maps gradients, rows, `is_touched` and leaves to updates and new leaves.
    """

    init: Program
    update: Program

    def run(self, gradients: np.ndarray, rows: np.ndarray, later: int) -> _Run:
        """Takes two steps, after so many others.

        Args:
          gradients: `[2, rows, dim]`.
          rows: `[rows, dim]`.
          later: is added to each count, an integer scalar of the state.
        """
        first, all_updates = evaluate_by_numpy(self.init, rows), []
        state = _late(first, later)
        for gradient in gradients:
            updates, *state = self.step(gradient, rows, state)
            all_updates.append(updates)
        return _Run(first, np.stack(all_updates))

    def step(self, gradient: np.ndarray, rows: np.ndarray, state: Sequence[Any]) -> Any:
        """Returns the updates and the leaves of the state after a step."""
        is_touched = np.ones(_NUM_ROWS, bool)
        return evaluate_by_numpy(self.update, gradient, rows, is_touched, list(state))


def _trace_init(
    rule: optax.GradientTransformation, shape: tuple[int, int], asked: list[str]
) -> tuple[Program, Any]:
    """Returns the program of a rule's first state, and its shapes and dtypes."""
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    return trace_program(_in_layer(rule.init, shape[0], asked), rows)


def _trace_update(
    rule: optax.GradientTransformation,
    state: Any,
    shape: tuple[int, int],
    asked: list[str],
) -> Program:
    """Returns the program of a rule's step; see `_TracedRule.update`."""
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    is_touched = jax.ShapeDtypeStruct(shape[:1], bool)
    update = functools.partial(_checked_update, rule, asked)
    return trace_program(update, rows, rows, is_touched, state)[0]


def _checked_update(
    rule: optax.GradientTransformation,
    asked: list[str],
    gradients: Array,
    rows: Array,
    is_touched: Array,
    state: Any,
) -> tuple[Array, Any]:
    """Returns updates and state of a step, if they are of the form that a layer needs.

    Raises:
      NotRowLocalError: if updates change after the rule asked how the table stores
        them.
      TypeError: if updates are not one array.
      ValueError: if the new state has another structure.
    """
    stored: list[Any] = []
    update = _in_layer(rule.update, len(rows), asked, stored, is_touched)
    updates, new_state = update(gradients, state, rows)
    if getattr(updates, "shape", None) != rows.shape:
        raise TypeError(f"its update does not return one array of shape {rows.shape}")
    if stored and stored[-1] is not updates:
        raise NotRowLocalError(
            "adafactor must be the last of a chain, and not be wrapped by what changes "
            "its updates: it follows the scale of the table by them. Put clipping "
            "before it; learning rate and weight decay are its arguments."
        )
    return updates, jax.tree.structure(state).flatten_up_to(new_state)


def _late(leaves: Sequence[Any], steps: int) -> list[Any]:
    """Returns a state after so many more steps: its counts, integer scalars, change."""

    def advance(leaf: Any) -> Any:
        is_count = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)
        return (leaf + np.int64(steps)).astype(leaf.dtype) if is_count else leaf

    return [advance(leaf) for leaf in leaves]


def _in_layer(
    function: Callable[..., Any],
    num_rows: int,
    asked: list[str],
    stored: list[Any] | None = None,
    is_touched: Array | None = None,
) -> Callable[..., Any]:
    """Returns a function of a rule as a layer calls it, with totals that say nothing.

    Args:
      function: `init` or `update`.
      num_rows: rows that the function is given.
      asked: gets an item for each total that the function asks for.
      stored: gets the updates that the function asks to see as the table stores them.
      is_touched: bool `[rows]`, the rows that the step looks up; by default, all.
    """

    def call(*arguments: Any) -> Any:
        known = _rows_to_ask(num_rows, asked, [] if stored is None else stored)
        if is_touched is not None:
            known = dataclasses.replace(known, is_touched=is_touched)
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
    """Rejects a rule that raises an error on an array of rows of a dim."""
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


def _check_row_local(rule: _TracedRule, runs: Sequence[_Run], dim: int) -> None:
    """Compares what becomes of some rows among all, and of the same rows alone.

    The number of rows stays, so each of the few rows occurs many times.
    """
    places = _SOME_ROWS[np.arange(_NUM_ROWS) % len(_SOME_ROWS)]
    for (gradients, rows, later), run in zip(_cases(dim), runs, strict=True):
        alone = rule.run(gradients[:, places], rows[places], later)
        given = gradients[:, places], rows[places]
        if not _are_equal(alone.updates, run.updates[:, places], given):
            raise _mixes_rows()


def _scalar_depends_on_rows() -> NotRowLocalError:
    return NotRowLocalError(
        "The optimizer is not row-local: a value of its state that belongs to no "
        "row depends on the rows of this step's ids, and each device has others. "
        "Norms are such values, and the flags of optax.zero_nans: write "
        "optax.stateless(lambda gradient, rows: jnp.nan_to_num(gradient)) instead. Or "
        "apply this optimizer to the dense parameters only."
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


def _is_moved_by_adding(
    rule: _TracedRule, start: Sequence[Any], number: int, dim: int
) -> bool:
    """Tells if a slot variable is `ProbedSlot.is_moved_by_adding`.

    It is doubled, and the new one should grow by half to all of that.

    Args:
      rule: the rule, traced for all rows.
      start: leaves of a state in which no row was touched yet. A rule may forget the
        more, the later a row is touched again.
      number: place of the slot variable among the leaves of the state.
      dim: columns of the table.
    """
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
        _, *new = rule.step(rows, rows, leaves)
        return np.asarray(new[number], np.float64)

    before = np.float64(old[number])
    new = new_leaf(old)
    larger = new_leaf([*old[:number], 2 * old[number], *old[number + 1 :]])
    rounding = 2 * jnp.finfo(old[number].dtype).eps * (np.abs(larger) + before)
    error = np.abs(larger - new - 0.75 * before)
    return bool(np.all(error <= 0.26 * before + rounding))


def _words(leaf: Any) -> Any:
    """Returns a random key as its words; other arrays as they are."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf)) if is_key else leaf


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
