"""Train steps on all layers in a model, shared by NNX and Linen.

The NNX `Optimizer` and the Linen `TrainState` store their arrays in different places.
Both load a `ModelState`, change it, and store the result.
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
    """Tables of one layer, with the plan that places them.

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
"""Maps each layer's path in the model to its tables."""


@dataclasses.dataclass(frozen=True)
class ModelState:
    """Tables and slot variables by layer path. Each method makes a new state."""

    tables: ModelTables
    slots: dict[str, Any]

    def with_layer(self, path: str, stacks: dict[str, PackedRows], slots: Any) -> Self:
        layer = dataclasses.replace(self.tables[path], stacks=stacks)
        return type(self)({**self.tables, path: layer}, {**self.slots, path: slots})

    def apply_gradients(
        self,
        gradients: Gradients,
        opt_state: Any,
        update_dense: Callable[[Any], _Result],
    ) -> tuple[Self, _Result, Any]:
        """Updates dense parameters and tables as one step.

        The whole step is skipped if a lookup could not read all its rows. It is also
        skipped if any gradient is not finite and the dense optimizer skips such steps.

        Returns:
          Three values: the new state, the result from `update_dense`, and a bool scalar
          or None. If the scalar is False, the caller must drop the dense update.
        """
        plans = [tables.plan for tables in self.tables.values()]
        norm = only_if = keep_dense = None
        # A norm merges the rows that all devices sent, so compute it only on demand.
        if any(map(steps.takes_model_norm, plans)):
            norm = global_norm(gradients)
        if any(map(may_be_partial, plans)):
            only_if = keep_dense = is_whole(gradients)
        dense = gradients.dense
        if skips_steps(opt_state):
            finite = all_finite(gradients)
            only_if = finite if only_if is None else only_if & finite
            # The dense optimizer sees only dense gradients. They become NaN if a table
            # gradient isn't finite, so that the optimizer skips and counts the step.
            # After a failed lookup, the caller drops the optimizer's new state,
            # including the count.
            dense = jax.tree.map(lambda g: jnp.where(only_if, g, jnp.nan), dense)
        # A dense optimizer with `global_clipnorm` reads the model norm in this context.
        with model_gradient_context(lambda: jnp.square(global_norm(gradients))):
            try:
                result = update_dense(dense)
            except TypeError as error:
                # Python says this if an optax rule misses an argument such as `value`.
                if "required keyword-only argument" not in str(error):
                    raise
                raise TypeError(
                    "The optimizer of the dense parameters needs more arguments: "
                    f"{error}. Write optimizer.update(model, gradients, value=loss), "
                    "or, in Linen, state.apply_gradients(grads=grads, "
                    "extra_args={'value': loss})."
                ) from error
        state = self
        # Layers without gradients also step, to advance their counts and schedules.
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
        """Finds the layer that assigns rows to new ids.

        `path` may be None if the model has only one such layer.
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
        """Replaces table values, given by layer path and table name."""
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
        """Sets tables and dense parameters to their moving averages, if they have any.

        The results are the new state, the new dense parameters and the new state of the
        dense optimizer.
        """
        state = self
        for path, layer in self.tables.items():
            new = functional.finalize_variable_values(
                layer.stacks, self.slots[path], layer.plan
            )
            state = state.with_layer(path, *new)
        return state, *functional.finalize_variable_values(params, opt_state)


def init_model_slots(tables: ModelTables) -> dict[str, Any]:
    return {
        path: functional.init_slots(layer.stacks, layer.plan)
        for path, layer in tables.items()
    }


def keep_if(condition: Any, new: Any, old: Any) -> Any:
    """Selects new arrays if the condition holds or is None, otherwise old ones."""
    if condition is None:
        return new
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)


def check_gradients(gradients: Any, owner: str, compute: str, line: str) -> Gradients:
    """Rejects gradients without tables, such as the result from `nnx.grad`.

    The error shows two code lines: `compute` computes gradients, `line` calls `owner`.
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
    unknown = sorted(set(got) - set(known))
    if unknown:
        raise ValueError(
            f"{owner} must name {kind} of the model, {sorted(known)}, got unknown "
            f"{kind} {unknown}."
        )


def features_by_layer(
    features: Any, paths: Collection[str], owner: str
) -> dict[str, Any]:
    """Maps layer paths to the features that a user-defined `features_of` returned."""
    # With one layer, the features may themselves be a dict, so don't look inside.
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
