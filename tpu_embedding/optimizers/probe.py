"""Runs a rule on a few rows to find out if it is row-local, and to find its slots.

In a layer, a rule sees only touched rows. If ids are skewed, it sees them in several
pieces. The results are correct if a row's update depends only on the row, its gradient
and slot variables, and scalars that are independent of rows. So the probe takes two
steps on 136 rows, repeats them on only three of these rows, and compares the updates.
This is evidence but not proof: a rule may mix rows only at magnitudes that the probe
does not try.
"""

import contextlib
import dataclasses
import functools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import eval_context
from jax.sharding import AbstractMesh, use_abstract_mesh
from jaxtyping import Array

from tpu_embedding.optimizers.jaxprs import (
    ClosedJaxpr,
    are_among,
    dependent_values,
    evaluate,
    evaluate_by_numpy,
)
from tpu_embedding.optimizers.row_optimizer import (
    NotRowLocalError,
    RowOptimizer,
    row_optimizer_of,
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
"""An even number. From 128 rows on, `optax.adafactor` factors its moments."""

_FEW_ROWS: Final = np.asarray([5, 3, 0], np.int32)
"""Rows that the probe runs a second time, alone and in this order. `_BAD_ROW` is not
among them, and their number is odd and below 128."""

_BAD_ROW: Final = 1
"""A row of large values. Its gradient is NaN in the first step and large in the second
step."""

_EMPTY_ROWS: Final = slice(100, None)
"""Rows with zero values and gradients, like padding."""

_SMALL: Final = 1e-3
_LARGE: Final = 1e10
"""Magnitudes of gradients. Most clipping bounds are between `_SMALL` and `_LARGE`."""

_LATE: Final = 1000
"""Number added to a rule's counts, because late steps may behave differently."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedSlot:
    """A slot variable, as observed by the probe.

    Attributes:
      row: shape and dtype of one row, `(dim,)` or `()`.
      initial_value: initial value in all elements, or None if they differ.
      starts_from_rows: True if initial values depend on the table rows.
      is_moved_by_adding: True if the rule keeps at least half of the old value, and
        adds to it. Then adding the difference between the new and the old value is as
        precise as the rule itself. If a rule forgets the old value, a small new value
        would be lost in this difference.
    """

    row: jax.ShapeDtypeStruct
    initial_value: float | None
    starts_from_rows: bool
    is_moved_by_adding: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProbedRule:
    """The probe's findings about a rule.

    Attributes:
      state: the state for `_NUM_ROWS` rows, as shapes and dtypes.
      leaves: the slot variable in each state leaf, or None for a shared value.
      takes_totals: True if the rule asks for totals over a table.
      update: one step, in which all totals are 1. It maps gradients, rows, `is_touched`
        and state leaves to updates and new leaves.
    """

    state: Any
    leaves: tuple[ProbedSlot | None, ...]
    takes_totals: bool
    update: ClosedJaxpr

    @property
    def slots(self) -> tuple[ProbedSlot, ...]:
        """Slot variables, in leaf order."""
        return tuple(leaf for leaf in self.leaves if leaf is not None)

    def partition(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits state leaves into values that rows share, and slots."""
        pairs = list(zip(leaves, self.leaves, strict=True))
        shared = [leaf for leaf, slot in pairs if slot is None]
        return shared, [leaf for leaf, slot in pairs if slot is not None]


def probe_rule(
    rule: optax.GradientTransformation | RowOptimizer, dim: int
) -> ProbedRule:
    """Probes a rule on rows `[rows, dim]`, and rejects it if it mixes rows."""
    # The cache key is only the transformation, which behaves alike under all drivers.
    return _probe(row_optimizer_of(rule).transformation, dim)


def rates_are_finite(
    rule: optax.GradientTransformation | RowOptimizer, dim: int, scalars: Sequence[Any]
) -> Array | None:
    """Tells if the next learning rate is finite. None means that it is constant.

    Example:
      >>> rule = optax.sgd(lambda count: 0.1 / count)
      >>> [bool(rates_are_finite(rule, 8, [count])) for count in (0, 1)]
      [False, True]
    """
    probed = probe_rule(rule, dim)
    jaxpr = probed.update.jaxpr
    is_shared = [slot is None for slot in probed.leaves]
    from_shared = dependent_values(jaxpr, [False, False, False, *is_shared])
    updates, *leaves = are_among(jaxpr.outvars, from_shared)
    # Constants are checked when the rule is made.
    if not (updates or any(probed.partition(leaves)[1])):
        return None
    # The step runs on rows of ones. A rate that isn't finite makes all updates NaN or
    # infinite, so one finite element shows that the rate is finite. Values inside the
    # step don't show this. A bound may be infinite. A branch that isn't taken may be
    # NaN, as in the first steps of optax.radam. `scalars` are the shared values, in
    # leaf order.
    arguments = [jnp.ones(x.aval.shape, x.aval.dtype) for x in jaxpr.invars]
    remaining = iter(scalars)
    for i, slot in enumerate(probed.leaves, start=3):
        if slot is None:
            scalar = jnp.asarray(next(remaining))
            # A value with an entry per table doesn't fit: the probe has a single table.
            arguments[i] = scalar if arguments[i].shape == () else arguments[i]
        elif slot.initial_value is not None:
            arguments[i] = jnp.full_like(arguments[i], slot.initial_value)
    updates, *leaves = evaluate(probed.update, arguments)
    _, new_slots = probed.partition(leaves)
    is_finite = [jnp.any(jnp.isfinite(x)) for x in (updates, *new_slots)]
    return jnp.all(jnp.stack(is_finite))


def slot_row_shapes(
    rule: optax.GradientTransformation, row_shape: tuple[int, ...]
) -> Any:
    """Finds slot variables without running a step.

    In the returned state, each slot variable is replaced by the shape and dtype of one
    row. Leaves that are not slot variables are None.
    """
    state, few_state = (
        jax.eval_shape(
            functools.partial(_init, rule, []),
            jax.ShapeDtypeStruct((num_rows, *row_shape), jnp.float32),
        )
        for num_rows in (_NUM_ROWS, len(_FEW_ROWS))
    )
    return jax.tree.structure(state).unflatten(_slot_rows(state, few_state))


@functools.lru_cache(maxsize=4096)
def _probe(rule: optax.GradientTransformation, dim: int) -> ProbedRule:
    asked: list[str] = []
    cases = list(_cases(dim))
    with on_its_own(), np.errstate(all="ignore"), _says_why_it_does_not_run(dim):
        many = _trace_rule(rule, _NUM_ROWS, dim, asked)
        try:
            few = _trace_rule(rule, len(_FEW_ROWS), dim, asked)
        except (TypeError, ValueError) as error:
            # The trace for many rows succeeded, so the rule depends on the row count.
            raise _mixes_rows() from error
        slot_rows = _slot_rows(many.state, few.state)
        is_slot = [row is not None for row in slot_rows]
        _check_row_local(many, few, is_slot, cases)
        # Initial leaves for each case, then for case 0 with only `_FEW_ROWS`.
        first = [many.start(rows) for _, rows, _ in cases]
        small_rows = cases[0][1]
        first.append(few.start(small_rows[_FEW_ROWS]))
        moved = _moved_by_adding(many, is_slot, small_rows)
    leaves = [
        None
        if row is None
        else ProbedSlot(
            row=row,
            initial_value=_one_value(values),
            # The third case has different rows from the first.
            starts_from_rows=not np.array_equal(values[0], values[2]),
            is_moved_by_adding=is_moved,
        )
        for row, is_moved, *values in zip(slot_rows, moved, *first, strict=True)
    ]
    return ProbedRule(
        state=many.state,
        leaves=tuple(leaves),
        takes_totals=bool(asked),
        update=many.update,
    )


def _slot_rows(state: Any, few_state: Any) -> list[jax.ShapeDtypeStruct | None]:
    """Finds slot variables by their shapes, which depend on the number of rows."""
    rows: list[jax.ShapeDtypeStruct | None] = []
    leaves = jax.tree_util.tree_leaves_with_path(state)
    few_leaves = jax.tree.structure(state).flatten_up_to(few_state)
    for (path, leaf), few in zip(leaves, few_leaves, strict=True):
        if leaf.shape == few.shape:
            rows.append(None)
            continue
        name, row_shape = jax.tree_util.keystr(path), leaf.shape[1:]
        is_by_row = (
            leaf.shape == (_NUM_ROWS, *row_shape)
            and few.shape == (len(_FEW_ROWS), *row_shape)
            and len(row_shape) < 2
        )
        if not is_by_row:
            raise NotRowLocalError(
                "The optimizer's state must have one entry per row along its first "
                f"axis, or not depend on the number of rows, but {name} has shape "
                f"{leaf.shape} for a table of {_NUM_ROWS} rows. Use a transformation "
                "that works row by row; for factored moments, te.optimizers.adafactor."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.number):
            raise NotRowLocalError(
                f"Slot variables must have a float or integer dtype, but {name} in the "
                f"optimizer's state has dtype {leaf.dtype}. Store it as int8, for "
                "example."
            )
        rows.append(jax.ShapeDtypeStruct(row_shape, leaf.dtype))
    return rows


class _TracedRule(NamedTuple):
    """A rule traced for a fixed row count. `update` is as in `ProbedRule`."""

    init: ClosedJaxpr
    update: ClosedJaxpr
    state: Any

    def start(self, rows: np.ndarray, later: int = 0) -> list[Any]:
        """Evaluates the initial leaves, with counts advanced by `later` steps."""
        leaves = evaluate_by_numpy(self.init, [rows])
        for i, leaf in enumerate(leaves):
            # Integer scalars are counts. NumPy would reject a Python int that doesn't
            # fit a narrow dtype.
            if leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer):
                leaves[i] = (leaf + np.int64(later)).astype(leaf.dtype)
        return leaves

    def step(self, gradient: Any, rows: Any, leaves: Sequence[Any]) -> list[Any]:
        is_touched = np.ones(len(rows), bool)
        return evaluate_by_numpy(self.update, [gradient, rows, is_touched, *leaves])

    def updates(
        self, gradients: np.ndarray, rows: np.ndarray, later: int
    ) -> np.ndarray:
        """Takes two steps, with counts as if `later` steps came before.

        `gradients` and the returned updates are `[2, rows, dim]`.
        """
        # The second step shows what the first one left in the state.
        leaves = self.start(rows, later)
        updates = []
        for gradient in gradients:
            update, *leaves = self.step(gradient, rows, leaves)
            updates.append(update)
        return np.stack(updates)


