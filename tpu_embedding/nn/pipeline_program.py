"""The compiled part of a pipelined train step: pure functions of states and batches.

The state is that of the pair (model, optimizer). `pipeline.py` keeps it, and what is in
flight, between calls.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.extend as jex
from flax import nnx
from jax.interpreters import partial_eval

from tpu_embedding import functional
from tpu_embedding.gradients import Gradients, TableGradients
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.nn.recording import add_calls
from tpu_embedding.nn.training import ModelLoss, Variables, embedding_layers
from tpu_embedding.plan.shard_map import constrain_first_axis, zeros_like
from tpu_embedding.xla import read_before_write

PipelineMode = Literal["exact", "stale"]
Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a loss, without the model."""
Calls = dict[str, tuple[Any, ...]]
"""Path of a layer to one value per call."""
Path = tuple[str, ...]
"""Keys from the root of a pytree to a leaf."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
    """A batch whose lookup has begun.

    Attributes:
      calls: routed ids in mode `"exact"`, results of lookups in mode `"stale"`.
      batch: the batch with rows in place of ids; None: as the caller has it.
    """

    calls: Calls
    batch: Batch | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PipelineProgram:
    """The functions that begin a pipeline and advance it by a batch.

    Attributes:
      loss_fn: see `PipelinedTrainStep`, as for all attributes.
      mode: `"exact"` or `"stale"`.
      wrt: filter of the dense parameters.
      has_aux: True if the loss returns a second value.
      transform_gradients: applied before the update, or None.
      insert_ids: gives rows to the new ids of a batch, or None.
    """

    loss_fn: Callable[..., Any]
    mode: PipelineMode
    wrt: nnx.filterlib.Filter
    has_aux: bool
    transform_gradients: Callable[[Gradients], Gradients] | None = None
    insert_ids: Callable[..., Any] | None = None

    def jit(
        self, state: nnx.State, compiler_options: dict[str, str]
    ) -> tuple[Any, Any]:
        """Returns `begin` and `advance` under `jit`; both donate what they change.

        Args:
          state: state of (model, optimizer): arrays, or shapes with shardings. The new
            state keeps the shardings.
          compiler_options: options of XLA.
        """
        jit = functools.partial(
            jax.jit, static_argnums=0, compiler_options=compiler_options
        )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        advance = jit(
            self.advance, donate_argnums=1, out_shardings=(shardings, None, None)
        )
        if self.insert_ids is None:
            return jit(self.begin), advance
        begin = jit(self.begin, donate_argnums=1, out_shardings=(shardings, None))
        return begin, advance

    def begin(
        self, graph: nnx.GraphDef, state: nnx.State, batch: Batch
    ) -> tuple[nnx.State | None, InFlight]:
        """Begins the lookup of the first batch.

        Returns:
          New state, None if it does not change; and what is in flight.
        """
        model, optimizer = nnx.merge(graph, state)
        if self.insert_ids is not None:
            in_flight = self._insert(model, optimizer, batch)
            return nnx.state((model, optimizer)), in_flight
        routed = self._route(model, batch)
        if self.mode == "stale":
            routed = _read(model, routed)
        return None, InFlight(calls=routed)

    def advance(
        self,
        graph: nnx.GraphDef,
        state: nnx.State,
        in_flight: InFlight,
        batch: Batch | None,
        next_batch: Batch | None,
    ) -> tuple[nnx.State, InFlight | None, Any]:
        """Trains on a batch, and begins the lookup of the next one.

        Args:
          graph: graph of (model, optimizer).
          state: state of (model, optimizer).
          in_flight: what is known about the batch.
          batch: to train on; None: the one in flight.
          next_batch: to look up; None: none.

        Returns:
          New state, what is in flight for the next batch, and the loss, or
          `(loss, aux)`.
        """
        model, optimizer = nnx.merge(graph, state)
        batch = batch or in_flight.batch
        assert batch is not None
        routed, next_in_flight = None, None
        if next_batch is not None and self.insert_ids is None:
            routed = self._route(model, next_batch)
        if self.mode == "exact":
            lookups = _read(model, in_flight.calls)
        else:
            lookups = in_flight.calls
            if routed is not None:
                routed = _read_before_update(model, routed)
        result, dense, cotangents = self._differentiate(model, lookups, batch)
        gradients = Gradients(
            dense=dense, tables=_table_gradients(model, lookups, cotangents)
        )
        if self.transform_gradients is not None:
            gradients = self.transform_gradients(gradients)
        optimizer.update(model, gradients)
        if routed is not None:
            next_in_flight = InFlight(calls=routed)
        elif next_batch is not None:
            next_in_flight = self._insert(model, optimizer, next_batch)
        return nnx.state((model, optimizer)), next_in_flight, result

    def _insert(
        self, model: nnx.Module, optimizer: nnx.Module, batch: Batch
    ) -> InFlight:
        """Gives rows to the new ids of a batch, and routes the rows of its ids.

        It depends on the directories of ids alone, which an update leaves as they are.
        Only the initial values of new rows wait for the update of the batch before.
        """
        assert self.insert_ids is not None
        args, kwargs = batch
        if kwargs:
            raise TypeError(
                "A PipelinedTrainStep with insert_ids takes the batch by position, got "
                f"the arguments {sorted(kwargs)} by name."
            )
        found = self.insert_ids(model, optimizer, *args)
        if not isinstance(found, tuple):
            raise TypeError(
                "PipelinedTrainStep's insert_ids must return a tuple of the arguments "
                f"of the loss after the model, got {type(found).__name__}. Write "
                "insert_ids=lambda model, optimizer, ids, labels: "
                "(optimizer.insert_ids(model, ids), labels)."
            )
        plan = next(iter(embedding_layers(model).values())).plan
        found = jax.tree.map(
            lambda leaf: constrain_first_axis(leaf, plan, plan.sample_axes), found
        )
        new_batch = (found, {})
        return InFlight(calls=self._route(model, new_batch), batch=new_batch)

    def _route(self, model: nnx.Module, batch: Batch) -> Calls:
        """Routes the ids of all calls that the loss makes for a batch."""
        loss = self._loss_of(model)
        args, kwargs = batch
        _, (_, activations) = jax.eval_shape(
            lambda args, kwargs: loss.run(
                loss.variables, "shapes", None, *args, **kwargs
            ),
            args,
            kwargs,
        )
        activations = zeros_like(activations)

        def record(batch, variables, activations):
            args, kwargs = batch
            _, ((_, rest), routed) = loss.run(
                variables, "routes", activations, *args, **kwargs
            )
            return routed, rest

        routed = _keep_routing(record, batch, loss.variables, activations)
        plan = next(iter(loss.plans.values()))
        return jax.tree.map(
            lambda leaf: constrain_first_axis(leaf, plan, plan.sample_axes), routed
        )

    def _differentiate(
        self, model: nnx.Module, lookups: Calls, batch: Batch
    ) -> tuple[Any, nnx.State, Calls]:
        """Computes the loss, given all lookups; keeps the model's new variables.

        Returns:
          The result of the step, and the derivatives by dense parameters and by the
          activations of each call.
        """
        loss = self._loss_of(model)
        args, kwargs = batch

        def run(dense, activations):
            answers = {
                path: tuple(
                    dataclasses.replace(call, activations=each)
                    for call, each in zip(calls, activations[path], strict=True)
                )
                for path, calls in lookups.items()
            }
            variables = dataclasses.replace(loss.variables, dense=dense)
            value, (kept, _) = loss.run(variables, "answers", answers, *args, **kwargs)
            return value, kept

        activations = {
            path: tuple(call.activations for call in calls)
            for path, calls in lookups.items()
        }
        (value, (aux, rest)), (dense, cotangents) = jax.value_and_grad(
            run, argnums=(0, 1), has_aux=True
        )(loss.variables.dense, activations)
        nnx.update(model, rest)
        return ((value, aux) if self.has_aux else value), dense, cotangents

    def _loss_of(self, model: nnx.Module) -> ModelLoss:
        return ModelLoss(self.loss_fn, model, wrt=self.wrt, has_aux=self.has_aux)


def _read(model: nnx.Module, routed: Calls) -> Calls:
    """Reads the rows of routed calls from the model's tables."""

    def read(layer: TPUEmbedding, call: functional.Routing) -> functional.LookupResult:
        plan = layer.plan
        result = functional.read_rows(layer.tables.get_value(), call, plan)
        constrained = jax.tree.map(
            lambda x: constrain_first_axis(x, plan, plan.sample_axes), result
        )
        activations = jax.tree.map(
            lambda x: constrain_first_axis(x, plan, plan.sample_axes),
            result.activations,
        )
        return dataclasses.replace(constrained, activations=activations)

    return {
        path: tuple(read(layer, call) for call in routed[path])
        for path, layer in embedding_layers(model).items()
    }


