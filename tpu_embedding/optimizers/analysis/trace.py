"""The traced rule, from which all analyses of an optimizer are read off.

A rule is a pair of functions of dense rows. `trace_rule` traces both once, for rows of
a given shape, and keeps the programs. The other modules of this folder read answers off
them: is the rule row-local, does it take totals, and which parts of its state are slot
variables. Tracing happens outside of any mesh, so one trace serves all meshes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.extend as jex
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, use_abstract_mesh
from jaxtyping import Array

from tpu_embedding.optimizers.analysis.rule_program import (
    PROBED_SIZES,
    TRACED_SIZES,
    RuleProgram,
    SizeDependentError,
    Variable,
    read_program,
)
from tpu_embedding.optimizers.modes import MustBeLast, RuleMode, requested_modes
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.table_rows import (
    Reduction,
    TableRows,
    model_gradient_context,
    table_rows_context,
)

Rule = optax.GradientTransformation | RowOptimizer


LOOKAHEAD: Final = (
    "optax.lookahead, whose parameters are pairs of fast and slow ones, "
    "optax.LookaheadParams"
)


_NO_LOOPS: Final = (
    "Loops over rows do this. Write the rule for all rows at once, as jax.vmap does in "
    "the place of jax.lax.map and jax.lax.scan."
)


class NotRowLocalError(ValueError):
    """A transformation mixes the rows of a table."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TracedRule:
    """The programs of an optimizer rule, and its requests while it was traced.

    Attributes:
      row_shape: shape of one row, `(dim,)`.
      init: program of `init`. Inputs: the rows, and the row facts. Outputs: the leaves
        of the state.
      update: program of `update`. Inputs: the gradient, the leaves of the state, the
        rows, and the row facts. Outputs: the updates, and the leaves of the new state.
      state_names: one name per leaf of the state, such as `[0].mu`.
      state_types: names of the types of all nodes of the state.
      modes: modes that the rule requested.
      takes_totals: True if `update` asked for totals over the rows of a table.
      returns_rows: True if the updates are an array of the shape of the rows.
      is_last: True if no other rule changes the updates of a rule that must be last.
    """

    row_shape: tuple[int, ...]
    init: RuleProgram
    update: RuleProgram
    state_names: tuple[str, ...]
    state_types: tuple[str, ...]
    modes: tuple[RuleMode, ...]
    takes_totals: bool
    returns_rows: bool
    is_last: bool

    @property
    def old_state(self) -> tuple[Variable, ...]:
        """The inputs of `update` that are leaves of the state."""
        return self.update.inputs[1 : 1 + len(self.state_names)]

    @property
    def row_facts(self) -> tuple[Variable, ...]:
        """Inputs of `update` about the rows: table sizes, used rows, touched rows."""
        return self.update.inputs[2 + len(self.state_names) :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UntraceableRule:
    """A rule that cannot be traced for a single array of rows.

    Attributes:
      reason: the type and message of the error, in one line.
      error: the error that tracing raised.
    """

    reason: str
    error: Exception


def trace_rule(
    optimizer: Rule, row_shape: tuple[int, ...]
) -> TracedRule | UntraceableRule:
    """Traces the two functions of an optimizer rule, once for each shape of rows.

    Args:
      optimizer: the rule.
      row_shape: the shape of one row, `(dim,)`.

    Raises:
      NotRowLocalError: if the rule asks for totals over rows where the layer cannot
        compute them, as within `lax.cond`.

    Example:
      >>> rule = trace_rule(optax.adam(0.1), (8,))
      >>> rule.state_names
      ('[0].count', '[0].mu', '[0].nu')
      >>> [leaf.shape for leaf in rule.old_state]
      [(), (rows, 8), (rows, 8)]
    """
    if isinstance(optimizer, RowOptimizer):
        optimizer = optimizer.transformation
    return _trace_rule(optimizer, row_shape)


@functools.lru_cache(maxsize=256)
def _trace_rule(
    transformation: optax.GradientTransformation, row_shape: tuple[int, ...]
) -> TracedRule | UntraceableRule:
    try:
        with use_abstract_mesh(AbstractMesh((), ())):
            _trace_sizes(transformation, row_shape, PROBED_SIZES)
            return _trace_sizes(transformation, row_shape, TRACED_SIZES)
    except _TotalWithinError as error:
        raise NotRowLocalError(
            "The optimizer asks for totals over the rows of a table within lax.cond or "
            "another wrapper that traces it, such as optax.apply_if_finite, MultiSteps "
            "or a global norm beside it. Put zero_nans or clipping of elements before "
            "it, or use every_row(rule, gradient_steps=...) and the rule's own options."
        ) from error
    except Exception as error:  # The rule may be any function, and raise anything.
        reason = f"{type(error).__name__}: {error}"
        if "no attribute fast" in reason:
            reason = f"it is {LOOKAHEAD}; give the table its fast_optimizer alone."
        # A traceback would keep the caller's variables alive in the cache.
        return UntraceableRule(reason=reason, error=error.with_traceback(None))


def states_of_sizes(optimizer: Rule, row_shape: tuple[int, ...]) -> list[Any]:
    """Returns the state of a rule for each of `TRACED_SIZES`, as shapes.

    Nothing is kept, and only `init` is traced. So it may be used while another trace
    is under way, of which the rule holds values.

    Raises:
      TypeError: if the rule loops over rows.
    """

    def init(rows: Any, *known: Any) -> Any:
        with table_rows_context(_rows_to_ask(known)):
            return optimizer.init(rows)

    num_operations = {
        len(jax.make_jaxpr(init)(*_inputs((n, *row_shape))).eqns) for n in PROBED_SIZES
    }
    if len(num_operations) > 1:
        raise TypeError(f"its init does other operations for more rows. {_NO_LOOPS}")
    return [jax.eval_shape(init, *_inputs((n, *row_shape))) for n in TRACED_SIZES]


class _TotalWithinError(Exception):
    """A total is asked for where it cannot be taken out: `lax.cond` and the like."""


class _Trace:
    """The jaxprs of a rule for one number of rows."""

    def __init__(
        self, transformation: optax.GradientTransformation, shape: tuple[int, ...]
    ):
        rows, *known = _inputs(shape)
        self.modes: list[RuleMode] = []
        self.totals: list[str] = []
        self.is_last = True

        def init(rows: Any, *known: Any) -> Any:
            with table_rows_context(_rows_to_ask(known)):
                return transformation.init(rows)

        def update(gradient: Any, state: Any, rows: Any, *known: Any) -> Any:
            asked = _rows_to_ask(known, note_total=self.totals.append)
            # Values of a step that is being traced must not enter this trace.
            with (
                table_rows_context(asked),
                model_gradient_context(None),
                requested_modes() as modes,
            ):
                updates, state = transformation.update(gradient, state, rows)
            last = [mode for mode in modes if isinstance(mode, MustBeLast)]
            self.is_last = all(mode.updates is updates for mode in last)
            self.modes = [mode for mode in modes if mode not in last]
            return updates, state

        self.init, self.state = jax.make_jaxpr(init, return_shape=True)(rows, *known)
        self.update, (updates, _) = jax.make_jaxpr(update, return_shape=True)(
            rows, self.state, rows, *known
        )
        self.returns_rows = getattr(updates, "shape", None) == shape


def _trace_sizes(
    transformation: optax.GradientTransformation,
    row_shape: tuple[int, ...],
    sizes: tuple[int, int],
) -> TracedRule:
    """Traces a rule for two numbers of rows, and merges the two traces."""
    first, second = (_Trace(transformation, (n, *row_shape)) for n in sizes)
    try:
        init = read_program(first.init, second.init)
        update = read_program(first.update, second.update)
    except SizeDependentError as error:
        raise TypeError(
            f"it does other operations for another number of rows: {error}. {_NO_LOOPS}"
        ) from error
    paths = jax.tree_util.tree_leaves_with_path(first.state)
    return TracedRule(
        row_shape=row_shape,
        init=init,
        update=update,
        state_names=tuple(jax.tree_util.keystr(path) for path, _ in paths),
        state_types=tuple(_type_names(first.state)),
        modes=tuple(first.modes),
        takes_totals=bool(first.totals),
        returns_rows=first.returns_rows and second.returns_rows,
        is_last=first.is_last,
    )


def _type_names(tree: Any) -> list[str]:
    """Returns the names of the types of all nodes of a nest of tuples and dicts."""
    children = tree.values() if isinstance(tree, dict) else tree
    is_node = isinstance(tree, tuple | list | dict)
    names = [name for x in children for name in _type_names(x)] if is_node else []
    return [type(tree).__name__, *names]


def _inputs(shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    """Returns the rows, and what `_rows_to_ask` takes."""
    return [
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.float32),
        jax.ShapeDtypeStruct(shape[:1], jnp.bool_),
        jax.ShapeDtypeStruct(shape[:1], jnp.bool_),
    ]


class _RowsToAsk(TableRows):
    """Rows whose totals are operations of the trace: the layer computes them."""

    def total(self, values: Array) -> Array:
        return self._ask(values, "sum")

    def minimum(self, values: Array) -> Array:
        return self._ask(values, "min")

    def _ask(self, values: Array, reduction: Reduction) -> Array:
        values = self.all_reduce(values, reduction)
        return _TABLE_TOTAL.bind(values, reduction=reduction)


def _rows_to_ask(
    known: Any, note_total: Callable[[str], None] = lambda reduction: None
) -> TableRows:
    table_sizes, is_used, is_touched = known
    outside = jex.core.get_opaque_trace_state(convention="nnx")

    def all_reduce(values: Array, reduction: Reduction) -> Array:
        if jex.core.get_opaque_trace_state(convention="nnx") != outside:
            raise _TotalWithinError
        note_total(reduction)
        return values

    return _RowsToAsk(
        table_sizes=table_sizes,
        tables=None,
        is_used=is_used,
        is_touched=is_touched,
        all_reduce=all_reduce,
    )


_TABLE_TOTAL: Final = jex.core.Primitive("table_total")
"""Reduces `[rows, ...]` to `[1, ...]`. It is traced only, never run."""


@_TABLE_TOTAL.def_abstract_eval
def _(values: Any, *, reduction: Reduction) -> Any:
    del reduction
    return values.update(shape=(1, *values.shape[1:]))