def _trace_rule(
    rule: optax.GradientTransformation, num_rows: int, dim: int, asked: list[str]
) -> _TracedRule:
    """Traces a rule, and appends to `asked` the totals that it needs."""

    def update(gradients: Array, rows: Array, is_touched: Array, state: Any) -> Any:
        known = dataclasses.replace(some_rows(num_rows), is_touched=is_touched)
        with _as_in_layer(known, asked) as stored:
            updates, new_state = rule.update(gradients, state, rows)
        if getattr(updates, "shape", None) != rows.shape:
            raise TypeError(f"update must return one array of shape {rows.shape}")
        # Adafactor tracks the table's scale from the updates that it passed to
        # `stored`.
        if stored and stored[-1] is not updates:
            raise NotRowLocalError(
                "adafactor must come last in a chain, without wrappers that change its "
                "updates, from which it tracks the table's scale. Put clipping before "
                "it, and pass learning_rate and weight_decay to adafactor."
            )
        return updates, jax.tree.structure(state).flatten_up_to(new_state)

    rows = jax.ShapeDtypeStruct((num_rows, dim), jnp.float32)
    is_touched = jax.ShapeDtypeStruct((num_rows,), bool)
    init = functools.partial(_init, rule, asked)
    init_jaxpr, state = jax.make_jaxpr(init, return_shape=True)(rows)
    update_jaxpr = jax.make_jaxpr(update)(rows, rows, is_touched, state)
    return _TracedRule(init_jaxpr, update_jaxpr, state)


