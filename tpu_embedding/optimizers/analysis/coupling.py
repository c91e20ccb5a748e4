"""Finds out whether a dense optimizer updates one array by the gradient of another.

A clip by the global norm does, and so does a check that all gradients are finite. In a
model with tables, such an optimizer sees the gradients of the dense parameters only.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.extend as jex
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.table_rows import model_gradient_context

_TWO_ARRAYS: Final = [jax.ShapeDtypeStruct((2, 2), jnp.float32)] * 2

_MAX_ARRAYS: Final = 64
"""Arrays of a model for which a trace takes a tenth of a second; 300 take seconds."""

Sources = int
"""Set of gradients as bits: bit `i` is that of array `i`."""


def couples_arrays(transformation: optax.GradientTransformation, params: Any) -> bool:
    """Returns True if the update of an array depends on the gradient of another one.

    The transformation is traced for two small arrays, in milliseconds, however large
    the model is. One that takes no other parameters than the model's, as with labels by
    name, is traced for these if they are few. State counts, too: a gradient may reach
    another array in a later step.

    Args:
      transformation: optimizer of the dense parameters.
      params: these parameters; arrays, or their shapes.

    Returns:
      False also if the transformation cannot be traced.

    Example:
      >>> couples_arrays(optax.adam(0.1), {"kernel": jnp.ones(2)})
      False
      >>> couples_arrays(optax.apply_if_finite(optax.sgd(0.1), 3), jnp.ones(2))
      True
    """
    is_small = len(jax.tree.leaves(params)) <= _MAX_ARRAYS
    for tree in (_TWO_ARRAYS, params) if is_small else (_TWO_ARRAYS,):
        try:
            return _is_coupled(transformation, tree)
        except Exception:  # The rule may be any function, and raise anything.
            continue
    return False


def _is_coupled(transformation: optax.GradientTransformation, params: Any) -> bool:
    shapes = jax.eval_shape(lambda tree: tree, params)
    state = jax.eval_shape(transformation.init, shapes)
    # The layer knows the norm of the whole model, and tells it to rules that ask.
    with model_gradient_context(lambda: jnp.zeros(())):
        update = jax.make_jaxpr(transformation.update)(shapes, state, shapes).jaxpr
    num_arrays, num_states = map(len, map(jax.tree.leaves, (shapes, state)))
    of_gradients = [1 << i for i in range(num_arrays)]
    of_state = [0] * num_states
    while True:
        of_inputs = [*of_gradients, *of_state, *[0] * num_arrays]
        found = _flow(update, of_inputs)
        of_updates, of_new_state = found[:num_arrays], found[num_arrays:]
        if any(s & ~own for s, own in zip(of_updates, of_gradients, strict=True)):
            return True
        grown = [a | b for a, b in zip(of_state, of_new_state, strict=True)]
        if grown == of_state:
            return False
        of_state = grown


def _flow(jaxpr: Any, of_inputs: Sequence[Sources]) -> list[Sources]:
    """Returns the gradients that each output of a jaxpr depends on."""
    known = dict(zip(jaxpr.invars, of_inputs, strict=True))

    def sources(variable: Any) -> Sources:
        is_literal = isinstance(variable, jex.core.Literal)
        return 0 if is_literal else known.get(variable, 0)

    for eqn in jaxpr.eqns:
        found = _flow_of_operation(eqn, [sources(x) for x in eqn.invars])
        known.update(zip(eqn.outvars, found, strict=True))
    return [sources(x) for x in jaxpr.outvars]


def _flow_of_operation(eqn: Any, of_inputs: list[Sources]) -> list[Sources]:
    """Returns the gradients that each result of an operation depends on."""
    called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if eqn.primitive.name == "cond":
        branches = [_flow(x.jaxpr, of_inputs[1:]) for x in eqn.params["branches"]]
        merged = zip(*branches, strict=True)
        return [_union((of_inputs[0], *of_each)) for of_each in merged]
    if eqn.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call"):
        return _flow(getattr(called, "jaxpr", called), of_inputs)
    return [_union(of_inputs)] * len(eqn.outvars)


def _union(sets: Sequence[Sources]) -> Sources:
    result = 0
    for each in sets:
        result |= each
    return result
