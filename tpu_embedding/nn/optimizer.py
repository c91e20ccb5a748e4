"""The optimizer for an NNX model: optax for dense parameters, row rules for tables.

Each method loads a `ModelState` from Flax variables, and stores the new state that
`model_tables` computes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax
from flax import nnx

from tpu_embedding import functional
from tpu_embedding.argument_checks import check_mapping, right_names
from tpu_embedding.functional.derived_state import tables_with_derived_state
from tpu_embedding.gradients import Gradients
from tpu_embedding.nn.dense_optimizer import check_dense_optimizer, with_extra_args
from tpu_embedding.nn.embedding import ShortRepr, TPUEmbedding
from tpu_embedding.nn.model_tables import (
    ModelState,
    check_gradients,
    check_names,
    init_model_slots,
    keep_if,
)
from tpu_embedding.nn.training import (
    check_filter,
    checked_layers,
    embedding_layers,
    put_on_mesh,
    tables_of_layers,
)
from tpu_embedding.optimizers.checks import DENSE_EXAMPLE, check_rule
from tpu_embedding.optimizers.learning_rates import with_hyperparameters
from tpu_embedding.tables.slot_values import (
    StateParts,
    shortest_names,
    slot_values,
    with_slot_values,
)
from tpu_embedding.transfers import moves_arrays


class SlotVariables(nnx.Variable):
    """Optimizer state for all tables: layer path to stack name to state.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), "adagrad", rngs=nnx.Rngs(0)
      ... )
      >>> optimizer = Optimizer(layer, optax.adam(1e-3))
      >>> list(nnx.state(optimizer, te.nn.SlotVariables))
      ['slots']
    """


@right_names(optimizer="tx", argnums="wrt=filter, of the dense parameters")
class Optimizer(ShortRepr):
    """Optimizer for a whole model: optax for dense parameters, row rules for tables.

    Use it like `nnx.Optimizer`, with gradients from `te.value_and_grad`.

    Attributes:
      dense: the `nnx.Optimizer` for the dense parameters.
      slots: slot variables and step counts of the tables.
      plans: path and plan for each layer.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> model = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), "adagrad", rngs=nnx.Rngs(0)
      ... )
      >>> optimizer, ids = Optimizer(model, optax.adam(1e-3)), model.prepare([1, 2])
      >>> loss, gradients = te.value_and_grad(lambda m: m(ids).sum())(model)
      >>> optimizer.update(model, gradients)
      >>> int(optimizer.step[...])
      1
    """

    @moves_arrays
    def __init__(
        self,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        *,
        wrt: nnx.filterlib.Filter = nnx.Param,
    ):
        """Creates the optimizer's state and puts the model on the mesh.

        Arrays not yet on a mesh, such as dense parameters, are replicated over the mesh
        of the layers, so your step compiles once.

        Args:
          model: owns at least one `TPUEmbedding`.
          tx: optimizer for the dense parameters. It does not see the tables, so clip
            with `te.gradients.clip_by_global_norm` if you want the norm to cover the
            whole model. However, `optax.apply_if_finite(tx, n)` skips whole steps: if a
            gradient is not finite, neither tables nor dense parameters change.
          wrt: selects the dense parameters, as in Flax.

        Raises:
          ValueError: if the model has no `TPUEmbedding`. Also raised if `tx`
            accumulates gradients over several steps, as `optax.MultiSteps` does, but a
            table optimizer does not.

        Warns:
          UserWarning: if a table has no optimizer, or a part of `tx` is meant for the
            whole model, such as `optax.clip_by_global_norm`.
        """
        layers = checked_layers("te.Optimizer", model, "te.Optimizer(model, tx)")
        check_rule("te.Optimizer", tx, "tx", DENSE_EXAMPLE)
        check_filter("te.Optimizer", wrt, model)
        plan = next(iter(layers.values())).plan  # All layers share one mesh.
        # Move the model before optax makes its state, which then starts on the mesh.
        put_on_mesh(model, plan)
        self.dense = nnx.Optimizer(model, with_extra_args(tx), wrt=wrt)
        self.plans = tuple((path, layer.plan) for path, layer in layers.items())
        slots = init_model_slots(tables_of_layers(layers))
        check_dense_optimizer(
            "te.Optimizer", tx, self.dense.opt_state, dict(self.plans), slots, 7
        )
        self.slots = SlotVariables(slots)
        # From now on, `layer.set_embedding_tables` rejects these tables.
        for layer in layers.values():
            layer.tables_with_derived_state |= tables_with_derived_state(layer.plan)
        # Step counts are still on one device.
        put_on_mesh(self, plan)

    @property
    def step(self) -> nnx.Variable:
        """Number of updates, stored in `dense`."""
        return self.dense.step

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optimizer for the dense parameters."""
        return self.dense.tx

    @property
    def opt_state(self) -> Any:
        """The state that `tx` keeps. Table state is in `slots`."""
        return self.dense.opt_state

    def _repr_facts(self) -> dict[str, Any]:
        num_arrays = len(jax.tree.leaves(nnx.state(self.dense)))
        facts = {path or "layer": repr(plan) for path, plan in self.plans}
        return {"dense": f"step and state of tx in {num_arrays} arrays", **facts}

    def update(
        self,
        model: nnx.Module,
        gradients: Gradients | None = None,
        **extra_args: Any,
    ) -> None:
        """Applies gradients to the model in place.

        Under `jit`, donate model and optimizer. Each call is one step for all tables in
        all layers. Step counts and schedules advance even for a table that your loss
        did not look up.

        Args:
          model: the model you made this optimizer for.
          gradients: from `tpu_embedding.value_and_grad`.
          **extra_args: what `tx` needs besides gradients, for example `value=loss` for
            `optax.contrib.reduce_on_plateau`. `tx` acts on the dense parameters only.

        Raises:
          TypeError: if the gradients come from `nnx.grad`, which leaves tables out, or
            if `tx` needs an argument that is missing.
          ValueError: if model, optimizer and gradients have different layers.
        """
        gradients = check_gradients(
            gradients,
            "Optimizer.update",
            "loss, gradients = te.value_and_grad(loss_fn)(model, ...)",
            "optimizer.update(model, gradients)",
        )
        layers, state = self._load(model, "update")
        if set(layers) != set(gradients.tables):
            raise ValueError(
                "Optimizer.update needs the gradients of the model, with layers "
                f"{sorted(layers)}, got gradients of layers "
                f"{sorted(gradients.tables)}."
            )

        def dense_state() -> tuple[nnx.State, nnx.State]:
            return nnx.state(model, self.dense.wrt), nnx.state(self.dense)

        old = jax.tree.leaves(dense_state())
        # The dense update is a callback because it may need the model's norm. It
        # changes the model in place and returns None, so the old arrays are kept for a
        # step that turns out to be skipped.
        state, _, keep_dense = state.apply_gradients(
            gradients,
            self.dense.opt_state,
            lambda dense: self.dense.update(model, dense, **extra_args),
        )
        if keep_dense is not None:
            new, structure = jax.tree.flatten(dense_state())
            states = structure.unflatten(keep_if(keep_dense, new, old))
            for module, new_state in zip((model, self.dense), states, strict=True):
                nnx.update(module, new_state)
        self._store(layers, state)

    def insert_ids(
        self,
        model: nnx.Module,
        features: Any,
        *,
        layer: str | None = None,
        now: Any = None,
    ) -> Any:
        """Assigns rows to new ids in dynamic tables; call it first in a train step.

        The rows and their slot variables get new initial values. The layer's
        `dynamic_stats` has the counts.

        Args:
          model: the model you made this optimizer for; it changes in place.
          features: batch of the layer, from its `prepare`.
          layer: path of the layer. Defaults to the only layer with dynamic tables.
          now: clock of the step, an integer from 1 to 2**32 - 1. Defaults to the step
            number. See `tpu_embedding.functional.insert_ids`.

        Returns:
          The batch with row numbers instead of ids for dynamic tables. Pass it to the
          layer inside your loss.

        Raises:
          ValueError: if the model or the optimizer has no such layer.

        Example:
          >>> import tpu_embedding as te
          >>> users = te.TableConfig(vocabulary_size=te.Dynamic(capacity=100), dim=4)
          >>> model = te.TPUEmbedding(
          ...     te.FeatureConfig(table=users), "adagrad", rngs=nnx.Rngs(0)
          ... )
          >>> optimizer = Optimizer(model, optax.adam(1e-3))
          >>> ids = optimizer.insert_ids(model, model.prepare([2**40, 7, 7]))
          >>> loss, grads = te.value_and_grad(lambda m: m(ids).sum())(model)
          >>> optimizer.update(model, grads)
        """
        layers, state = self._load(model, "insert_ids")
        path = state.layer_of_new_ids(layer, "Optimizer.insert_ids")
        stacks, plan = state.tables[path].stacks, state.tables[path].plan
        result = functional.insert_ids(stacks, state.slots[path], features, plan, now)
        self._store(layers, state.with_layer(path, result.tables, result.slots))
        # The stats cover only tables that the batch reads. The variable keeps entries
        # for all tables, because a change of its structure would recompile steps.
        stats = layers[path].dynamic_stats
        stats.set_value(stats.get_value() | result.stats)
        return result.features

    def finalize_variable_values(self, model: nnx.Module) -> None:
        """Sets tables and dense parameters to their moving averages.

        Call it after the last step, as Keras does at the end of `fit`. To evaluate the
        averages earlier, finalize `nnx.clone(model)` with `nnx.clone(optimizer)`.
        `te.optimizers.with_ema` adds averages to any optimizer. Tables and dense
        parameters without averages do not change. Under `jit`, donate model and
        optimizer. Otherwise the tables are briefly in memory twice.

        Args:
          model: the model you made this optimizer for; it changes in place.

        Example:
          >>> import jax.numpy as jnp
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
          >>> rule = te.optimizers.with_ema(te.optimizers.adagrad(0.1))
          >>> layer = te.TPUEmbedding(
          ...     te.FeatureConfig(table=table), rule, rngs=nnx.Rngs(0)
          ... )
          >>> optimizer = Optimizer(layer, rule)
          >>> optimizer.finalize_variable_values(layer)
        """
        layers, state = self._load(model, "finalize_variable_values")
        params = nnx.state(model, self.dense.wrt)
        # Flax wraps each array of an optax state in a variable, but the call below
        # needs plain arrays in the same state classes.
        variables, structure = jax.tree.flatten(
            (params, self.dense.opt_state),
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )
        arrays = [variable.get_value() for variable in variables]
        state, *dense = state.finalize_variable_values(*structure.unflatten(arrays))
        self._store(layers, state)
        arrays = structure.flatten_up_to(tuple(dense))
        for variable, array in zip(variables, arrays, strict=True):
            variable.set_value(array)
        nnx.update(model, params)

    def set_hyperparameters(self, **values: Any) -> None:
        """Changes table hyper-parameters without recompiling.

        Args:
          **values: see `tpu_embedding.optimizers.with_hyperparameters`. To change a
            dense hyper-parameter, set it in `dense.opt_state`.

        Raises:
          ValueError: if no table optimizer has a hyper-parameter of that name.

        Example:
          >>> import tpu_embedding as te
          >>> rule = optax.inject_hyperparams(te.optimizers.sgd)(learning_rate=0.1)
          >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
          >>> layer = te.TPUEmbedding(
          ...     te.FeatureConfig(table=table), rule, rngs=nnx.Rngs(0)
          ... )
          >>> optimizer = Optimizer(layer, optax.adam(1e-3))
          >>> optimizer.set_hyperparameters(learning_rate=0.01)
        """
        self.slots.set_value(with_hyperparameters(self.slots.get_value(), **values))

    def slot_values(self, parts: StateParts = "rows") -> dict[str, dict[str, Any]]:
        """Reads slot variables, by table and slot name.

        Args:
          parts: see `tpu_embedding.functional.slot_values`.

        Returns:
          Table name to slot name to NumPy array `[vocabulary_size, dim]` or
          `[vocabulary_size]`. Tables are named as in `set_embedding_tables`.

        Example:
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
          >>> layer = te.TPUEmbedding(
          ...     te.FeatureConfig(table=table), "adagrad", rngs=nnx.Rngs(0)
          ... )
          >>> optimizer = Optimizer(layer, optax.adam(1e-3))
          >>> optimizer.slot_values()["movie"]["accumulators"].shape
          (10, 4)
        """
        keys, slots = self._table_keys(), self.slots.get_value()
        return {
            keys[path, name]: table_slots
            for path, plan in self.plans
            for name, table_slots in slot_values(slots[path], plan, parts).items()
        }

    def set_embedding_tables(
        self, model: nnx.Module, values: Mapping[str, Any]
    ) -> None:
        """Replaces table values and resets the state derived from them.

        Two things are reset to match the new values: the moving averages of all rows in
        these tables, and Adafactor's scale of each table. The remaining slot variables
        do not change.

        Args:
          model: the model you made this optimizer for; it changes in place.
          values: table name to real numbers `[vocabulary_size, dim]`. If layers share a
            table name, write `"path/to/layer/table name"` as the key.

        Raises:
          TypeError: if `values` is not a dict.
          ValueError: if a table is unknown, if an array does not fit its table, or if
            the optimizer was made for a model with different layers.

        Example:
          >>> import numpy as np
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
          >>> rule = te.optimizers.adafactor(0.1)
          >>> layer = te.TPUEmbedding(
          ...     te.FeatureConfig(table=table), rule, rngs=nnx.Rngs(0)
          ... )
          >>> optimizer = Optimizer(layer, optax.adam(1e-3))
          >>> optimizer.set_embedding_tables(layer, {"movie": np.ones((10, 4))})
        """
        line = "optimizer.set_embedding_tables(model, {'movie': array})"
        check_mapping("values", values, line)
        layers, state = self._load(model, "set_embedding_tables")
        self._store(layers, state.with_table_values(self._by_layer(values)))

    def set_slot_values(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces some slot variables, as `te.functional.with_slot_values` does.

        Args:
          values: like the result from `slot_values`; you can leave out tables and
            slots.

        Raises:
          TypeError: if `values`, or its values, are not dicts.
          ValueError: if a table or slot is unknown, or an array does not hold real
            numbers in the shape of the slot.
        """
        line = "values={'movie': {'accumulators': array}}, by table and slot name"
        check_mapping("values", values, line)
        slots = dict(self.slots.get_value())
        plans = dict(self.plans)
        for path, own in self._by_layer(values).items():
            slots[path] = with_slot_values(slots[path], own, plans[path])
        self.slots.set_value(slots)

    def _load(
        self, model: nnx.Module, method: str
    ) -> tuple[dict[str, TPUEmbedding], ModelState]:
        layers, slots = embedding_layers(model), dict(self.slots.get_value())
        if set(layers) != set(slots):
            raise ValueError(
                f"Optimizer.{method} needs the model that the optimizer was made for, "
                f"with layers {sorted(slots)}, got one with layers {sorted(layers)}. "
                "Make an optimizer for this model: te.Optimizer(model, tx)."
            )
        return layers, ModelState(tables_of_layers(layers), slots)

    def _store(self, layers: Mapping[str, TPUEmbedding], state: ModelState) -> None:
        for path, layer in layers.items():
            layer.tables.set_value(state.tables[path].stacks)
        self.slots.set_value(state.slots)

    def _by_layer(self, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Groups values by layer path and table name. Rejects unknown keys."""
        keys = self._table_keys()
        check_names("Values", values, "tables", keys.values())
        by_layer: dict[str, dict[str, Any]] = {path: {} for path, _ in self.plans}
        for (path, name), key in keys.items():
            if key in values:
                by_layer[path][name] = values[key]
        return by_layer

    def _table_keys(self) -> dict[tuple[str, str], str]:
        """Finds the shortest unique key for each table, by layer path and name."""
        keys = [
            (path, table.name)
            for path, plan in self.plans
            for stack in plan.stacks
            for table in stack.tables
        ]
        return dict(zip(keys, shortest_names(keys), strict=True))
