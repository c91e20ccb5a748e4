"""Gradients and updates for a Linen model with embedding layers.

`value_and_grad` and `TrainState` work like their namesakes in JAX and Flax.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from tpu_embedding import functional
from tpu_embedding.gradients import Gradients
from tpu_embedding.nn.dense_optimizer import check_dense_optimizer, with_extra_args
from tpu_embedding.nn.linen.layer import RecordingTables
from tpu_embedding.nn.linen.variables import (
    TABLES,
    LayerTables,
    layer_tables,
    map_tables,
    with_embedding_tables,
    with_tables,
)
from tpu_embedding.nn.model_tables import (
    ModelState,
    check_gradients,
    check_names,
    init_model_slots,
    keep_if,
)
from tpu_embedding.nn.recording import (
    Recorder,
    differentiate,
    replicate_on_mesh,
)
from tpu_embedding.optimizers.checks import DENSE_EXAMPLE, check_rule
from tpu_embedding.optimizers.learning_rates import with_hyperparameters
from tpu_embedding.transfers import moves_arrays


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False
) -> Callable[..., tuple[Any, Gradients]]:
    """Makes a function that computes a loss and its gradients, tables included.

    Args:
      loss_fn: `(variables, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`.
        Call `model.apply(variables, ...)` in it, any number of times.
      has_aux: whether `loss_fn` returns a second value.

    Returns:
      `(variables, *args, **kwargs) -> (loss, Gradients)`, or `((loss, aux),
      Gradients)`. Gradients cover the collection `params` and all tables. Pass all
      collections from `model.init` as the variables.

    Raises:
      ValueError: when called, if the variables lack tables, or the loss calls a
        layer inside a transformation.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(
      ...     te.FeatureConfig(table=table), optimizer=te.optimizers.sgd(0.1)
      ... )
      >>> layer = te.linen.TPUEmbedding(plan)
      >>> variables = layer.init(jax.random.key(0), jnp.array([1, 2]))
      >>> def loss_fn(variables, ids):
      ...     return jnp.sum(layer.apply(variables, ids) ** 2)
      >>> loss, gradients = value_and_grad(loss_fn)(variables, jnp.array([1, 2]))
    """

    def compute(variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        plans = {path: tables.plan for path, tables in layer_tables(variables).items()}

        def call_loss(params: Any, tables: Any, recorder: Recorder) -> Any:
            def recording(path: str, tables: LayerTables) -> RecordingTables:
                return RecordingTables(tables=tables, path=path, recorder=recorder)

            changed = {**variables, "params": params, TABLES: tables}
            return loss_fn(map_tables(recording, changed), *args, **kwargs), None

        params = variables.get("params", {})
        result, _, gradients = differentiate(
            call_loss, params, variables[TABLES], plans, has_aux
        )
        return result, gradients

    return compute


class TrainState(struct.PyTreeNode):
    """Everything that a train step changes. Donate it under `jit`.

    Attributes:
      step: number of updates.
      apply_fn: usually `model.apply`.
      variables: all model collections, tables included.
      tx: optimizer for the dense parameters.
      opt_state: state of `tx`.
      slots: optimizer state for the tables, by layer path and stack name.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(
      ...     te.FeatureConfig(table=table), optimizer=te.optimizers.sgd(0.1)
      ... )
      >>> layer, ids = te.linen.TPUEmbedding(plan), jnp.array([1, 2])
      >>> state = TrainState.create(
      ...     apply_fn=layer.apply,
      ...     variables=layer.init(jax.random.key(0), ids),
      ...     tx=optax.adam(1e-3),
      ... )
      >>> def loss_fn(variables):
      ...     return jnp.sum(state.apply_fn(variables, ids) ** 2)
      >>> loss, gradients = value_and_grad(loss_fn)(state.variables)
      >>> state = state.apply_gradients(grads=gradients)
      >>> int(state.step)
      1
    """

    step: jax.Array
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    variables: dict[str, Any]
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    opt_state: Any
    slots: dict[str, Any]

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        variables: Mapping[str, Any],
        tx: optax.GradientTransformation,
        **fields: Any,
    ) -> "TrainState":
        """Creates the state before the first step, on the mesh of the tables.

        Args:
          apply_fn: usually `model.apply`.
          variables: from `model.init`.
          tx: optimizer for the dense parameters. The plan has the table optimizers.
          **fields: your own fields, if you subclass.

        Raises:
          ValueError: if the variables lack tables. Also raised if `tx` accumulates
            gradients over several steps, as `optax.MultiSteps` does, but a table
            optimizer does not.
        """
        check_rule("te.linen.TrainState", tx, "tx", DENSE_EXAMPLE)
        layers = layer_tables(variables)
        plan = next(iter(layers.values())).plan  # all layers share one mesh
        # With arrays on the mesh, `tx.init` puts its state on the mesh as well.
        on_mesh = replicate_on_mesh({**variables}, plan)
        opt_state = moves_arrays(tx.init)(on_mesh.get("params", {}))
        slots = init_model_slots(layers)
        plans = {path: tables.plan for path, tables in layers.items()}
        check_dense_optimizer("te.linen.TrainState", tx, opt_state, plans, slots, 2)
        state = cls(
            step=moves_arrays(jnp.zeros)((), jnp.int32),
            apply_fn=apply_fn,
            variables=on_mesh,
            tx=tx,
            opt_state=opt_state,
            slots=slots,
            **fields,
        )
        # Step counts are still on one device.
        return replicate_on_mesh(state, plan)

    def apply_gradients(
        self,
        *,
        grads: Gradients,
        updates: Mapping[str, Any] | None = None,
        extra_args: Mapping[str, Any] | None = None,
    ) -> "TrainState":
        """Updates the dense parameters and all tables, as one step.

        Args:
          grads: from `tpu_embedding.linen.value_and_grad`. Step counts advance even for
            a layer without a gradient.
          updates: new values for collections such as `batch_stats`, from
            `model.apply(..., mutable=["batch_stats"])`.
          extra_args: what `tx` needs besides gradients, such as `{"value": loss}` for
            `optax.contrib.reduce_on_plateau`. `tx` acts on the dense parameters only.

        Raises:
          TypeError: if the gradients lack the tables, or if `tx` needs an argument that
            is missing.
          ValueError: if the gradients belong to different layers or to a different
            plan. Also raised if `updates` names a collection that the state lacks.
        """
        check_gradients(
            grads,
            "TrainState.apply_gradients",
            "loss, grads = te.linen.value_and_grad(loss_fn)(state.variables, ...)",
            "state = state.apply_gradients(grads=grads)",
        )
        layers = layer_tables(self.variables)
        check_names("Gradients", grads.tables, "layers", layers)
        others = set(self.variables) - {"params", TABLES}
        check_names("Updates", updates or {}, "collections", others)
        params = self.variables.get("params", {})
        tx = with_extra_args(self.tx)
        state = ModelState(layers, self.slots)
        state, (changes, opt_state), keep_dense = state.apply_gradients(
            grads,
            self.opt_state,
            lambda dense: tx.update(
                dense, self.opt_state, params, **(extra_args or {})
            ),
        )
        # A failed lookup makes new batch statistics NaN, so keep the old ones as well.
        updates = dict(updates or {})
        old = {name: self.variables[name] for name in updates}
        variables = {**self.variables, **keep_if(keep_dense, updates, old)}
        if "params" in variables:
            new = optax.apply_updates(params, changes)
            variables["params"] = keep_if(keep_dense, new, params)
        return self.replace(
            step=keep_if(keep_dense, self.step + 1, self.step),
            variables=with_tables(variables, state.tables),
            opt_state=keep_if(keep_dense, opt_state, self.opt_state),
            slots=state.slots,
        )

    def insert_ids(
        self,
        features: Any,
        *,
        layer: str | None = None,
        now: Any = None,
        with_stats: bool = False,
    ) -> tuple[Any, ...]:
        """Assigns rows to new ids in dynamic tables; call it first in a train step.

        Args:
          features: batch of the layer, from `prepare_features`.
          layer: path of the layer. Defaults to the only layer with dynamic tables.
          now: clock of the step, an integer from 1 to 2**32 - 1. Defaults to the step
            number. See `tpu_embedding.functional.insert_ids`.
          with_stats: whether to also return counts.

        Returns:
          Two values: the new state, and the batch with row numbers. Pass this batch to
          the layer in your loss. With `with_stats`, the third value is a dict from
          table name to `te.functional.DynamicStats`.

        Raises:
          ValueError: if the variables have no such layer, or if `layer` is missing and
            there are several.
        """
        model = ModelState(layer_tables(self.variables), self.slots)
        path = model.layer_of_new_ids(layer, "TrainState.insert_ids")
        stacks, plan = model.tables[path].stacks, model.tables[path].plan
        result = functional.insert_ids(stacks, self.slots[path], features, plan, now)
        model = model.with_layer(path, result.tables, result.slots)
        variables = with_tables(self.variables, model.tables)
        state = self.replace(variables=variables, slots=model.slots)
        if with_stats:
            return state, result.features, result.stats
        return state, result.features

    def finalize_variable_values(self) -> "TrainState":
        """Sets variables to their moving averages.

        `with_ema` and `adafactor(use_ema=True)` keep averages. Variables without them
        do not change.
        """
        state = ModelState(layer_tables(self.variables), self.slots)
        state, params, opt_state = state.finalize_variable_values(
            self.variables.get("params", {}), self.opt_state
        )
        variables = with_tables(self.variables, state.tables)
        if "params" in variables:
            variables["params"] = params
        return self.replace(variables=variables, opt_state=opt_state, slots=state.slots)

    def with_embedding_tables(
        self, values: Mapping[str, Mapping[str, Any]]
    ) -> "TrainState":
        """Replaces table values and resets the state derived from them.

        See `te.Optimizer.set_embedding_tables`.

        Args:
          values: layer path to table name to array `[vocabulary_size, dim]`.

        Raises:
          TypeError: if `values`, or its values, are not dicts.
          ValueError: if a layer or table is unknown, or an array has the wrong shape.
        """
        variables, slots = with_embedding_tables(self.variables, values, self.slots)
        return self.replace(variables=variables, slots=slots)

    def with_hyperparameters(self, **values: Any) -> "TrainState":
        """Changes table hyper-parameters without recompiling.

        Args:
          **values: see `tpu_embedding.optimizers.with_hyperparameters`.

        Raises:
          ValueError: if no table optimizer has a hyper-parameter of that name.
        """
        return self.replace(slots=with_hyperparameters(self.slots, **values))
