"""Checks that a dense optimizer and the tables of a model step together."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tpu_embedding.optimizers.probe import LOOKAHEAD, on_its_own
from tpu_embedding.optimizers.resolve import COLLECTING, find_state
from tpu_embedding.optimizers.table_rows import model_gradient_context
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import unchecked_values


def check_dense_optimizer(
    tx: optax.GradientTransformation,
    opt_state: Any,
    layers: Iterable[tuple[EmbeddingPlan, Mapping[str, Any]]],
    *,
    stacklevel: int,
) -> None:
    """Refuses a dense optimizer that steps less often than the tables do.

    It warns of one that looks at all dense gradients at once, as a clip by the global
    norm does, because it does not see those of the tables. It also warns of a decay of
    weights that the tables do not have.

    Args:
      tx: optimizer of the dense parameters.
      opt_state: state of the dense optimizer.
      layers: plan and slots of each layer of the model.
      stacklevel: frames from here to the user's line, for the warning.

    Raises:
      ValueError: if dense parameters would wait for several steps, and tables not; or
        if the optimizer is `optax.lookahead`.
    """
    if find_state(opt_state, ("LookaheadState",)):
        raise ValueError(
            "The optimizer of the dense parameters must take plain arrays, got "
            f"{LOOKAHEAD}. Give the optimizer inside of it alone: tx=fast_optimizer."
        )
    stacks = [
        (stack, slots[stack.name])
        for plan, slots in layers
        for stack in plan.trained_stacks
    ]
    if not stacks:
        return
    each_step = [
        stack
        for stack, state in stacks
        if stack.optimizer.gradient_steps == 1 and not find_state(state, COLLECTING)
    ]
    collecting = find_state(opt_state, COLLECTING)
    if collecting and each_step:
        raise ValueError(
            "The optimizer of the dense parameters must step with each update, as "
            f"table {each_step[0].tables[0].name!r} does, got one that collects the "
            f"gradients of several updates ({collecting}), such as optax.MultiSteps. "
            "Give the optimizer inside of it, add the gradients of the micro-batches, "
            "and update once:\n"
            "  parts = [te.value_and_grad(loss_fn)(model, *x)[1] for x in batches]\n"
            "  total = te.gradients.add(*parts)\n"
            "  gradients = te.gradients.scale(total, 1 / len(parts))\n"
            "  optimizer.update(model, gradients)\n"
            "Or let tables wait, too: te.optimizers.every_row(rule, gradient_steps=4)."
        )
    if _couples_arrays(tx):
        warnings.warn(
            "The optimizer of the dense parameters looks at all dense gradients at "
            "once, as optax.clip_by_global_norm and optax.apply_if_finite do, and does "
            "not see the gradients of the tables. Take that part out of it, and write "
            "for the whole model\n"
            "  gradients = te.gradients.clip_by_global_norm(gradients, 1.0)\n"
            "  optimizer.update(model, gradients)\n"
            "In place of apply_if_finite there are te.gradients.all_finite and "
            "te.gradients.update_if.",
            stacklevel=stacklevel,
        )
    rules = {stack.optimizer: stack.dim for stack, _ in stacks}
    if _decays(tx) and not any(_decays(*rule) for rule in rules.items()):
        warnings.warn(
            "The optimizer of the dense parameters decays their weights, as "
            "optax.adamw does, and no optimizer of the tables does: their rows do not "
            "decay. If they shall, give the layer such an optimizer: "
            "te.TPUEmbedding(features, optax.adamw(1e-3)). If not: "
            "warnings.filterwarnings('ignore', '.*decays their weights').",
            stacklevel=stacklevel,
        )


def warn_of_labels(
    optimizer: nnx.Optimizer,
    params: nnx.State,
    layers: Iterable[str],
    *,
    stacklevel: int,
) -> None:
    """Warns of an optimizer with a label or mask for tables, which it does not see.

    Args:
      optimizer: optimizer of the dense parameters.
      params: dense parameters of the model.
      layers: path of each embedding layer.
      stacklevel: frames from here to the user's line, for the warning.
    """
    if not find_state(optimizer.opt_state, ("MaskedState", "PartitionState")):
        return
    labelled = [path for path in layers if _labels(optimizer.tx, params, path)]
    if labelled:
        warnings.warn(
            "The optimizer of the dense parameters has labels or masks by name, as "
            "those of optax.multi_transform, which would treat the tables of the "
            f"layers {labelled} in their own way. It never gets tables: their "
            "optimizer is that of the layer, te.TPUEmbedding(features, optimizer). To "
            "keep tables fixed, make the layer without an optimizer.",
            stacklevel=stacklevel,
        )


def _labels(tx: optax.GradientTransformation, params: nnx.State, layer: str) -> bool:
    """Returns True if the update of a parameter in the layer would be a special one.

    It runs one step on small arrays with the names of the dense parameters and one
    more. An optimizer that takes no other names, as one with a tree of labels, is not
    found.
    """
    ones = {
        path: jnp.ones((1,) * getattr(variable.get_value(), "ndim", 0))
        for path, variable in nnx.to_flat_state(params)
    }
    if not any(leaf.ndim == 2 for leaf in ones.values()):
        return False
    name = (*filter(None, layer.split("/")), "tables")
    tree = nnx.from_flat_state({**ones, name: jnp.ones((1, 1))})
    updates = _update(tx, tree, tree)
    if updates is None:
        return False
    found = {path: leaf.item() for path, leaf in nnx.to_flat_state(updates)}
    return found.pop(name) not in found.values()


def _decays(tx: Any, dim: int = 2) -> bool:
    """Returns True if the update of an array without a gradient depends on its values.

    That leaves out noise, and moments that do not start at 0. It looks at the second
    update, since a rate may start at 0.
    """
    rows = jnp.ones((2, dim))
    one, other = (_update(tx, 0 * rows, x, num_steps=2) for x in (rows, -rows))
    return one is not None and other is not None and not np.array_equal(one, other)


def _couples_arrays(tx: optax.GradientTransformation) -> bool:
    """Returns True if the update of an array changes with the gradient of another one.

    It runs one step on two small arrays. An optimizer that takes no such arrays, as one
    with labels by name, is not found.
    """
    ones = jnp.ones((2, 2))
    with unchecked_values():
        usual, *others = [
            _update(tx, [ones, other * ones], [ones, ones])
            for other in (1.0, 1e10, jnp.nan)
        ]
    if usual is None:
        return False
    return any(not np.array_equal(usual[0], other[0]) for other in others)


def _update(tx: Any, gradients: Any, params: Any, *, num_steps: int = 1) -> Any:
    """Returns the latest update of an optimizer; None if it takes no such arrays."""
    try:
        # The layer knows the norm of the whole model, and tells it to rules that ask.
        with on_its_own(), model_gradient_context(lambda: jnp.ones(())):
            state, updates = tx.init(params), None
            for _ in range(num_steps):
                updates, state = tx.update(gradients, state, params)
        return jax.tree.map(np.asarray, updates)
    except Exception:  # The optimizer may be any function, and raise anything.
        return None
