"""Checks that the dense optimizer, which never sees the tables, suits them.

An optax wrapper meant for the whole model, such as a clip by global norm, would act on
the dense parameters alone. `te.Optimizer` and `te.linen.TrainState` extend the wrapper
to the tables if they can. Otherwise, they raise an error or warn at construction.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import optax

from tpu_embedding.optimizers.probe import LOOKAHEAD
from tpu_embedding.optimizers.resolve import COLLECTING, find_state
from tpu_embedding.plan.plan import EmbeddingPlan

_SKIPPING: Final = "ApplyIfFiniteState"
_OF_WHOLE_MODEL: Final[Mapping[str, str]] = {
    "clip_by_global_norm": "gradients = te.gradients.clip_by_global_norm(gradients, "
    "max_norm) before the update, and remove it",
    "normalize_by_update_norm": "gradients = te.gradients.scale(gradients, 1 / "
    "te.gradients.global_norm(gradients)) before the update, and remove it",
    "zero_nans": "tx=optax.apply_if_finite(tx, max_consecutive_errors=5), which skips "
    "such a step for the whole model",
}
"""Name of each transformation whose meaning includes the tables, and the fix."""


def check_dense_optimizer(
    owner: str,
    tx: optax.GradientTransformation,
    opt_state: Any,
    plans: Mapping[str, EmbeddingPlan],
    slots: Mapping[str, Any],
    stacklevel: int,
) -> None:
    """Rejects dense optimizers that tables can't follow; warns of tables left out.

    `stacklevel` counts the frames between this function and the user's line.
    """
    # optax.lookahead updates pairs of fast and slow parameters, not arrays.
    if find_state(opt_state, ("LookaheadState",)):
        raise ValueError(
            "The optimizer of the dense parameters must take plain arrays, got "
            f"{LOOKAHEAD}. Pass only the inner optimizer: tx=fast_optimizer."
        )
    _check_collects(opt_state, plans, slots)
    if _skips_part(opt_state):
        raise ValueError(
            f"{owner}: tx must skip steps that are not finite for all parameters, got "
            "a skip of a part, which would not skip the tables. Write "
            "tx=optax.apply_if_finite(tx, max_consecutive_errors=5), with the whole "
            "optimizer inside, or te.gradients.update_if(te.gradients.all_finite("
            "gradients), update, state)."
        )
    # The state shows most wrappers. A clip has an empty state, but it can be found by
    # the names of its functions. It would only miss the tables, so a warning is enough.
    for name in sorted({*_names(tx.update)} & {*_OF_WHOLE_MODEL}):
        warnings.warn(
            f"{owner}: optax.{name} in tx sees only the dense parameters, not the "
            f"tables. Write {_OF_WHOLE_MODEL[name]}.",
            stacklevel=stacklevel + 1,
        )
    fixed = sorted(
        table.name
        for plan in plans.values()
        for stack in plan.stacks
        for table in stack.tables
        if not stack.is_trained
        and table.config.optimizer is None
        and table.config.dtype_name != "int8"  # such tables are for lookup only
    )
    if fixed:
        warnings.warn(
            f"{owner}: tables {fixed} have no optimizer, so they stay fixed. Pass an "
            "optimizer to the layer or to TableConfig. To keep a table fixed, write "
            "TableConfig(optimizer=optax.set_to_zero()).",
            stacklevel=stacklevel + 1,
        )


def with_extra_args(tx: Any) -> Any:
    """Lets an optimizer accept, and perhaps ignore, arguments such as `value`."""
    # optax.MultiSteps is not a GradientTransformation, and passes the arguments on.
    is_plain = isinstance(tx, optax.GradientTransformation)
    return optax.with_extra_args_support(tx) if is_plain else tx


def skips_steps(opt_state: Any) -> bool:
    """Tells if a dense optimizer skips steps with gradients that are not finite."""
    # Only optax.chain has a plain tuple as its state. Inside a different wrapper, such
    # as optax.partition, a skip may cover only some parameters.
    is_chain = type(opt_state) is tuple
    nodes = opt_state if is_chain else (opt_state,)
    return any(
        type(x).__name__ == _SKIPPING or is_chain and skips_steps(x) for x in nodes
    )


def _skips_part(opt_state: Any) -> bool:
    """Tells if a wrapper skips only some parameters, or skips while collecting."""
    is_multi_steps = lambda node: hasattr(node, "skip_state")  # noqa: E731
    nodes = jax.tree.leaves(opt_state, is_leaf=is_multi_steps)
    # MultiSteps(should_skip_update_fn=...) stores the results of its function in
    # `skip_state`. Without `should_skip_update_fn`, `skip_state` is empty.
    if any(is_multi_steps(node) and node.skip_state for node in nodes):
        return True
    return bool(find_state(opt_state, (_SKIPPING,))) and not skips_steps(opt_state)


def _names(function: Any) -> Iterator[str]:
    """Yields the names of the optax functions that built a transformation."""
    # Wrappers such as optax.chain store the wrapped functions in closures. The part of
    # a name before the first dot is the public function, as in
    # "clip_by_global_norm.<locals>.update_fn".
    waiting, seen = [function], set()
    while waiting:
        value = waiting.pop()
        # Closures can contain themselves, so without `seen` the loop might never end.
        # `seen` holds object ids, because values may be unhashable.
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
        elif callable(value):
            yield getattr(value, "__qualname__", "").partition(".")[0]
            cells = getattr(value, "__closure__", None) or ()
            waiting.extend(cell.cell_contents for cell in cells)


def _check_collects(
    opt_state: Any, plans: Mapping[str, EmbeddingPlan], slots: Mapping[str, Any]
) -> None:
    each_step = [
        stack
        for path, plan in plans.items()
        for stack in plan.trained_stacks
        if stack.optimizer.gradient_steps == 1
        and not find_state(slots[path][stack.name], COLLECTING)
    ]
    collecting = find_state(opt_state, COLLECTING)
    if collecting and each_step:
        raise ValueError(
            "The optimizer of the dense parameters must step with each update, like "
            f"table {each_step[0].tables[0].name!r}, got one that collects the "
            f"gradients of several updates ({collecting}), such as optax.MultiSteps. "
            "Pass its inner optimizer, add the gradients of the micro-batches, "
            "and update once:\n"
            "  parts = [te.value_and_grad(loss_fn)(model, *x)[1] for x in batches]\n"
            "  total = te.gradients.add(*parts)\n"
            "  gradients = te.gradients.scale(total, 1 / len(parts))\n"
            "  optimizer.update(model, gradients)\n"
            "Or make the tables collect as well: te.optimizers.every_row(rule, "
            "gradient_steps=4)."
        )
