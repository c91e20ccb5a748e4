"""Trains a model that owns embedding layers: gradients and updates.

Use `value_and_grad` and `Optimizer` like their namesakes in Flax. optax updates dense
parameters as usual; the row rules of each layer update its tables.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import jax
import optax
from flax import nnx

from tpu_embedding import functional
from tpu_embedding.argument_checks import Wanted, check_mapping, check_type
from tpu_embedding.functional.following_slots import (
    tables_with_followers,
    with_table_values,
)
from tpu_embedding.gradients import Gradients
from tpu_embedding.nn.dense_optimizer import check_dense_optimizer
from tpu_embedding.nn.embedding import (
    CALL_OUTSIDE,
    EmbeddingTables,
    GradientGuard,
    Recording,
    TPUEmbedding,
)
from tpu_embedding.nn.final_model_values import final_model_values
from tpu_embedding.nn.recording import (
    differentiate,
    loss_and_aux,
    norm_for_dense,
    norm_of_model,
    replicate_on_mesh,
)
from tpu_embedding.optimizers.checks import DENSE_EXAMPLE, check_rule
from tpu_embedding.optimizers.hyperparameters import with_hyperparameters
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tables.slot_values import (
    StateParts,
    slot_values,
    with_slot_values,
)

IN_A_LOSS: Final = (
    "te.value_and_grad takes a loss that calls no te.value_and_grad, got one that "
    "calls it for the same model. Add the losses, and differentiate once: "
    "te.value_and_grad(lambda model: first(model) + second(model))(model)."
)
NO_LAYER: Final = (
    "The model has no TPUEmbedding layer. For tables, use te.TPUEmbedding in place of "
    "nnx.bridge.ToNNX(te.linen.TPUEmbedding(...)). For a model without tables, use"
)


MODEL: Final = Wanted(nnx.Module, "an nnx.Module that owns a te.TPUEmbedding")
RECORDED: Final = "['recorded']"
"""The record of a layer's calls, in the paths of JAX's errors."""


class SlotVariables(nnx.Variable):
    """Optimizer state of all tables: layer path to stack name to state."""


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    wrt: nnx.filterlib.Filter = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Gradients]]:
    """Returns a function that computes a loss and its gradients.

    Args:
      loss_fn: `(model, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`; the
        model is an `nnx.Module` that owns `TPUEmbedding` layers, and may call each any
        number of times: the gradients of all calls are added row by row. Changes that
        the loss makes to the model (batch statistics, random streams, lookup
        statistics) are kept.
      wrt: filter of the dense parameters.
      has_aux: True if `loss_fn` returns a second value.

    Returns:
      `(model, *args, **kwargs) -> (loss, Gradients)`, or `((loss, aux), Gradients)`.

    Raises:
      ValueError: when called, if the model has no `TPUEmbedding`.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), te.optimizers.sgd(0.1), rngs=nnx.Rngs(0)
      ... )
      >>> def loss_fn(model, ids):
      ...     return jnp.sum(model(ids) ** 2)
      >>> loss, gradients = value_and_grad(loss_fn)(layer, jnp.array([1, 2]))
      >>> optimizer = Optimizer(layer, optax.adam(1e-3))
      >>> optimizer.update(layer, gradients)
    """

    def compute(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        loss = ModelLoss(loss_fn, model, wrt=wrt, has_aux=has_aux)

        def run(dense, taps):
            recording = "shapes" if taps is None else "calls"
            variables = dataclasses.replace(loss.variables, dense=dense)
            return loss.run(variables, recording, taps, *args, **kwargs)

        value, (aux, new_rest), gradients = differentiate(
            run, loss.variables.dense, loss.plans
        )
        nnx.update(model, new_rest)
        return ((value, aux) if has_aux else value), gradients

    return compute


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Variables:
    """The variables of a model.

    Attributes:
      dense: those that a loss is differentiated by.
      tables: tables of all `TPUEmbedding` layers.
      rest: all others, such as batch statistics.
    """

    dense: nnx.State
    tables: nnx.State
    rest: nnx.State


class ModelLoss:
    """A loss of a model, as a function of the model's variables.

    Attributes:
      variables: variables of the model.
      plans: path of each `TPUEmbedding` to its plan.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        model: nnx.Module,
        *,
        wrt: nnx.filterlib.Filter,
        has_aux: bool,
    ):
        layers = checked_layers(
            "te.value_and_grad",
            model,
            "te.value_and_grad(loss_fn)(model, ...), or, for variables of a Linen "
            "model, te.linen.value_and_grad(loss_fn)(variables, ...)",
        )
        if any(layer.recording != "off" for layer in layers.values()):
            raise ValueError(IN_A_LOSS)
        self.plans = {path: layer.plan for path, layer in layers.items()}
        self._loss_fn, self._wrt, self._has_aux = loss_fn, trained(wrt), has_aux
        self._graph, dense, tables, rest = nnx.split(
            model, self._wrt, EmbeddingTables, ...
        )
        self.variables = Variables(dense=dense, tables=tables, rest=rest)

    def run(
        self,
        variables: Variables,
        recording: Recording,
        given: dict[str, Any] | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, tuple[tuple[Any, nnx.State], dict[str, tuple[Any, ...]]]]:
        """Computes the loss on a copy of the model.

        Args:
          variables: variables of the copy.
          recording: how its layers answer calls.
          given: path of each layer to what the recording gives to its calls; None:
            nothing.
          *args: of the loss.
          **kwargs: of the loss.

        Returns:
          The loss, and `((aux, rest), calls)`: the new values of the variables without
          a gradient, and the records of each layer's calls.
        """
        copy = nnx.merge(
            self._graph, variables.dense, variables.tables, variables.rest, copy=True
        )
        layers = embedding_layers(copy)
        for path, layer in layers.items():
            layer.start_recording(recording, () if given is None else given[path])
        with explain_branches():
            result = self._loss_fn(copy, *args, **kwargs)
        loss, aux = loss_and_aux(result, self._has_aux)
        calls = {path: layer.stop_recording() for path, layer in layers.items()}
        _, _, _, rest = nnx.split(copy, self._wrt, EmbeddingTables, ...)
        return loss, ((aux, rest), calls)


