"""Training steps on the tables of all layers of a model.

The NNX `Optimizer` and the Linen `TrainState` store tables and slot variables in
different places, but share these steps.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from tpu_embedding import functional
from tpu_embedding.functional import steps
from tpu_embedding.gradients import (
    Gradients,
    TableGradients,
    all_finite,
    global_norm,
    is_whole,
    may_be_partial,
)
from tpu_embedding.nn.dense_optimizer import skips_steps
from tpu_embedding.optimizers.table_rows import model_gradient_context
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows

_Result = TypeVar("_Result")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerTables:
    """The tables of one layer, with the plan that places them.

    Attributes:
      stacks: stack name to packed rows.
      plan: plan of the layer.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.linen.TPUEmbedding(te.make_plan(te.FeatureConfig(table=table)))
      >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
      >>> isinstance(variables["embedding_tables"]["tables"], LayerTables)
      True
    """

    stacks: dict[str, PackedRows]
    plan: EmbeddingPlan = dataclasses.field(metadata={"static": True})


ModelTables = Mapping[str, LayerTables]
"""Path of each layer in the model to its tables."""
ModelSlots = dict[str, Any]
"""Path of each layer in the model to the slot variables of its stacks."""


def init_model_slots(layers: ModelTables) -> ModelSlots:
    """Returns the slot variables before the first step."""
    return {
        path: functional.init_slots(tables.stacks, tables.plan)
        for path, tables in layers.items()
    }


def apply_model_gradients(
    layers: ModelTables,
    slots: Mapping[str, Any],
    gradients: Gradients,
    opt_state: Any,
    update_dense: Callable[[Any], _Result],
) -> tuple[dict[str, dict[str, PackedRows]], ModelSlots, _Result, Any]:
    """Updates the dense parameters and the tables of a model, as one step.

    The whole step is skipped if a lookup could not read all its rows, or if the dense
    optimizer skips steps that are not finite and any gradient is not finite.

    Args:
      layers: tables of the model.
      slots: slot variables of all layers.
      gradients: gradients of the whole model. Layers without gradients also step.
      opt_state: state of the dense optimizer.
      update_dense: updates the dense parameters, given their gradients. During this
        call, an optimizer with `global_clipnorm` can read the norm of the model's
        gradients.

    Returns:
      New stacks and slot variables by layer, the result of `update_dense`, and a bool
      scalar. If it is False, the caller must drop the dense update. It is None if the
      dense update always counts.
    """
    norm = only_if = keep_dense = None
    if any(steps.takes_model_norm(tables.plan) for tables in layers.values()):
        norm = global_norm(gradients)
    if any(may_be_partial(tables.plan) for tables in layers.values()):
        only_if = keep_dense = is_whole(gradients)
    dense = gradients.dense
    if skips_steps(opt_state):
        finite = all_finite(gradients)
        only_if = finite if only_if is None else only_if & finite
        # The dense optimizer decides by its own gradients, and counts skipped steps.
        # Lookups that fail are not in this count, which the caller drops.
        dense = jax.tree.map(lambda g: jnp.where(only_if, g, jnp.nan), dense)
    with model_gradient_context(lambda: jnp.square(global_norm(gradients))):
        try:
            result = update_dense(dense)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise TypeError(
                f"The optimizer of the dense parameters needs more arguments: {error}. "
                "Write optimizer.update(model, gradients, value=loss), or, in Linen, "
                "state.apply_gradients(grads=grads, extra_args={'value': loss})."
            ) from error
    updated = {
        path: functional.apply_gradients(
            tables.stacks,
            slots[path],
            gradients.tables.get(path, TableGradients({}, tables.plan)),
            tables.plan,
            norm,
            only_if,
        )
        for path, tables in layers.items()
    }
    stacks = {path: new_stacks for path, (new_stacks, _) in updated.items()}
    new_slots = {path: new for path, (_, new) in updated.items()}
    return stacks, new_slots, result, keep_dense


def keep_if(condition: Any, new: Any, old: Any) -> Any:
    """Returns the new arrays if a condition holds or is None, else the old arrays."""
    if condition is None:
        return new
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)


def check_gradients(gradients: Any, owner: str, compute: str, line: str) -> Gradients:
    """Returns the gradients, or raises if they lack the tables.

    The error shows two lines of code: `compute` computes gradients, and `line` calls
    the owner.

    Raises:
      TypeError: if the gradients are not `Gradients`.
    """
    if not isinstance(gradients, Gradients):
        name = "nothing" if gradients is None else type(gradients).__name__
        raise TypeError(
            f"{owner} needs the gradients of value_and_grad as its second argument, "
            f"got {name}, which lacks the gradients of the tables. Write {compute}, "
            f"then {line}."
        )
    return gradients


def check_names(
    owner: str, got: Iterable[str], kind: str, known: Iterable[str]
) -> None:
    """Raises ValueError if a name is not one of the model's."""
    unknown = sorted(set(got) - set(known))
    if unknown:
        raise ValueError(
            f"{owner} must name {kind} of the model, {sorted(known)}, got unknown "
            f"{kind} {unknown}."
        )


def features_by_layer(
    features: Any, paths: Collection[str], owner: str
) -> dict[str, Any]:
    """Returns the result of a user's `features_of` by layer path.

    If there is one layer, the result is its features. Otherwise it is a dict by path,
    which may leave layers out.

    Raises:
      ValueError: if there are several layers, and the features are not such a dict.
    """
    if len(paths) == 1:
        return dict.fromkeys(paths, features)
    if not isinstance(features, Mapping) or not set(features) <= set(paths):
        got = list(features) if isinstance(features, Mapping) else type(features)
        raise ValueError(
            f"{owner}: features_of must return a dict from layer path to features, "
            f"with some of the paths {sorted(paths)}, because the model has several "
            f"layers, got {got}."
        )
    return dict(features)


def layer_of_new_ids(layers: ModelTables, path: str | None, owner: str) -> str:
    """Returns the path of the layer that assigns rows to new ids.

    If the path is None, there must be only one such layer.

    Raises:
      ValueError: if no such layer has the path, or if the path is None and there are
        several such layers.
    """
    fitting = [
        path
        for path, tables in layers.items()
        if not all(stack.vocabulary.ids_are_rows for stack in tables.plan.stacks)
    ]
    if path is None and len(fitting) == 1:
        (path,) = fitting
    if path not in fitting:
        raise ValueError(
            f"{owner}: layer must be the path of a layer with a table whose vocabulary "
            f"assigns rows to ids, one of {fitting}, got {path!r}. Leave it out if "
            "there is only one."
        )
    return path


def finalize_model_values(
    layers: ModelTables, slots: Mapping[str, Any], params: Any, opt_state: Any
) -> tuple[dict[str, dict[str, PackedRows]], ModelSlots, Any, Any]:
    """Returns a model's values and state, with values set to their moving averages.

    Tables and dense parameters without averages don't change, as in Keras without
    `use_ema`.

    Returns:
      New stacks and slot variables by layer, new dense parameters, and new state of
      the dense optimizer.
    """
    stacks, new_slots = {}, {}
    for path, tables in layers.items():
        stacks[path], new_slots[path] = functional.finalize_variable_values(
            tables.stacks, slots[path], tables.plan
        )
    params, opt_state = functional.finalize_variable_values(params, opt_state)
    return stacks, new_slots, params, opt_state
