"""Records the lookups in a loss, because JAX can't return sparse derivatives.

Each layer call gets *taps*: arrays of zeros that receive the derivatives of its
activations. These derivatives and the recorded routing give the gradients of the tables
(CONTRIBUTING.md, "The path of a gradient"). A loss runs twice, because the first run
finds the calls and the shapes of the taps.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.tracers import current_trace
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive

from tpu_embedding.argument_checks import invalid
from tpu_embedding.functional import steps
from tpu_embedding.gradients import Gradients, TableGradients, add
from tpu_embedding.inputs.shard_inputs import Batch
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import replicate, user_mesh, zeros_like
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import LookupStats

CALL_OUTSIDE: Final = (
    "The loss calls a TPUEmbedding inside a transformation such as jax.vmap or "
    "nnx.cond, which loses the gradient of its tables. Call the layer before it, on "
    "the whole batch (FeatureConfig.output_shape keeps axes), or pass the model "
    "itself, no copy, to nnx.jit or nnx.remat."
)
READ_WITHOUT_LOOKUP: Final = (
    "The loss reads the tables of an embedding layer without a lookup, which has no "
    "gradient. Use weight_decay_factor of the tables' optimizer for decay, te.nn.top_k "
    "for the best rows, nnx.Embed for a softmax over all rows, and "
    "jax.lax.stop_gradient(layer.tables.get_value()) for a metric."
)
UNEQUAL_RUNS: Final = (
    "The loss must call its TPUEmbedding layers equally often whenever it runs, but "
    "the second of te.value_and_grad's two runs made a different number of calls. Let "
    "arguments of the loss decide, not Python variables that it changes."
)


Where = Literal["outer", "inner"]
"""Where a call is made: in the loss itself, or inside an inner transformation."""
Calls = dict[tuple[str, Where], list[Any]]
"""Maps path and `Where` to one value per call: a tap, its derivative, or a record."""


class Recorder:
    """The layer calls in one run of a loss or a served method.

    `taps` is None in the run that finds tap shapes, and when a method is served.
    """

    def __init__(self, number: int, paths: Iterable[str], taps: Calls | None):
        self._trace = current_trace()
        # Layers store the number and not the recorder. The number is equal in every
        # run, so JAX compiles an inner `nnx.jit` once. It is also equal in all copies
        # of a layer, so their calls are numbered together.
        self.number, self.taps = number, taps
        # A record can leave an inner transformation, such as `nnx.jit`, only as a value
        # of the trace. Layers collect these inner records until the run ends.
        self.calls: Calls = {(path, x): [] for path in paths for x in get_args(Where)}
        # Has one entry, by path, for each layer that used its prefetched lookup. It is
        # True if the call had the same features.
        self.agreements: dict[str, jax.Array] = {}

    def is_current(self) -> bool:
        """Tells if the caller is outside of inner transformations."""
        return current_trace() == self._trace

    def taps_of(self, path: str, where: Where) -> list[Any] | None:
        return None if self.taps is None else self.taps[path, where]

    def all_calls(self, path: str) -> list[Any]:
        return self.calls[path, "outer"] + self.calls[path, "inner"]


# Several recorders can be open, because a loss may contain `te.value_and_grad` for a
# different model.
_OPEN_RECORDERS: Final = contextvars.ContextVar[tuple[Recorder, ...]](
    "open_recorders", default=()
)


@contextlib.contextmanager
def open_recorder(paths: Iterable[str], taps: Calls | None) -> Iterator[Recorder]:
    """Opens a recorder, which layers find by its number."""
    open_recorders = _OPEN_RECORDERS.get()
    recorder = Recorder(len(open_recorders), paths, taps)
    token = _OPEN_RECORDERS.set((*open_recorders, recorder))
    try:
        yield recorder
    finally:
        _OPEN_RECORDERS.reset(token)


def recorder_of_trace(number: int) -> Recorder | None:
    """Finds the open recorder with this number, or None in inner transformations."""
    open_recorders = _OPEN_RECORDERS.get()
    if number < len(open_recorders) and open_recorders[number].is_current():
        return open_recorders[number]
    return None


def differentiate(
    call_loss: Callable[[Any, Any, Recorder], tuple[Any, Any]],
    dense: Any,
    tables: Any,
    plans: dict[str, EmbeddingPlan],
    has_aux: bool,
) -> tuple[Any, Any, Gradients]:
    """Computes the result of a loss, with all gradients.

    `call_loss` maps `(dense, tables, recorder)` to `(result, rest)`. `result` is what
    the user loss returned. `rest` is what else to keep from the second run. In the
    first run, the recorder gets zeros shaped like the activations. In the second run,
    it gets routings.
    """

    def run(dense: Any, tables: Any, taps: Any) -> tuple[Any, Any]:
        with open_recorder(plans, taps) as recorder:
            result, rest = call_loss(dense, tables, recorder)
        loss = _loss_of(result, has_aux)
        return loss, (result[1] if has_aux else None, rest, recorder.calls)

    with user_mesh(plans.values()):
        taps = zeros_like(_find_calls(run, dense, tables))
        # Argument 1 is left out: the tables' gradients come from the taps.
        compute = jax.value_and_grad(run, argnums=(0, 2), has_aux=True)
        (loss, (aux, rest, calls)), (by_dense, by_taps) = compute(dense, tables, taps)
        if any(len(calls[key]) != len(taps[key]) for key in taps):
            raise ValueError(UNEQUAL_RUNS)
        gradients = {}
        for path, plan in plans.items():
            call_gradients = [
                steps.compute_gradients(routing, cotangent, plan)
                for where in get_args(Where)
                for routing, cotangent in zip(
                    calls[path, where], by_taps[path, where], strict=True
                )
            ]
            gradients[path] = TableGradients({}, plan)
            if call_gradients:
                gradients[path] = add(*call_gradients)
    result = (loss, aux) if has_aux else loss
    return result, rest, Gradients(dense=by_dense, tables=gradients)


def _find_calls(run: Callable[[Any, Any, Any], Any], dense: Any, tables: Any) -> Calls:
    """Finds the activation shapes for each call, without computing activations."""
    # The trace of a forward derivative also reveals two mistakes. Lookups don't read
    # tables in this run, so a derivative means that the loss itself reads tables. And
    # if a copy or a transformation lost a call's record, the trace still has the call.

    def find(dense: Any, tables: Any) -> Any:
        def loss_and_calls(tables: Any) -> Any:
            loss, (*_, calls) = run(dense, tables, None)
            # Only the loss counts: `aux` may read tables, for a metric.
            return without_derivative(READ_WITHOUT_LOOKUP, loss), calls

        # Only the presence of a tangent counts, so any float array will do. JAX demands
        # float0 for integers.
        tangents = jax.tree.map(
            lambda leaf: (
                leaf
                if jnp.issubdtype(leaf.dtype, jnp.inexact)
                else np.zeros(leaf.shape, jax.dtypes.float0)
            ),
            tables,
        )
        return jax.jvp(loss_and_calls, (tables,), (tangents,), has_aux=True)[2]

    traced = jax.jit(find).trace(dense, tables)
    shapes = traced.out_info
    if _count_calls(traced.jaxpr) != sum(map(len, shapes.values())):
        raise ValueError(CALL_OUTSIDE)
    return shapes


_call = Primitive("embedding_call")
"""Marks each call's activations in the trace that `_find_calls` makes."""
_call.multiple_results = True
_call.def_abstract_eval(lambda *avals: avals)

