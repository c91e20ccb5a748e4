"""Training steps on the tables of all layers of a model.

The NNX `Optimizer` and the Linen `TrainState` store tables and slot variables in
different places, but share these steps.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp

from tpu_embedding import functional
from tpu_embedding.functional import steps
from tpu_embedding.functional.derived_state import with_table_values
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


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The tables and slot variables of all layers, by the layers' paths.

    The NNX `Optimizer` and the Linen `TrainState` load one, and store the new one that
    each method returns.
    """

    tables: ModelTables
    slots: dict[str, Any]

    def with_layer(self, path: str, stacks: dict[str, PackedRows], slots: Any) -> Self:
        """Returns the state with one layer's stacks and slot variables replaced."""
        layer = dataclasses.replace(self.tables[path], stacks=stacks)
        return type(self)({**self.tables, path: layer}, {**self.slots, path: slots})

    def apply_gradients(
        self,
        gradients: Gradients,
        opt_state: Any,
        update_dense: Callable[[Any], _Result],
    ) -> tuple[Self, _Result, Any]:
        """Updates the dense parameters and the tables, as one step.

        The whole step is skipped if a lookup could not read all its rows, or if the
        dense optimizer skips steps that are not finite and any gradient is not finite.

        Args:
          gradients: gradients of the whole model. Layers without gradients also step.
          opt_state: state of the dense optimizer.
          update_dense: updates the dense parameters, given their gradients. During this
            call, an optimizer with `global_clipnorm` can read the norm of the model's
            gradients.

        Returns:
          New state, the result of `update_dense`, and a bool scalar. If it is False,
          the caller must drop the dense update. It is None if the dense update always
          counts.
        """
        plans = [tables.plan for tables in self.tables.values()]
        norm = only_if = keep_dense = None
        if any(map(steps.takes_model_norm, plans)):
            norm = global_norm(gradients)
        if any(map(may_be_partial, plans)):
            only_if = keep_dense = is_whole(gradients)
        dense = gradients.dense
        if skips_steps(opt_state):
            finite = all_finite(gradients)
            only_if = finite if only_if is None else only_if & finite
            # The dense optimizer decides by its own gradients, and counts skipped
            # steps. Lookups that fail are not in this count, which the caller drops.
            dense = jax.tree.map(lambda g: jnp.where(only_if, g, jnp.nan), dense)
        with model_gradient_context(lambda: jnp.square(global_norm(gradients))):
            try:
                result = update_dense(dense)
            except TypeError as error:
                if "required keyword-only argument" not in str(error):
                    raise
                raise TypeError(
                    "The optimizer of the dense parameters needs more arguments: "
                    f"{error}. Write optimizer.update(model, gradients, value=loss), "
                    "or, in Linen, state.apply_gradients(grads=grads, "
                    "extra_args={'value': loss})."
                ) from error
        state = self
        for path, layer in self.tables.items():
            new = functional.apply_gradients(
                layer.stacks,
                self.slots[path],
                gradients.tables.get(path, TableGradients({}, layer.plan)),
                layer.plan,
                norm,
                only_if,
            )
            state = state.with_layer(path, *new)
        return state, result, keep_dense

    def layer_of_new_ids(self, path: str | None, owner: str) -> str:
        """Returns the path of the layer that assigns rows to new ids.

        If the path is None, there must be only one such layer.

        Raises:
          ValueError: if no such layer has the path, or if the path is None and there
            are several such layers.
        """
        fitting = [
            path
            for path, layer in self.tables.items()
            if not all(stack.vocabulary.ids_are_rows for stack in layer.plan.stacks)
        ]
        if path is None and len(fitting) == 1:
            (path,) = fitting
        if path not in fitting:
            raise ValueError(
                f"{owner}: layer must be the path of a layer with a table whose "
                f"vocabulary assigns rows to ids, one of {fitting}, got {path!r}. "
                "Leave it out if there is only one."
            )
        return path

    def with_table_values(self, values: Mapping[str, Mapping[str, Any]]) -> Self:
        """Returns the state with the values of some tables replaced, by layer path."""
        state = self
        for path, layer_values in values.items():
            stacks, plan = self.tables[path].stacks, self.tables[path].plan
            slots = self.slots.get(path, {})
            state = state.with_layer(
                path, *with_table_values(stacks, layer_values, plan, slots)
            )
        return state

    def finalize_variable_values(
        self, params: Any, opt_state: Any
    ) -> tuple[Self, Any, Any]:
        """Sets tables and dense parameters to their moving averages.

        Tables and dense parameters without averages don't change, as in Keras without
        `use_ema`.

        Returns:
          New state, new dense parameters, and new state of the dense optimizer.
        """
        state = self
        for path, layer in self.tables.items():
            new = functional.finalize_variable_values(
                layer.stacks, self.slots[path], layer.plan
            )
            state = state.with_layer(path, *new)
        return state, *functional.finalize_variable_values(params, opt_state)


def init_model_slots(tables: ModelTables) -> dict[str, Any]:
    """Returns the slot variables of all layers before the first step."""
    return {
        path: functional.init_slots(layer.stacks, layer.plan)
        for path, layer in tables.items()
    }


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