def _init(rule: optax.GradientTransformation, asked: list[str], rows: Array) -> Any:
    with _as_in_layer(some_rows(len(rows)), asked):
        return rule.init(rows)


@contextlib.contextmanager
def _as_in_layer(known: TableRows, asked: list[str]) -> Iterator[list[Any]]:
    """Runs a rule as a layer would, with ones for all totals.

    Yields a list that collects the updates passed to `TableRows.stored`.
    """
    outside = jex.core.get_opaque_trace_state(convention="nnx")
    seen: list[Any] = []

    def all_reduce(totals: Array, reduction: str) -> Array:
        # A layer collects totals across traces, and JAX doesn't let values of an inner
        # trace escape.
        if jex.core.get_opaque_trace_state(convention="nnx") != outside:
            raise NotRowLocalError(
                "The optimizer needs totals over a table's rows, so it cannot run "
                "inside lax.cond or a wrapper that traces it, such as "
                "optax.apply_if_finite or MultiSteps. Put clipping before it, or use "
                "every_row(rule, gradient_steps=...) and the rule's own options."
            )
        asked.append(reduction)
        return jnp.ones_like(totals)

    def stored(rows: Array, updates: Array) -> Array:
        seen.append(updates)
        return rows + updates

    known = dataclasses.replace(
        known,
        table_sizes=jnp.full((1,), 1000.0),
        all_reduce=all_reduce,
        occurrence_squares=jnp.ones((1,)),
        stored=stored,
    )
    with (
        table_rows_context(known, inlines_jit=False),
        model_gradient_context(lambda: jnp.ones(())),
    ):
        yield seen


