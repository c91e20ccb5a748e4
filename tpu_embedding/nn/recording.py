"""Records the lookups of a loss, so that the tables get gradients.

A table's gradient is sparse, so no derivative of JAX can return it. Flax layers record
their calls instead. Each call gets *taps*: arrays of zeros, one per activation, whose
derivatives equal those of the activations. The routing of the call and the derivatives
of its taps give the gradients of the tables.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.functional import steps
from tpu_embedding.functional.dynamic_ids import rows_of_batch
from tpu_embedding.gradients import Gradients, TableGradients, add, global_norm
from tpu_embedding.optimizers.table_rows import model_gradient_context
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import replicate, user_mesh, zeros_like
from tpu_embedding.rows.packed_rows import PackedRows


def norm_of_model(
    gradients: Gradients, plans: Iterable[EmbeddingPlan]
) -> jax.Array | None:
    """Returns the norm of all gradients of a model; None if no table asks for it."""
    if any(map(steps.takes_model_norm, plans)):
        return global_norm(gradients)
    return None


@contextlib.contextmanager
def norm_for_dense(gradients: Gradients) -> Iterator[None]:
    """Lets a dense optimizer with `global_clipnorm` ask for the norm of the model."""
    with model_gradient_context(lambda: jnp.square(global_norm(gradients))):
        yield


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


def zero_activations(features: Any, plan: EmbeddingPlan) -> Any:
    """Returns zeros of the shapes of a batch's activations inside a loss."""
    rows_of_batch(features, plan)  # refuses ids
    return zeros_like(steps.activation_shapes(features, plan))


def is_mapped(tree: Any) -> bool:
    """Returns True if `jax.vmap` or `nnx.vmap` maps an array of a pytree."""
    # JAX does not export the class of such tracers.
    return any(type(leaf).__name__ == "BatchTracer" for leaf in jax.tree.leaves(tree))


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
