"""Is an optax transformation row-local? The answer is read off its jaxpr.

A table's gradient reaches its owner as `[rows, dim]` with only the touched rows, in
pieces if there is skew. A transformation gives the right result on that exactly if what
it does to a row depends on that row (of gradient, slots and table) and on values that
belong to no row. So the jaxpr of one update is traced with a number of rows that
nothing else has, and each operation that sees rows must leave the row axis in place.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embedding.config import TableOptimizer

_PROBE_ROWS = 1_000_003

_ELEMENTWISE_REDUCTIONS = ("reduce_", "argmax", "argmin")
_ALONG_AXIS = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "sort")
_BY_POSITION = ("gather", "scatter", "dynamic", "conv", "scan", "while")


class NotRowLocalError(ValueError):
    """A transformation mixes the rows of a table."""


@functools.lru_cache(maxsize=256)
def check_row_local(optimizer: TableOptimizer, dim: int) -> None:
    """Refuses a transformation whose update mixes rows.

    Args:
      optimizer: an optax transformation of rows `[rows, dim]`.
      dim: columns.

    Raises:
      NotRowLocalError: naming the operation, and what to use instead.
    """
    _check(optimizer, (_PROBE_ROWS, dim))


@functools.lru_cache(maxsize=256)
def check_elementwise(optimizer: TableOptimizer) -> None:
    """Refuses a transformation whose update mixes elements of any kind.

    Args:
      optimizer: an optax transformation.

    Raises:
      NotRowLocalError: naming the operation.
    """
    # With one axis only, what treats each row for itself treats each element so.
    _check(optimizer, (_PROBE_ROWS,))


def _check(optimizer: TableOptimizer, shape: tuple[int, ...]) -> None:
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    state = jax.eval_shape(optimizer.init, rows)
    try:
        jaxpr = jax.make_jaxpr(optimizer.update)(rows, state, rows)
    except Exception as error:
        raise NotRowLocalError(
            "The optimizer cannot be applied to the rows of one table: its update "
            f"fails on a single array with {type(error).__name__}: {error}"
        ) from error
    _check_jaxpr(jaxpr.jaxpr)


def _check_jaxpr(jaxpr: Any) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = _inner_jaxprs(equation.params)
        if inner and not name.startswith(_BY_POSITION):
            for inner_jaxpr in inner:
                _check_jaxpr(inner_jaxpr)
        elif not _keeps_rows(name, equation):
            raise NotRowLocalError(
                "The optimizer is not row-local: its operation "
                f"{name!r} mixes rows of a table, but only the "
                "rows of this step's ids, spread over shards, are there. Global norms, "
                "trust ratios, factored moments, noise and counts of finite values do "
                "this. Use transformations that treat each row for itself, or apply "
                "this one to the dense parameters only."
            )


def _inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "jaxpr") and hasattr(item, "consts"):
                found.append(item.jaxpr)
            elif hasattr(item, "eqns"):
                found.append(item)
    return found


def _keeps_rows(name: str, equation: Any) -> bool:
    inputs = [v.aval.shape for v in equation.invars if hasattr(v.aval, "shape")]
    outputs = [v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape")]
    has_rows = [_has_rows(shape) for shape in inputs]
    if not any(has_rows):
        if not any(_has_rows(shape) for shape in outputs):
            return True
        # Rows out of nothing: a constant for all of them is fine, numbers by
        # position are not, because positions depend on shards and rounds.
        return name in ("broadcast_in_dim", "broadcast", "full")
    if not all(_rows_first(shape) for shape in outputs):
        return False
    if not all(_rows_first(shape) for shape in inputs if _has_rows(shape)):
        return False
    params = equation.params
    if name.startswith(_ELEMENTWISE_REDUCTIONS):
        return 0 not in params["axes"]
    if name in _ALONG_AXIS:
        axes = params.get("dimensions", (params.get("axis", params.get("dimension")),))
        return 0 not in axes
    if name == "transpose":
        return params["permutation"][0] == 0
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][:1] == (0,)
    if name == "dot_general":
        return _dot_keeps_rows(params, inputs)
    if name in ("reshape", "squeeze", "expand_dims"):
        return True
    return _is_elementwise(inputs, outputs) and not name.startswith(_BY_POSITION)


def _dot_keeps_rows(params: dict[str, Any], inputs: list[tuple[int, ...]]) -> bool:
    (contract_left, contract_right), (batch_left, _) = params["dimension_numbers"]
    left, right = inputs
    if _has_rows(right):
        return False
    return _rows_first(left) and 0 not in contract_left and not batch_left


def _is_elementwise(
    inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]]
) -> bool:
    return all(
        shape == () or shape == output or _broadcasts(shape, output)
        for shape in inputs
        for output in outputs
    )


def _broadcasts(shape: tuple[int, ...], output: tuple[int, ...]) -> bool:
    return len(shape) == len(output) and all(
        size in (1, other) for size, other in zip(shape, output, strict=True)
    )


def _has_rows(shape: tuple[int, ...]) -> bool:
    return any(size % _PROBE_ROWS == 0 and size > 0 for size in shape)


def _rows_first(shape: tuple[int, ...]) -> bool:
    return bool(shape) and shape[0] == _PROBE_ROWS and not _has_rows(shape[1:])
