"""Finds out whether a dense optimizer updates one array by the gradient of another.

A clip by the global norm does, and so does a check that all gradients are finite. In a
model with tables, such an optimizer sees the gradients of the dense parameters only.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.analysis.rule_program import RuleOperation, read_program
from tpu_embedding.optimizers.analysis.walker import called_programs, walk
from tpu_embedding.optimizers.table_rows import model_gradient_context

_TWO_ARRAYS: Final = [jax.ShapeDtypeStruct((2, 2), jnp.float32)] * 2

_MAX_ARRAYS: Final = 64
"""Arrays of a model for which a trace takes a tenth of a second; 300 take seconds."""

Sources = frozenset[int]
"""The arrays, by number, on whose gradients a value depends."""


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
        jaxpr = jax.make_jaxpr(transformation.update)(shapes, state, shapes)
    update = read_program(jaxpr)
    num_arrays, num_states = map(len, map(jax.tree.leaves, (shapes, state)))
    of_gradients = [Sources({i}) for i in range(num_arrays)]
    of_state = [Sources()] * num_states
    while True:
        of_inputs = [*of_gradients, *of_state, *[Sources()] * num_arrays]
        found = list(map(_sources, walk(update, of_inputs, _flow)))
        of_updates, of_new_state = found[:num_arrays], found[num_arrays:]
        if any(s - own for s, own in zip(of_updates, of_gradients, strict=True)):
            return True
        grown = [a | b for a, b in zip(of_state, of_new_state, strict=True)]
        if grown == of_state:
            return False
        of_state = grown


def _flow(operation: RuleOperation, values: list[Any]) -> list[Sources]:
    """Returns the gradients that each result of an operation depends on."""
    sources = list(map(_sources, values))
    if operation.name != "cond":
        return [Sources().union(*sources)] * len(operation.outputs)
    branches = [
        map(_sources, walk(branch, sources[operands], _flow))
        for branch, operands in called_programs(operation)
    ]
    return [sources[0].union(*of_each) for of_each in zip(*branches, strict=True)]


def _sources(value: Any) -> Sources:
    """Returns the sources of a value; a constant has none."""
    return value if isinstance(value, frozenset) else Sources()
