"""Checks that a dense optimizer and the tables of a model step together."""

from collections.abc import Iterable, Mapping
from typing import Any

from tpu_embedding.optimizers.probe import LOOKAHEAD
from tpu_embedding.optimizers.resolve import COLLECTING, find_state
from tpu_embedding.plan.plan import EmbeddingPlan


def check_dense_optimizer(
    opt_state: Any, layers: Iterable[tuple[EmbeddingPlan, Mapping[str, Any]]]
) -> None:
    """Rejects a dense optimizer that steps less often than the tables do.

    Args:
      opt_state: state of the dense optimizer.
      layers: plan and slots of each layer of the model.

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
            "Or let the tables wait as well: te.optimizers.every_row(rule, "
            "gradient_steps=4)."
        )
