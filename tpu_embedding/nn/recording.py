"""Records the lookups of a loss, so that the tables get gradients.

A table's gradient is sparse, so no derivative of JAX can return it. Flax layers record
their calls instead. Each call gets *taps*: arrays of zeros, one per activation, whose
derivatives equal those of the activations. The routing of the call and the derivatives
of its taps give the gradients of the tables.

`answer_call` is the recorder of both Flax interfaces. The layers differ only in where
they keep what it returns: in a variable (NNX), or in an object (Linen).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.tracers import current_trace
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.functional import steps
from tpu_embedding.functional.by_feature import row_numbers
from tpu_embedding.gradients import Gradients, TableGradients, add
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import replicate, user_mesh, zeros_like
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import LookupStats


def differentiate(
    run: Callable[[Any, Any], Any], dense: Any, plans: dict[str, EmbeddingPlan]
) -> tuple[Any, Any, Gradients]:
    """Computes a loss and its gradients by dense parameters and tables.

    Args:
      run: `(dense, taps) -> (loss, (aux, calls))`, where `calls` has a tuple per layer.
        If taps is None, the tuple holds the activations of each call. Otherwise taps
        has the structure of these tuples, and `calls` the routing of each call.
      dense: pytree to differentiate by.
      plans: path of each layer to its plan.

    Returns:
      Loss, aux and gradients.
    """
    with user_mesh(plans.values()):
        _, (_, shapes) = jax.eval_shape(lambda dense: run(dense, None), dense)
        taps = zeros_like(shapes)
        compute = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)
        (loss, (aux, calls)), (by_dense, cotangents) = compute(dense, taps)
        tables = {
            path: add_calls(calls[path], cotangents[path], plan)
            for path, plan in plans.items()
        }
    return loss, aux, Gradients(dense=by_dense, tables=tables)


def loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the two parts of what a loss function returns; None without `has_aux`.

    Raises:
      TypeError: if it is another number of values, or the loss is no scalar.
    """
    owner = "value_and_grad: loss_fn must return"
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise TypeError(
            f"{owner} a pair (loss, aux) with has_aux=True, got "
            f"{describe_value(result)}. Write return loss, aux."
        )
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, tuple | list):
        raise TypeError(
            f"{owner} one scalar, got a {type(loss).__name__} of {len(loss)} values. "
            "Write te.value_and_grad(loss_fn, has_aux=True) for a pair (loss, aux)."
        )
    if getattr(loss, "shape", None) != () and not isinstance(loss, float):
        raise TypeError(
            f"{owner} a scalar loss, got {describe_value(loss)}. Write return "
            "jnp.mean(losses)."
        )
    return loss, aux


def add_calls(
    routings: tuple[steps.Routing, ...],
    cotangents: tuple[Any, ...],
    plan: EmbeddingPlan,
) -> TableGradients:
    """Returns the gradients of a layer's tables, summed over its calls.

    Args:
      routings: routing of each call.
      cotangents: derivatives by the activations of each call.
      plan: plan of the layer.
    """
    of_calls = [
        steps.compute_gradients(routing, cotangent, plan)
        for routing, cotangent in zip(routings, cotangents, strict=True)
    ]
    return add(*of_calls) if of_calls else TableGradients({}, plan)


def answer_call(
    taps: tuple[Any, ...] | None,
    number: int,
    features: Any,
    plan: EmbeddingPlan,
    look_up: Callable[[], steps.LookupResult],
) -> tuple[Any, LookupStats | None, Any]:
    """Answers one call of a layer inside a loss.

    Args:
      taps: the taps of each call; None in the run that finds their shapes.
      number: number of the call, from 0.
      features: features of the call.
      plan: plan of the features.
      look_up: looks them up.

    Returns:
      Activations, stats, and the record of the call: its routing. In the run that finds
      shapes, the activations and the record are zeros, and there are no stats.

    Raises:
      TypeError: if the features hold ids whose rows are not known.
    """
    row_numbers(features, plan)  # raises unless rows are known
    if taps is None:
        zeros = zeros_like(steps.activation_shapes(features, plan))
        return zeros, None, zeros
    result = look_up()
    activations = attach_taps(taps[number], result.activations)
    return activations, result.stats, result.routing


def have_same_values(expected: Any, found: Any) -> jax.Array:
    """Returns True if two pytrees have the same structure and the same values."""
    leaves, structure = jax.tree.flatten(expected)
    others, other_structure = jax.tree.flatten(found)
    if structure != other_structure:
        return jnp.array(False)
    pairs = zip(leaves, others, strict=True)
    return jnp.all(jnp.array([jnp.array_equal(a, b) for a, b in pairs]))


def is_mapped(tree: Any) -> bool:
    """Returns True if `jax.vmap` or `nnx.vmap` maps an array of a pytree."""
    # JAX does not export the class of such tracers.
    return any(type(leaf).__name__ == "BatchTracer" for leaf in jax.tree.leaves(tree))


def is_differentiated() -> bool:
    """Returns True inside a function that `jax.grad` or its like differentiates."""
    # JAX exports neither the traces nor their classes.
    reference = getattr(current_trace(), "_trace_ref", lambda: None)
    trace = reference()
    while trace is not None:
        if type(trace).__name__ in ("JVPTrace", "LinearizeTrace"):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def attach_taps(taps: Any, activations: Any) -> Any:
    """Returns the activations, and sends their derivatives to the taps as well."""
    return jax.tree.map(_attach_tap, taps, activations)


@jax.custom_vjp
def _attach_tap(tap: jax.Array, activation: jax.Array) -> jax.Array:
    del tap
    return activation


def _attach_tap_forward(tap, activation):
    del tap
    return activation, None


def _attach_tap_backward(_, cotangent):
    # The activation itself passes it on to learned weights of ids.
    return cotangent, cotangent


_attach_tap.defvjp(_attach_tap_forward, _attach_tap_backward)


def guard_activations(activations: Any, guard: jax.Array, message: str) -> Any:
    """Returns the activations; raises the message if the guard is differentiated."""
    return jax.tree.map(lambda x: _guard(message, x, guard), activations)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _guard(message: str, activation: jax.Array, guard: jax.Array) -> jax.Array:
    del message, guard
    return activation


def _guard_jvp(message, primals, tangents):
    activation, _ = primals
    by_activation, by_guard = tangents
    if not isinstance(by_guard, SymbolicZero):
        raise ValueError(message)
    if isinstance(by_activation, SymbolicZero):
        by_activation = jnp.zeros_like(activation)
    return activation, by_activation


_guard.defjvp(_guard_jvp, symbolic_zeros=True)


def without_derivative(tables: Any, message: str) -> Any:
    """Returns the tables; raises the message if they are differentiated."""
    return _without_derivative(message, tables)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_derivative(message: str, tables: Any) -> Any:
    del message
    return tables


@_without_derivative.defjvp
def _refuse_derivative(message, primals, tangents):
    del primals, tangents
    raise ValueError(message)


def replicate_on_mesh(tree: Any, plan: EmbeddingPlan) -> Any:
    """Replicates arrays that lie on one device over the mesh; tables stay.

    The first step then has the same shardings as the second, and compiles once.
    """

    def place(leaf):
        if isinstance(leaf, PackedRows) or not isinstance(leaf, jax.Array):
            return leaf
        if isinstance(leaf, Tracer) or leaf.committed:
            return leaf
        return replicate(leaf, plan)

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, PackedRows))