_RUN_ONCE: Final = frozenset({"jit", "pjit", "checkpoint", "remat", "remat2"})
"""Names of the primitives of `jit` and `checkpoint` in several JAX versions."""


def _count_calls(jaxpr: Any) -> int:
    """Counts layer calls in a trace; rejects calls in loops or only some branches."""
    count = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive is _call:
            count += 1
            continue
        inner = [
            _count_calls(leaf)
            for leaf in jax.tree.leaves(list(equation.params.values()))
            if hasattr(leaf, "eqns")
        ]
        # Only one branch runs, and all branches make equally many calls.
        if equation.primitive.name == "cond" and len(set(inner)) == 1:
            count += inner[0]
        elif any(inner) and equation.primitive.name not in _RUN_ONCE:
            raise ValueError(CALL_OUTSIDE)
        else:
            count += sum(inner)
    return count


def _loss_of(result: Any, has_aux: bool) -> Any:
    owner = "value_and_grad: loss_fn"
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        rule = "return a pair (loss, aux) with has_aux=True"
        raise invalid(owner, rule, result, "Write return loss, aux.", TypeError)
    loss = result[0] if has_aux else result
    if isinstance(loss, tuple | list):
        line = "te.value_and_grad(loss_fn, has_aux=True) for a pair (loss, aux)"
        rule = f"return one scalar and not {len(loss)} values"
        raise invalid(owner, rule, loss, f"Write {line}.", TypeError)
    if getattr(loss, "shape", None) != () and not isinstance(loss, float):
        line = "Write return jnp.mean(losses)."
        raise invalid(owner, "return a scalar loss", loss, line, TypeError)
    return loss