@contextlib.contextmanager
def _says_why_it_does_not_run(dim: int) -> Iterator[None]:
    """Turns errors from a rule into NotRowLocalError, with the reason."""
    try:
        yield
    except NotRowLocalError:
        raise
    except Exception as error:  # The rule may be any function, and raise anything.
        text = textwrap.shorten(str(error), 90, placeholder=" ...")
        reason = f"{type(error).__name__}: {text}"
        if "no attribute fast" in str(error):
            reason = f"it is {LOOKAHEAD}; pass only its fast_optimizer."
        raise NotRowLocalError(
            "The optimizer is not row-local: update(gradient, state, rows) of an array "
            f"[rows, {dim}] fails without the loss or other arguments. Use an optax "
            f"rule of one array. ({reason})"
        ) from error


def _cases(dim: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yields gradients `[2, rows, dim]`, rows, and the number of earlier steps."""
    # A rule that mixes rows spreads NaN from the bad row to other rows.
    random = _random((2, _NUM_ROWS, dim))
    rows = _random((_NUM_ROWS, dim), seed=1)
    rows[_BAD_ROW] *= 1e6
    small = np.float32(_SMALL) * random
    small[0, _BAD_ROW], small[1, _BAD_ROW] = np.nan, _LARGE
    small_rows, large_rows = np.float32(1e-2) * rows, np.float32(10) * rows
    large_rows[_EMPTY_ROWS] = 0
    with_zeros = random.copy()
    with_zeros[:, _EMPTY_ROWS] = 0
    yield small, small_rows, 0
    yield np.float32(_LARGE) * random, small_rows[::-1], 0
    yield with_zeros, large_rows, 0
    yield small[::-1], large_rows, _LATE


def _check_row_local(
    many: _TracedRule,
    few: _TracedRule,
    is_slot: list[bool],
    cases: Sequence[tuple[np.ndarray, np.ndarray, int]],
) -> None:
    """Compares updates on a few rows with and without the remaining rows."""
    for gradients, rows, later in cases:
        few_rows = rows[_FEW_ROWS]
        among_all = many.updates(gradients, rows, later)[:, _FEW_ROWS]
        alone = few.updates(gradients[:, _FEW_ROWS], few_rows, later)
        # Rounding may differ per row. A rule may subtract the old row from a new one,
        # which rounds by 1e-7 of the row.
        largest = np.nan_to_num(np.abs(among_all), posinf=0).max(-1, keepdims=True)
        tolerance = 1e-5 * largest
        tolerance += 5e-7 * np.abs(few_rows).max(-1, keepdims=True)
        is_close = np.abs(alone - among_all) <= tolerance
        is_same = (alone == among_all) | (np.isnan(alone) & np.isnan(among_all))
        if not np.all(is_close | is_same):
            raise _mixes_rows()
    # A shared value that depends on rows would differ between devices. Updates can't
    # show this if the rule uses the value only later, so the jaxpr is searched.
    jaxpr = many.update.jaxpr
    from_rows = dependent_values(jaxpr, [True, True, True, *is_slot])
    _, *leaves = are_among(jaxpr.outvars, from_rows)
    pairs = zip(leaves, is_slot, strict=True)
    if any(is_dependent and not by_row for is_dependent, by_row in pairs):
        raise NotRowLocalError(
            "The optimizer is not row-local: a scalar of its state, such as a norm, "
            "depends on this step's rows, which differ between devices. Apply it to "
            "the dense parameters only. For optax.zero_nans, write "
            "optax.stateless(lambda gradient, rows: jnp.nan_to_num(gradient))."
        )


def _mixes_rows() -> NotRowLocalError:
    return NotRowLocalError(
        "The optimizer is not row-local: it mixes rows of a table, but a step has only "
        "the rows of its own ids. Use te.gradients.clip_by_global_norm or update_if on "
        "the model's gradients, te.optimizers.adafactor or lamb, or use this optimizer "
        "for dense parameters only."
    )


def _moved_by_adding(
    rule: _TracedRule, is_slot: list[bool], rows: np.ndarray
) -> list[bool]:
    """Tests `ProbedSlot.is_moved_by_adding` for each leaf. Shared values give False."""
    # If a slot's old value is doubled, its new value should increase by 0.5 to 1 times
    # the old value. The test allows 0.75 plus or minus 0.25, with room for rounding.
    # Late counts imitate a row that many steps didn't touch, because a rule may then
    # forget more of the old value.
    gradient = _random(rows.shape)
    powers = np.random.default_rng(0).uniform(-2, 15, size=rows.shape)
    leaves = rule.start(rows)
    moved = [
        by_row and jnp.issubdtype(leaf.dtype, jnp.floating)
        for leaf, by_row in zip(leaves, is_slot, strict=True)
    ]
    tested = [i for i, is_moved in enumerate(moved) if is_moved]
    for later in (0, _LATE):
        leaves = rule.start(rows, later)
        for i in tested:
            values = np.resize(np.float32(10.0**powers), leaves[i].shape)
            leaves[i] = values.astype(leaves[i].dtype)
        _, *new = rule.step(gradient, gradient, leaves)
        for i in tested:
            doubled = [*leaves[:i], 2 * leaves[i], *leaves[i + 1 :]]
            _, *larger = rule.step(gradient, gradient, doubled)
            before, after = np.float64(leaves[i]), np.float64(larger[i])
            rounding = 2 * jnp.finfo(leaves[i].dtype).eps * (np.abs(after) + before)
            error = np.abs(after - np.float64(new[i]) - 0.75 * before)
            moved[i] &= bool(np.all(error <= 0.26 * before + rounding))
    return moved


def _random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def _one_value(arrays: Sequence[np.ndarray]) -> float | None:
    """Finds the value that all elements share, if there is one."""
    elements = np.concatenate([np.float64(array).ravel() for array in arrays])
    return float(elements[0]) if np.all(elements == elements[0]) else None


@contextlib.contextmanager
def on_its_own() -> Iterator[None]:
    """Isolates the probe from outer traces, meshes and NaN checks, and uses a CPU."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]  # CPU programs compile fast.
    except RuntimeError:  # JAX has no CPU.
        cpu = None
    with (
        eval_context(),
        use_abstract_mesh(AbstractMesh((), ())),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.default_device(cpu),
    ):
        yield