class Optimizer(nnx.Module):
    """Updates a model: optax updates dense parameters, row rules update tables.

    Attributes:
      dense: the `nnx.Optimizer` of the dense parameters.
      slots: slot variables and step counts of the tables.
      plans: path and plan of each layer.
    """

    def __init__(
        self,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        *,
        wrt: nnx.filterlib.Filter = nnx.Param,
    ):
        """Makes the optimizer's state, and puts the model on the mesh.

        Arrays that are not on a mesh yet, such as dense parameters, are replicated
        over the layers' mesh. So the first step has the same shardings as the second,
        and the step compiles once.

        Args:
          model: owns at least one `TPUEmbedding`.
          tx: optimizer of the dense parameters. Tables have the optimizers of their
            layers.
          wrt: filter of the dense parameters.

        Raises:
          ValueError: if the model has no `TPUEmbedding`; or if `tx` collects the
            gradients of several steps, as `optax.MultiSteps` does, and tables do not.

        Warns:
          UserWarning: if `tx` looks at all dense gradients at once, as
            `optax.clip_by_global_norm` does: it does not see those of the tables.
        """
        layers = checked_layers("te.Optimizer", model, "te.Optimizer(model, tx)")
        check_rule("te.Optimizer", tx, "tx", DENSE_EXAMPLE)
        plan = next(iter(layers.values())).plan
        put_on_mesh(model, plan)
        self.dense = nnx.Optimizer(model, tx, wrt=trained(wrt))
        self.plans = tuple((path, layer.plan) for path, layer in layers.items())
        self.slots = SlotVariables(
            {
                path: functional.init_slots(layer.tables.get_value(), layer.plan)
                for path, layer in layers.items()
            }
        )
        check_dense_optimizer(
            tx,
            self.dense.opt_state,
            [(plan, self.slots.get_value()[path]) for path, plan in self.plans],
            stacklevel=6,  # Three frames are Flax's.
        )
        for layer in layers.values():
            layer.followed_tables.names |= tables_with_followers(layer.plan)
        put_on_mesh(self, plan)

    def update(self, model: nnx.Module, gradients: Gradients) -> None:
        """Applies gradients to the model in place; donate both under `jit`.

        Each call is one step for all tables of all layers. Step counts and schedules
        advance also for a table that the loss did not look up.

        Args:
          model: the one this optimizer was made for.
          gradients: from `tpu_embedding.value_and_grad`.

        Raises:
          TypeError: if the gradients are those of `nnx.grad`, which lack the tables.
          ValueError: if model, optimizer and gradients have different layers.
        """
        if not isinstance(gradients, Gradients):
            raise TypeError(
                "Optimizer.update needs the gradients of tpu_embedding.value_and_grad, "
                f"got {type(gradients).__name__}, which lacks those of the tables. "
                "Write loss, gradients = te.value_and_grad(loss_fn)(model, ...), and "
                "optimizer.update(model, gradients)."
            )
        slots = dict(self.slots.get_value())
        layers = embedding_layers(model)
        if not set(layers) == set(slots) == set(gradients.tables):
            raise ValueError(
                "Optimizer.update needs the model that the optimizer was made for, and "
                f"its gradients, got layers {sorted(layers)} of the model, "
                f"{sorted(slots)} of the optimizer and {sorted(gradients.tables)} of "
                "the gradients."
            )
        norm = norm_of_model(gradients, [layer.plan for layer in layers.values()])
        with norm_for_dense(gradients):
            self.dense.update(model, gradients.dense)
        for path, layer in layers.items():
            new_tables, new_slots = functional.apply_gradients(
                layer.tables.get_value(),
                slots[path],
                gradients.tables[path],
                layer.plan,
                norm,
            )
            layer.tables.set_value(new_tables)
            slots[path] = new_slots
        self.slots.set_value(slots)

    def insert_ids(
        self,
        model: nnx.Module,
        features: Any,
        *,
        layer: str | None = None,
        now: Any = None,
    ) -> Any:
        """Gives rows to new ids of dynamic tables; call it first in a train step.

        The rows, and their slot variables, start as new. `model.layer.dynamic_stats`
        has the counts. See `tpu_embedding.functional.insert_ids`.

        Args:
          model: the one this optimizer was made for; it changes in place.
          features: batch of the layer, from its `prepare`.
          layer: path of the layer; None: the only one with dynamic tables.
          now: clock of the step, an integer from 1 to 2**32 - 1. None: the number of
            the step. Far fewer ids than the capacity should be used in a unit of it.

        Returns:
          The batch with row numbers for features of dynamic tables, which the layer
          takes inside a loss.

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
          >>> loss, grads = value_and_grad(lambda m: m(ids).sum())(model)
          >>> optimizer.update(model, grads)
        """
        layers = embedding_layers(model)
        path = _dynamic_layer(layers, layer)
        slots = dict(self.slots.get_value())
        if path not in slots:
            raise ValueError(
                "Optimizer.insert_ids needs the model that the optimizer was made for, "
                f"got one with layers {sorted(layers)}; the optimizer has "
                f"{sorted(slots)}. Make the optimizer of this model: "
                "te.Optimizer(model, tx)."
            )
        of_layer = layers[path]
        result = functional.insert_ids(
            of_layer.tables.get_value(), slots[path], features, of_layer.plan, now
        )
        of_layer.tables.set_value(result.tables)
        stats = of_layer.dynamic_stats.get_value() | result.stats
        of_layer.dynamic_stats.set_value(stats)
        self.slots.set_value(slots | {path: result.slots})
        return result.features

    def finalize_variable_values(self, model: nnx.Module) -> None:
        """Sets the model to the moving averages that `adafactor` keeps of it.

        Call it after the last step, as Keras does at the end of `fit`. Tables and dense
        parameters whose optimizer keeps no averages stay as they are. Donate both under
        `jit`; otherwise the tables are in memory twice for a moment.

        Args:
          model: the one this optimizer was made for; it changes in place.

        Example:
          >>> import jax.numpy as jnp
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
          >>> rule = te.optimizers.adafactor(0.1, use_ema=True)
          >>> layer = te.TPUEmbedding(
          ...     te.FeatureConfig(table=table), rule, rngs=nnx.Rngs(0)
          ... )
          >>> optimizer = Optimizer(layer, rule)
          >>> optimizer.finalize_variable_values(layer)
        """
        layers = embedding_layers(model)
        params = nnx.state(model, self.dense.wrt)
        final = final_model_values(
            {
                path: (layer.tables.get_value(), layer.plan)
                for path, layer in layers.items()
            },
            self.slots.get_value(),
            _arrays(params),
            _arrays(self.dense.opt_state),
        )
        for path, tables in final.tables.items():
            layers[path].tables.set_value(tables)
        self.slots.set_value(final.slots)
        _set_arrays(params, final.params)
        nnx.update(model, params)
        _set_arrays(self.dense.opt_state, final.opt_state)

    def set_hyperparameters(self, **values: Any) -> None:
        """Changes hyper-parameters of the tables' optimizers without a recompilation.

        Args:
          **values: see `tpu_embedding.optimizers.with_hyperparameters`; those of the
            dense optimizer are in `dense.opt_state`.

        Raises:
          ValueError: if no table's optimizer has one of that name.

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
        """Returns the slot variables of each table, by table and name.

        Args:
          parts: see `tpu_embedding.functional.slot_values`.

        Returns:
          Table name to slot name to NumPy array `[vocabulary_size, dim]` or
          `[vocabulary_size]`. If layers have tables of one name, their keys are
          `"path of the layer/table name"`.

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
            keys[path, name]: of_table
            for path, plan in self.plans
            for name, of_table in slot_values(slots[path], plan, parts).items()
        }

    def set_embedding_tables(
        self, model: nnx.Module, values: Mapping[str, Any]
    ) -> None:
        """Replaces the values of some tables, and the state that was made from them.

        Moving averages and Adafactor's scale of a table follow the new values. All
        other slot variables stay. Rows whose values do not change keep their averages.

        Args:
          model: the one this optimizer was made for; it changes in place.
          values: table name to real numbers `[vocabulary_size, dim]`. If layers have
            tables of one name, their keys are `"path of the layer/table name"`.

        Raises:
          TypeError: if `values` is no dict.
          ValueError: if a table is unknown, an array does not fit, or the model is
            another one.

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
        layers, slots = embedding_layers(model), dict(self.slots.get_value())
        if set(layers) != set(slots):
            raise ValueError(
                "set_embedding_tables needs the model that the optimizer was made for, "
                f"got layers {sorted(layers)} of the model and {sorted(slots)} of the "
                "optimizer."
            )
        keys = _keys(
            (path, table.name)
            for path, plan in self.plans
            for stack in plan.stacks
            for table in stack.tables
        )
        unknown = sorted(set(values) - set(keys.values()))
        if unknown:
            raise ValueError(
                f"values must name tables of the model, {sorted(keys.values())}, got "
                f"{unknown}."
            )
        tables = {}
        for path, plan in self.plans:
            own = {
                name: values[key]
                for (layer, name), key in keys.items()
                if layer == path and key in values
            }
            old = layers[path].tables.get_value()
            tables[path], slots[path] = with_table_values(old, own, plan, slots[path])
        for path, layer in layers.items():
            layer.tables.set_value(tables[path])
        self.slots.set_value(slots)

    def set_slot_values(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces some slot variables, as `te.functional.with_slot_values` does.

        Args:
          values: result of `slot_values`; tables and slots may be missing.

        Raises:
          TypeError: if a value is no array of real numbers.
          ValueError: if a table or slot is unknown, or a value has the wrong shape.
        """
        line = "values={'movie': {'accumulators': array}}, by table and slot name"
        check_mapping("values", values, line)
        keys = self._table_keys()
        unknown = sorted(set(values) - set(keys.values()))
        if unknown:
            raise ValueError(
                "values must name tables that have an optimizer, "
                f"{sorted(keys.values())}, got {unknown}."
            )
        slots = dict(self.slots.get_value())
        for path, plan in self.plans:
            own = {
                name: values[key]
                for (layer, name), key in keys.items()
                if layer == path and key in values
            }
            slots[path] = with_slot_values(slots[path], own, plan)
        self.slots.set_value(slots)

    def _table_keys(self) -> dict[tuple[str, str], str]:
        """Returns the key of each trained table by layer and name."""
        return _keys(
            (path, table.name)
            for path, plan in self.plans
            for stack in plan.trained_stacks
            for table in stack.tables
        )