def answer_call(
    taps: list[Any] | None,
    records: list[Any],
    batch: Batch,
    look_up: Callable[[], steps.LookupResult],
) -> tuple[Any, LookupStats | None]:
    """Answers one layer call inside a loss, and adds its record to `records`.

    The record is the routing. In the run that finds shapes, `taps` is None, record and
    activations are zeros, and the stats are None.
    """
    batch.row_numbers()  # raises unless rows are known
    if taps is None:
        zeros = zeros_like(steps.activation_shapes(batch, batch.plan))
        records.append(zeros)
        leaves, structure = jax.tree.flatten(zeros)
        return structure.unflatten(_call.bind(*leaves)), None
    if len(records) >= len(taps):
        raise ValueError(UNEQUAL_RUNS)
    tap, result = taps[len(records)], look_up()
    records.append(result.routing)
    return jax.tree.map(_attach_tap, tap, result.activations), result.stats


def is_mapped(tree: Any) -> bool:
    """Tells if `jax.vmap` or `nnx.vmap` maps an array in a pytree."""
    # JAX does not export the class of such tracers.
    return any(type(leaf).__name__ == "BatchTracer" for leaf in jax.tree.leaves(tree))


def is_differentiated() -> bool:
    """Tells if `jax.grad` or the like differentiates the calling function."""
    # JAX exports neither the traces nor their classes.
    reference = getattr(current_trace(), "_trace_ref", lambda: None)
    trace = reference()
    # An inner transformation such as `vmap` has the derivative's trace as its parent.
    while trace is not None:
        if type(trace).__name__ in ("JVPTrace", "LinearizeTrace"):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


@jax.custom_vjp
def _attach_tap(tap: jax.Array, activation: jax.Array) -> jax.Array:
    """Passes the activation on, and copies its derivative to the tap."""
    del tap
    return activation


def _attach_tap_forward(tap, activation):
    del tap
    return activation, None


def _attach_tap_backward(_, cotangent):
    # The activation also needs the derivative, because weights of ids may be learned.
    return cotangent, cotangent


_attach_tap.defvjp(_attach_tap_forward, _attach_tap_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def guard_activation(
    message: str, activation: jax.Array, guard: jax.Array
) -> jax.Array:
    """Passes the activation on; raises the message if the guard is differentiated."""
    # The guard is a Linen parameter. Plain `jax.grad` differentiates all of `params`,
    # including the guard, and would leave out the tables.
    del message, guard
    return activation


def _guard_jvp(message, primals, tangents):
    activation, _ = primals
    by_activation, by_guard = tangents
    # With `symbolic_zeros`, only guards that aren't differentiated get `SymbolicZero`.
    if not isinstance(by_guard, SymbolicZero):
        raise ValueError(message)
    if isinstance(by_activation, SymbolicZero):
        by_activation = jnp.zeros_like(activation)
    return activation, by_activation


guard_activation.defjvp(_guard_jvp, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_derivative(message: str, tree: Any) -> Any:
    """Passes arrays on; raises the message if they are differentiated."""
    del message
    return tree


@without_derivative.defjvp
def _reject_derivative(message, primals, tangents):
    del primals, tangents
    raise ValueError(message)


def replicate_on_mesh(tree: Any, plan: EmbeddingPlan) -> Any:
    """Replicates single-device arrays over the mesh, except tables."""

    # Replication gives a step's first and second call equal shardings, so it compiles
    # once.
    def place(leaf):
        if isinstance(leaf, PackedRows) or not isinstance(leaf, jax.Array):
            return leaf
        # Committed arrays don't move: the user has placed them, perhaps sharded.
        if isinstance(leaf, Tracer) or leaf.committed:
            return leaf
        return replicate(leaf, plan)

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, PackedRows))
