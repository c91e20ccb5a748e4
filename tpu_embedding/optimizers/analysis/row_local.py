"""Is an optax transformation row-local? The answer is read off its jaxpr.

A table's gradient reaches its owner as `[rows, dim]` with only the touched rows, in
pieces if there is skew. A transformation gives the right result on that exactly if what
it does to a row depends on that row (of gradient, slots and table) and on values that
belong to no row. So its `init` and `update` are traced with a number of rows that
nothing else has, and each operation that sees rows must be known to leave them apart.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.table_rows import TableRows, table_rows_context

Rule = optax.GradientTransformation | RowOptimizer

PROBE_ROWS: Final = 1_000_003
"""A prime that no dim, count or hyper-parameter is likely to be a multiple of."""

ELEMENTWISE: Final = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz conj convert_element_type copy copy_p cos
    cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not optimization_barrier or population_count pow pvary real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta polygamma""".split()
)
_REDUCTIONS: Final = frozenset(
    """reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor
    argmax argmin""".split()
)
_CUMULATIVE: Final = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())
_CALLS: Final = frozenset(
    """jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat checkpoint
    remat2 cond while custom_jvp_call_jaxpr custom_vjp_call_jaxpr""".split()
)
_COLLECTS: Final = "collects gradients and applies them in some steps only"
_BOUND_TO_STEPS: Final = {
    "MultiStepsState": _COLLECTS,
    "ApplyEvery": _COLLECTS,
    "SAMState": _COLLECTS,
    # Its weight of an update falls with the step, whether the row was there or not.
    "ScheduleFreeState": "averages rows over all steps",
}
"""What optax transformations do in time that a row must be there for in each step."""


class NotRowLocalError(ValueError):
    """A transformation mixes the rows of a table."""


@functools.lru_cache(maxsize=256)
def check_row_local(optimizer: Rule, dim: int) -> None:
    """Refuses a transformation that mixes rows.

    Args:
      optimizer: an optax transformation of rows `[rows, dim]`.
      dim: columns.

    Raises:
      NotRowLocalError: naming the operation, and what to use instead.
    """
    _check(optimizer, (PROBE_ROWS, dim))
    state = jax.eval_shape(
        optimizer.init, jax.ShapeDtypeStruct((PROBE_ROWS, dim), jnp.float32)
    )
    is_lazy = not (isinstance(optimizer, RowOptimizer) and optimizer.rows == "every")
    for name in _type_names(state):
        if is_lazy and name in _BOUND_TO_STEPS:
            raise NotRowLocalError(
                f"The optimizer is not row-local in time: {name} "
                f"{_BOUND_TO_STEPS[name]}, but a row is updated in the steps that look "
                "it up. Use tpu_embedding.optimizers.every_row."
            )


@functools.lru_cache(maxsize=256)
def check_elementwise(optimizer: Rule) -> None:
    """Refuses a transformation that mixes elements, of different rows or of one.

    Args:
      optimizer: an optax transformation.

    Raises:
      NotRowLocalError: naming the operation.
    """
    # With one axis only, what treats each row for itself treats each element so.
    _check(optimizer, (PROBE_ROWS,))


@functools.lru_cache(maxsize=256)
def runs_on_lines(optimizer: Rule, dim: int, lanes: int) -> bool:
    """Whether a rule may be given lines of rows, `[lines, lanes]`, for `[rows, dim]`.

    It may if it does the same to each element of either, by operations on single
    elements: no sum over a row, nothing that depends on the size of one. What a rule
    with totals asks for is known by row, so that one may not.
    """
    if isinstance(optimizer, RowOptimizer) and optimizer.takes_totals:
        return False
    programs = []
    for width in (dim, lanes):
        rows = jax.ShapeDtypeStruct((PROBE_ROWS, width), jnp.float32)
        try:
            with table_rows_context(unknown_rows(PROBE_ROWS)):
                state = jax.eval_shape(optimizer.init, rows)
                jaxpr = jax.make_jaxpr(optimizer.update)(rows, state, rows)
        except Exception:
            return False
        if not _is_elementwise(jaxpr.jaxpr):
            return False
        # In one line, for a wider number may break it elsewhere.
        text = " ".join(str(jaxpr).split())
        text = re.sub(rf"\b{PROBE_ROWS}, ?{width}\b", "rows", text)
        programs.append((text, [np.asarray(x).tobytes() for x in jaxpr.consts]))
    return programs[0] == programs[1]


