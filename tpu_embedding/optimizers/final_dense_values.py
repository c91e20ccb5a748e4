"""Sets variables to their moving averages, at the end of training."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from tpu_embedding.optimizers.rules._adafactor_state import (
    AdafactorState,
    CollectedGradients,
)
from tpu_embedding.optimizers.rules._averages import catch_up

Params = TypeVar("Params")


def finalize_variable_values(params: Params, state: Any) -> tuple[Params, Any]:
    """Sets dense parameters to the moving averages that `adafactor` keeps of them.

    It is `finalize_variable_values` of Keras' optimizers, for arrays outside of a
    layer. For tables there is `tpu_embedding.functional.finalize_variable_values`, and
    for a whole model `tpu_embedding.Optimizer.finalize_variable_values`.

    Args:
      params: pytree of dense parameters, as the optimizer's `init` took it.
      state: the optimizer's state. `adafactor(use_ema=True)` may be anywhere in it.

    Returns:
      New parameters, and the state with which training may continue. Parameters
      without averages stay as they are; without `use_ema`, so do all, as in Keras.

    Raises:
      ValueError: if the averages are those of other parameters.

    Example:
      >>> from tpu_embedding import optimizers
      >>> optimizer = optimizers.adafactor(0.5, use_ema=True, ema_momentum=0.5)
      >>> params = {"bias": jnp.ones(1)}
      >>> state = optimizer.init(params)
      >>> for _ in range(2):
      ...     updates, state = optimizer.update(params, state, params)
      ...     params = {"bias": params["bias"] + updates["bias"]}
      >>> final, state = finalize_variable_values(params, state)
      >>> round(float(params["bias"][0]), 3), round(float(final["bias"][0]), 3)
      (0.334, 0.417)
    """
    arrays, tree = jax.tree.flatten(params)

    def swap(state: Any, waiting_steps: Any) -> Any:
        def swap_node(node: Any) -> Any:
            if isinstance(node, CollectedGradients):
                # The steps that only collect gradients average as well.
                inner = swap(node.steps.inner_opt_state, node.steps.mini_step)
                return CollectedGradients(node.steps._replace(inner_opt_state=inner))
            if not _is_averaged(node):
                return node
            new, node = _swap_in_averages(node, arrays, tree, waiting_steps)
            arrays[:] = new
            return node

        is_node = lambda x: isinstance(x, CollectedGradients) or _is_averaged(x)  # noqa: E731
        return jax.tree.map(swap_node, state, is_leaf=is_node)

    state = swap(state, 0)
    return jax.tree.unflatten(tree, arrays), state


def has_averages(state: Any) -> bool:
    """Returns True if an optimizer's state holds moving averages of variables."""
    return any(map(_is_averaged, jax.tree.leaves(state, is_leaf=_is_averaged)))


def _swap_in_averages(
    node: AdafactorState, arrays: list[Any], tree: Any, waiting_steps: Any
) -> tuple[list[Any], AdafactorState]:
    """Returns the final arrays, and the state that holds them as averages."""
    try:
        fields = [
            tree.flatten_up_to(x)
            for x in (
                node.averages,
                node.count,
                node.average_counts,
                node.average_momentum,
            )
        ]
    except ValueError as error:
        raise ValueError(
            "finalize_variable_values needs the parameters that the optimizer was made "
            f"for, got others: {error}"
        ) from error
    new_arrays, averages, counts = [], [], []
    for array, average, count, seen, momentum in zip(arrays, *fields, strict=True):
        if not hasattr(average, "dtype"):  # Another optimizer trains this array.
            new_arrays.append(array)
            averages.append(average)
            counts.append(seen)
            continue
        missed = waiting_steps
        if seen is not None:
            missed = (missed + count - seen)[:, None]
            seen = jnp.full_like(seen, count)
        value = catch_up(average, array, missed, momentum)
        new_arrays.append(value.astype(array.dtype))
        averages.append(value)
        counts.append(seen)
    node = node._replace(
        averages=tree.unflatten(averages), average_counts=tree.unflatten(counts)
    )
    return new_arrays, node


def _is_averaged(node: Any) -> bool:
    return isinstance(node, AdafactorState) and bool(jax.tree.leaves(node.averages))