def _read_before_update(model: nnx.Module, routed: Calls) -> Calls:
    """Reads rows; an update of the model's tables waits for it.

    Without this order, XLA may write rows before it reads them, into a copy of the
    whole table.
    """
    layers = embedding_layers(model)
    tables = {path: layer.tables.get_value() for path, layer in layers.items()}
    tables, lookups = read_before_write((tables, _read(model, routed)))
    for path, layer in layers.items():
        layer.tables.set_value(tables[path])
    return lookups


def _table_gradients(
    model: nnx.Module, lookups: Calls, cotangents: Calls
) -> dict[str, TableGradients]:
    """Returns the gradients of each layer's tables, summed over its calls."""
    return {
        path: add_calls(
            tuple(call.routing for call in lookups[path]),
            cotangents[path],
            layer.plan,
        )
        for path, layer in embedding_layers(model).items()
    }


def _keep_routing(
    record: Callable[..., tuple[Calls, nnx.State]],
    batch: Batch,
    variables: Variables,
    activations: Calls,
) -> Calls:
    """Returns the routed calls of a loss, and runs nothing else of it.

    Args:
      record: takes the other arguments by name, and returns `(routed, rest)`.
      batch: arguments of the loss.
      variables: variables of the model.
      activations: placeholders, per call.

    Raises:
      ValueError: if the routed calls depend on an activation, or on a variable that the
        loss or the optimizer changes.
    """
    inputs = dict(activations=activations, batch=batch, variables=variables)
    structure, new_rest = None, {}

    def record_leaves(inputs):
        nonlocal structure, new_rest
        routed, rest = record(**inputs)
        leaves, structure = jax.tree.flatten(routed)
        new_rest = dict.fromkeys(_paths(rest))
        return *leaves, *jax.tree.leaves(rest)

    closed = jax.make_jaxpr(record_leaves)(inputs)
    assert structure is not None
    # Prints and callbacks of the loss would keep alive what they print.
    eqns = [eqn for eqn in closed.jaxpr.eqns if eqn.outvars]
    jaxpr = closed.jaxpr.replace(eqns=eqns)
    num_routed = structure.num_leaves
    is_routed = [i < num_routed for i in range(len(jaxpr.outvars))]
    needed, is_used = partial_eval.dce_jaxpr(jaxpr, is_routed)
    used = [i for i, each in enumerate(is_used) if each]
    new_rest = dict(zip(new_rest, jaxpr.outvars[num_routed:], strict=True))
    paths = _paths(inputs)
    for i in used:
        _refuse_trained(paths[i], jaxpr.invars[i], new_rest)
    run = jex.core.jaxpr_as_fun(closed.replace(jaxpr=needed))
    leaves = jax.tree.leaves(inputs)
    return jax.tree.unflatten(structure, run(*[leaves[i] for i in used]))


def _refuse_trained(path: Path, invar: Any, new_rest: dict[Path, Any]) -> None:
    """Raises if an input that features depend on is an activation or is trained."""
    kind, name = path[0], "/".join(path[2:])
    is_rest = path[:2] == ("variables", "rest")
    if kind == "batch" or (is_rest and new_rest.get(path[2:]) is invar):
        return
    if kind == "variables":
        raise ValueError(
            "Features of a PipelinedTrainStep must depend on the batch only, got ids "
            f"or weights that depend on the variable {name!r}, which training changes "
            "after the next lookup has begun. Use te.value_and_grad for this model."
        )
    raise ValueError(
        "Features of a PipelinedTrainStep must depend on the batch only, got ids or "
        f"weights that depend on the activations of layer {path[1]!r}, which are not "
        "there when the next lookup begins. Use te.value_and_grad for this model."
    )


def _paths(tree: Any) -> list[Path]:
    """Returns the path of each leaf, as strings."""
    return [
        tuple(_key_name(key) for key in path)
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _key_name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