def _is_elementwise(jaxpr: Any) -> bool:
    """Whether all that is done to rows is done to each element for itself."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _CALLS:
            if not all(map(_is_elementwise, _inner_jaxprs(equation.params))):
                return False
            continue
        shapes = [
            [v.aval.shape for v in variables if hasattr(v.aval, "shape")]
            for variables in (equation.invars, equation.outvars)
        ]
        reads_rows, makes_rows = (any(map(_has_rows, x)) for x in shapes)
        is_made_of_numbers = name == "broadcast_in_dim" and not reads_rows
        if (reads_rows or makes_rows) and not (
            name in ELEMENTWISE or is_made_of_numbers
        ):
            return False
    return True


def _check(optimizer: Rule, shape: tuple[int, ...]) -> None:
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    try:
        with table_rows_context(unknown_rows(shape[0])):
            init = jax.make_jaxpr(optimizer.init)(rows)
            state = jax.eval_shape(optimizer.init, rows)
            update = jax.make_jaxpr(optimizer.update)(rows, state, rows)
    except Exception as error:
        raise NotRowLocalError(
            "The optimizer is not row-local: it cannot be applied to a single array "
            f"of shape {shape} by update(gradient, state, rows), without the loss or "
            f"other arguments; {type(error).__name__}: {error}"
        ) from error
    for part, jaxpr in (("init", init), ("update", update)):
        for operation in _mixing_operations(jaxpr.jaxpr):
            raise NotRowLocalError(
                f"The optimizer is not row-local: its {part} has the operation "
                f"{operation!r}, which mixes rows of a table, but only the rows of "
                "this step's ids, spread over shards, are there. Global norms, trust "
                "ratios, factored moments, noise and counts of finite values do this. "
                "Use transformations that treat each row for itself, or apply this "
                "one to the dense parameters only."
            )


class _UnknownRows(TableRows):
    """Answers without looking: totals over rows are known where the rule will run."""

    def total(self, values: Array) -> Array:
        return jnp.zeros((1, *values.shape[1:]), values.dtype)

    def minimum(self, values: Array) -> Array:
        return jnp.zeros((1,), values.dtype)


def unknown_rows(num_rows: int) -> TableRows:
    """Returns rows of a table of which nothing but their number is at hand."""
    everything: Any = np.ones(num_rows, bool)
    return _UnknownRows(
        table_sizes=jnp.ones((1,), jnp.float32),
        tables=None,
        is_used=everything,
        is_touched=everything,
        all_reduce=lambda totals, _: totals,
    )


def _type_names(tree: Any) -> Iterator[str]:
    """Yields the names of the types of all nodes of a nest of tuples and dicts."""
    yield type(tree).__name__
    children = ()
    if isinstance(tree, tuple | list):
        children = tree
    elif isinstance(tree, dict):
        children = tree.values()
    for child in children:
        yield from _type_names(child)


def _mixing_operations(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _CALLS:
            for inner in _inner_jaxprs(equation.params):
                yield from _mixing_operations(inner)
        elif not _keeps_rows(name, equation):
            yield name


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "jaxpr") and hasattr(item, "consts"):
                yield item.jaxpr
            elif hasattr(item, "eqns"):
                yield item


def _keeps_rows(name: str, equation: Any) -> bool:
    params = equation.params
    inputs = [v.aval.shape for v in equation.invars if hasattr(v.aval, "shape")]
    outputs = [v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape")]
    if any(_is_row_count(v) for v in equation.invars):
        return False
    if not any(map(_has_rows, inputs)):
        # Rows out of nothing: a constant for all of them is fine, numbers by
        # position are not, because positions depend on shards and rounds.
        if not any(map(_has_rows, outputs)):
            return True
        return name == "broadcast_in_dim" or (name == "iota" and params["dimension"])
    if not all(map(rows_first, outputs)):
        return False
    if not all(rows_first(shape) for shape in inputs if _has_rows(shape)):
        return False
    if name in ELEMENTWISE:
        return True
    if name in _REDUCTIONS:
        return 0 not in params["axes"]
    if name in _CUMULATIVE:
        return params["axis"] != 0
    match name:
        case "sort" | "concatenate":
            return params["dimension"] != 0
        case "split" | "stack":
            return params["axis"] != 0
        case "rev":
            return 0 not in params["dimensions"]
        case "transpose":
            return params["permutation"][0] == 0
        case "broadcast_in_dim":
            return params["broadcast_dimensions"][:1] == (0,)
        case "reshape" | "squeeze" | "expand_dims" | "top_k":
            return True
        case "slice":
            strides = params["strides"] or (1,)
            return params["limit_indices"][0] == PROBE_ROWS and strides[0] == 1
        case "pad":
            return params["padding_config"][0] == (0, 0, 0)
        case "dot_general":
            return _dot_keeps_rows(params, inputs)
    return False


def _dot_keeps_rows(params: dict[str, Any], inputs: list[tuple[int, ...]]) -> bool:
    (contract_left, _), (batch_left, batch_right) = params["dimension_numbers"]
    left, right = inputs
    if _has_rows(left) and _has_rows(right):
        return tuple(batch_left[:1]) == (0,) == tuple(batch_right[:1])
    return rows_first(left) and 0 not in contract_left and not batch_left


def _is_row_count(value: Any) -> bool:
    """Whether a literal was made from the number of rows, which is not the table's."""
    literal = getattr(value, "val", None)
    if literal is None or np.ndim(literal) or not np.isreal(literal):
        return False
    size = abs(float(literal))
    if not math.isfinite(size) or size == 0:
        return False
    return any(
        math.isclose(x / PROBE_ROWS, round(x / PROBE_ROWS), rel_tol=1e-7)
        and 1 <= round(x / PROBE_ROWS) <= 4096
        for x in (size, 1 / size)
    )


def _has_rows(shape: tuple[int, ...]) -> bool:
    return any(size > 0 and size % PROBE_ROWS == 0 for size in shape)


def rows_first(shape: tuple[int, ...]) -> bool:
    """Whether the first axis of a probed shape, and no other, is that of rows."""
    return bool(shape) and shape[0] == PROBE_ROWS and not _has_rows(shape[1:])