def _keys(tables: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Returns the shortest key of each table, by layer and name."""
    tables = list(tables)
    names = [name for _, name in tables]
    return {
        (path, name): name if names.count(name) == 1 else f"{path}/{name}"
        for path, name in tables
    }


def trained(wrt: nnx.filterlib.Filter) -> nnx.filterlib.Filter:
    """Returns the filter without guards, which have no derivative.

    Gradients of `value_and_grad` then lack a parameter that an `nnx.Optimizer` has, so
    it fails on them. It would train the dense parameters, and leave the tables.
    """
    return nnx.All(wrt, nnx.Not(GradientGuard))


def _dynamic_layer(layers: Mapping[str, TPUEmbedding], path: str | None) -> str:
    """Returns the path of the layer whose ids are inserted."""
    dynamic = [p for p, x in layers.items() if any(s.is_dynamic for s in x.plan.stacks)]
    if path is None and len(dynamic) == 1:
        return dynamic[0]
    if path not in dynamic:
        raise ValueError(
            "Optimizer.insert_ids: layer must be the path of a layer with a te.Dynamic "
            f"vocabulary, one of {dynamic}, got {path!r}; None is for a single one."
        )
    return path


def checked_layers(owner: str, model: nnx.Module, line: str) -> dict[str, TPUEmbedding]:
    """Returns the model's `TPUEmbedding` layers by their path, at least one.

    Args:
      owner: name of the function that takes the model, which Flax has, too.
      model: the value that the user gives as model.
      line: the line to write if it is no model.

    Raises:
      TypeError: if it is no Flax module.
      ValueError: if it has no layer.
    """
    layers = embedding_layers(model)
    if not layers:
        check_type(f"{owner}: model", MODEL, model, line)
        raise ValueError(f"{NO_LAYER} {owner.replace('te.', 'nnx.')}.")
    return layers


@contextlib.contextmanager
def explain_branches() -> Iterator[None]:
    """Explains the error of `nnx.cond` and `nnx.scan` around the call of a layer.

    Flax compares the variables of a model before and after, among them the record of
    the calls.
    """
    try:
        yield
    except TypeError as error:
        if RECORDED not in str(error):
            raise
        raise ValueError(CALL_OUTSIDE) from error


def embedding_layers(model: nnx.Module) -> dict[str, TPUEmbedding]:
    """Returns the model's `TPUEmbedding` layers by their path, `"a/b"`.

    Raises:
      ValueError: if two layers have the same path, as a key holds a slash.
    """
    layers: dict[str, TPUEmbedding] = {}
    for keys, module in nnx.iter_modules(model):
        if isinstance(module, TPUEmbedding):
            path = "/".join(map(str, keys))
            if path in layers:
                raise ValueError(
                    f"Two TPUEmbedding layers of the {type(model).__name__} have the "
                    f"path {path!r}; rename the attribute whose name holds a slash."
                )
            layers[path] = module
    return layers


def _arrays(tree: Any) -> Any:
    """Returns a pytree with the values of variables in the place of these."""
    return jax.tree.map(
        lambda x: x.get_value() if isinstance(x, nnx.Variable) else x,
        tree,
        is_leaf=_is_variable,
    )


def _set_arrays(tree: Any, values: Any) -> None:
    """Sets the variables of a pytree to the values of another one."""
    variables, structure = jax.tree.flatten(tree, is_leaf=_is_variable)
    new = structure.flatten_up_to(values)
    for variable, value in zip(variables, new, strict=True):
        variable.set_value(value)


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def put_on_mesh(module: nnx.Module, plan: EmbeddingPlan) -> None:
    """Replicates arrays that lie on one device over the mesh; tables stay."""
    nnx.update(module, replicate_on_mesh(nnx.state(module), plan))
